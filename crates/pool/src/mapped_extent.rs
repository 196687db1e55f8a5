//! An extent in this process's address space.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use thiserror::Error;

use crate::extent::Extent;
use crate::media::{Access, Durability, How, Memory, fence};

/// An extent cannot be mapped.
#[derive(Debug, Error)]
#[error("mapping the extent at {} of {} bytes", extent.offset, extent.len)]
pub struct MapExtentError {
    /// The extent.
    pub extent: Extent,
    /// What the system said.
    pub source: io::Error,
}

/// Guest memory and tail of an extent, mapped shared; unmapped on drop.
///
/// Other processes may have the same bytes mapped, so no reference into it is ever made. Offsets are bytes from the begin of guest memory
/// or of the tail. A range outside, and a write to a mapping for reading, panics.
#[derive(Debug)]
pub struct MappedExtent {
    memory: Memory,
    file: File,
    extent: Extent,
    durability: Durability,
}

impl MappedExtent {
    /// Maps an extent of the medium behind `descriptor`. `granule` is the pool's, and `durability` the medium's.
    ///
    /// # Errors
    /// The system refuses.
    pub fn map(
        descriptor: OwnedFd,
        extent: Extent,
        granule: u64,
        durability: Durability,
        access: Access,
    ) -> Result<Self, MapExtentError> {
        let failed = |source: io::Error| MapExtentError { extent, source };
        let sound = extent.offset.checked_add(extent.len).is_some()
            && granule.is_power_of_two()
            && extent.tail_offset.checked_sub(extent.offset).is_some_and(|room| {
                room >= extent.guest_bytes
                    && room.checked_add(extent.tail_bytes).is_some_and(|end| end <= extent.len)
            });
        if !sound {
            let what =
                io::Error::new(io::ErrorKind::InvalidInput, "its numbers contradict each other");
            return Err(failed(what));
        }
        let file = File::from(descriptor);
        let writable = access == Access::Write;
        // Durable by cache lines alone: then the file system must have nothing to write either.
        let synchronous = writable && matches!(durability, Durability::CacheLines(_));
        let how = How { writable, synchronous, align: granule };
        let memory = Memory::map(&file, extent.offset, extent.len, how)
            .map_err(|errno| failed(errno.into()))?;
        Ok(Self { memory, file, extent, durability })
    }

    /// Where it is on the medium.
    #[must_use]
    pub fn extent(&self) -> Extent {
        self.extent
    }

    /// The host-virtual address of guest memory. It is aligned to 2 MiB at least.
    #[must_use]
    pub fn guest_address(&self) -> *mut u8 {
        self.memory.base()
    }

    fn guest(&self, offset: u64, len: usize) -> u64 {
        within(offset, len, self.extent.guest_bytes)
    }

    fn tail(&self, offset: u64, len: usize) -> u64 {
        self.extent.tail_offset - self.extent.offset + within(offset, len, self.extent.tail_bytes)
    }

    /// Copies a part of guest memory out.
    pub fn read_guest(&self, offset: u64, buffer: &mut [u8]) {
        self.memory.load(self.guest(offset, buffer.len()), buffer);
    }

    /// Copies a part of the tail out.
    pub fn read_tail(&self, offset: u64, buffer: &mut [u8]) {
        self.memory.load(self.tail(offset, buffer.len()), buffer);
    }

    /// Copies bytes into guest memory.
    pub fn write_guest(&self, offset: u64, bytes: &[u8]) {
        self.memory.store(self.guest(offset, bytes.len()), bytes);
    }

    /// Writes zeros into guest memory.
    pub fn zero_guest(&self, offset: u64, len: u64) {
        let end = offset.checked_add(len);
        assert!(end.is_some_and(|end| end <= self.extent.guest_bytes), "within guest memory");
        self.memory.zero(offset, len);
    }

    /// Copies bytes into the tail.
    pub fn write_tail(&self, offset: u64, bytes: &[u8]) {
        self.memory.store(self.tail(offset, bytes.len()), bytes);
    }

    /// Maps every page in this process's page tables now (`MADV_POPULATE_READ`, or `_WRITE` where it is mapped for writing).
    ///
    /// # Errors
    /// The system refuses: memory is short, or the medium has bad pages.
    pub fn populate(&self) -> io::Result<()> {
        Ok(self.memory.populate()?)
    }

    /// Makes all that was written durable.
    ///
    /// # Errors
    /// The medium is a file and cannot be synced.
    pub fn flush(&self) -> io::Result<()> {
        match self.durability {
            Durability::CacheLines(instruction) => {
                self.memory.flush(instruction, 0, self.memory.len());
                fence();
            }
            Durability::FileSync => rustix::fs::fdatasync(&self.file)?,
            Durability::Volatile => {}
        }
        Ok(())
    }
}

fn within(offset: u64, len: usize, room: u64) -> u64 {
    let end = offset.checked_add(firn_base::num::u64_of(len));
    assert!(end.is_some_and(|end| end <= room), "{offset} + {len} is outside of {room} bytes");
    offset
}
