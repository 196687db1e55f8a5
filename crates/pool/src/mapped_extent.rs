//! An extent mapped into this process.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use firn_base::begin_writeback;
use firn_base::num::{u64_of, usize_of};
use thiserror::Error;

use crate::extent::Extent;
use crate::media::{Access, Durability, How, Memory, fence};
use crate::window::Window;

/// Why an extent cannot be mapped.
#[derive(Debug, Error)]
#[error("cannot map the extent of {} bytes at {}", extent.len, extent.offset)]
pub struct MapExtentError {
    /// The extent.
    pub extent: Extent,
    /// The system's error.
    pub source: io::Error,
}

/// Guest memory and tail of an extent, mapped shared. Dropping it unmaps them.
///
/// Other processes may have the same bytes mapped, so no reference points into the mapping. Offsets
/// are in bytes from the beginning of guest memory or of the tail. A range outside, or a write to a
/// read-only mapping, panics.
#[derive(Debug)]
pub struct MappedExtent {
    memory: Memory,
    /// For writes through the file. Other mappings keep no descriptor, because one gives access to
    /// the whole medium.
    file: Option<File>,
    extent: Extent,
    /// Where in the file the extent begins.
    begin: u64,
    durability: Durability,
}

impl MappedExtent {
    /// Maps an extent from the descriptor that was granted for it, in which it begins at `begin`.
    /// `granule` is the pool's, `durability` the medium's.
    ///
    /// # Errors
    /// The extent is invalid, or mapping fails.
    pub fn map(
        descriptor: OwnedFd,
        begin: u64,
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
            let what = io::Error::new(
                io::ErrorKind::InvalidInput,
                "its offsets and lengths are inconsistent",
            );
            return Err(failed(what));
        }
        let file = File::from(descriptor);
        let writable = access == Access::Write;
        // Cache-line flushes suffice only if the file system has no unwritten metadata.
        let synchronous = writable && matches!(durability, Durability::CacheLines(_));
        let how = How { writable, synchronous, align: granule };
        let memory =
            Memory::map(&file, begin, extent.len, how).map_err(|errno| failed(errno.into()))?;
        let file = (writable && durability == Durability::FileSync).then_some(file);
        Ok(Self { memory, file, extent, begin, durability })
    }

    /// Location on the medium.
    #[must_use]
    pub fn extent(&self) -> Extent {
        self.extent
    }

    fn guest(&self, offset: u64, len: usize) -> u64 {
        within(offset, len, self.extent.guest_bytes)
    }

    fn tail(&self, offset: u64, len: usize) -> u64 {
        self.extent.tail_offset - self.extent.offset + within(offset, len, self.extent.tail_bytes)
    }

    /// Copies a part of guest memory into `buffer`.
    pub fn read_guest(&self, offset: u64, buffer: &mut [u8]) {
        self.memory.load(self.guest(offset, buffer.len()), buffer);
    }

    /// Copies a part of the tail into `buffer`.
    pub fn read_tail(&self, offset: u64, buffer: &mut [u8]) {
        self.memory.load(self.tail(offset, buffer.len()), buffer);
    }

    /// Copies bytes into guest memory. Several threads may do it.
    ///
    /// # Errors
    /// The medium is a file, and the file system refuses the write.
    pub fn write_guest(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.write(self.guest(offset, bytes.len()), bytes)
    }

    /// Copies bytes into the tail. Several threads may do it.
    ///
    /// # Errors
    /// As of [`write_guest`](Self::write_guest).
    pub fn write_tail(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.write(self.tail(offset, bytes.len()), bytes)
    }

    /// Copies `len` bytes at `start` of a window into guest memory. Several threads may do it.
    ///
    /// # Errors
    /// As of [`write_guest`](Self::write_guest).
    pub fn write_guest_from(
        &self,
        offset: u64,
        window: &Window,
        start: u64,
        len: u64,
    ) -> io::Result<()> {
        self.write_from(self.guest(offset, usize_of(len)), window, start, len)
    }

    /// Copies `len` bytes at `start` of a window into the tail. Several threads may do it.
    ///
    /// # Errors
    /// As of [`write_guest`](Self::write_guest).
    pub fn write_tail_from(
        &self,
        offset: u64,
        window: &Window,
        start: u64,
        len: u64,
    ) -> io::Result<()> {
        self.write_from(self.tail(offset, usize_of(len)), window, start, len)
    }

    fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        let store = |memory: &Memory| memory.store(at, bytes);
        self.put(at, u64_of(bytes.len()), store, |file, begin| file.write_all_at(bytes, begin))
    }

    fn write_from(&self, at: u64, window: &Window, start: u64, len: u64) -> io::Result<()> {
        let from = window.memory();
        let store = |memory: &Memory| memory.copy(at, from, start, len);
        self.put(at, len, store, |file, begin| from.write_to(start, len, file, begin))
    }

    /// Writes `len` bytes at `at` of the extent, with `store` or, at an offset of the medium, with
    /// `write`. The processor's caches are flushed at once, because a fence orders only the flushes
    /// of its own processor, and then only what was written is flushed.
    fn put(
        &self,
        at: u64,
        len: u64,
        store: impl FnOnce(&Memory),
        write: impl FnOnce(&File, u64) -> io::Result<()>,
    ) -> io::Result<()> {
        match self.durability {
            Durability::CacheLines(instruction) => {
                store(&self.memory);
                self.memory.flush(instruction, at, len);
                fence();
            }
            // A store into the mapping would read the old bytes of the page, one page at a time.
            Durability::FileSync => {
                assert!(self.memory.is_writable(), "a read-only mapping must not be written");
                let Some(file) = &self.file else { return Ok(()) };
                let begin = self.begin + at;
                write(file, begin)?;
                begin_writeback(file, begin..begin + len);
            }
            Durability::Volatile => store(&self.memory),
        }
        Ok(())
    }

    /// Makes all written bytes durable.
    ///
    /// # Errors
    /// The medium is a file and `fdatasync` fails.
    pub fn flush(&self) -> io::Result<()> {
        // On other media, each write was followed by flush and fence.
        Ok(self.file.as_ref().map_or(Ok(()), rustix::fs::fdatasync)?)
    }
}

fn within(offset: u64, len: usize, room: u64) -> u64 {
    let end = offset.checked_add(u64_of(len));
    assert!(end.is_some_and(|end| end <= room), "{offset} + {len} is outside of {room} bytes");
    offset
}
