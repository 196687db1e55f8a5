//! Descriptor chains of a guest, validated before any device uses them.

use thiserror::Error;
use virtio_queue::DescriptorChain;
use vm_memory::{Bytes, GuestAddress, GuestMemory, GuestMemoryError, Permissions, VolatileSlice};

use firn_base::num::{u64_of, usize_of};
use firn_memory::GuestView;

/// Why a guest's descriptor chain violates virtio 1.2, 2.7.
#[derive(Debug, Error)]
pub(crate) enum ChainFault {
    /// The chain is empty, loops, or leaves its table.
    #[error("the chain does not end within its table")]
    Unterminated,
    /// The chain has more buffers than the queue has descriptors.
    #[error("the chain has more than {limit} buffers")]
    TooLong {
        /// Size of the queue.
        limit: u16,
    },
    /// A device-readable buffer follows a device-writable one.
    #[error("a device-readable buffer follows a device-writable one")]
    Order,
    /// A buffer is outside guest memory.
    #[error("a buffer of {len} bytes at {addr:#x} is outside guest memory")]
    Outside {
        /// Guest-physical address.
        addr: u64,
        /// Bytes.
        len: u32,
    },
    /// The buffers are too short.
    #[error("the device requires {needed} bytes of buffers, and the chain has {found}")]
    TooShort {
        /// Bytes that the device requires.
        needed: usize,
        /// Bytes of the chain.
        found: usize,
    },
    /// The buffer's size or alignment is invalid for this queue.
    #[error("a buffer of {len} bytes at {addr:#x} is not valid for this queue")]
    Unsuitable {
        /// Guest-physical address.
        addr: u64,
        /// Bytes.
        len: u32,
    },
    /// Guest memory cannot be accessed.
    #[error("guest memory cannot be accessed")]
    Memory(#[from] GuestMemoryError),
}

/// One buffer in guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) addr: GuestAddress,
    pub(crate) len: u32,
}

/// Buffers as one sequence of bytes: no device depends on the boundaries of the buffers (virtio
/// 1.2, 2.7.4.3).
#[derive(Debug)]
pub(crate) struct Buffers {
    /// The device's access to them. Sealed guest memory is copied before it is written.
    access: Permissions,
    segments: Vec<Segment>,
    len: usize,
}

/// A request of the guest. Every buffer is in guest memory, and the device-readable buffers precede
/// the device-writable ones.
#[derive(Debug)]
pub(crate) struct Chain {
    head: u16,
    /// The buffers that the device reads.
    pub(crate) readable: Buffers,
    /// The buffers that the device writes.
    pub(crate) writable: Buffers,
}

impl Chain {
    /// Parses a chain of at most `limit` buffers.
    pub(crate) fn parse(
        mem: &GuestView,
        mut descriptors: DescriptorChain<&GuestView>,
        limit: u16,
    ) -> Result<Self, ChainFault> {
        let mut chain = Self {
            head: descriptors.head_index(),
            readable: Buffers::of(Permissions::Read),
            writable: Buffers::of(Permissions::ReadWrite),
        };
        for count in 0..=limit {
            // The iterator ends without an error at an invalid descriptor. A complete chain ends
            // with a descriptor without a next one, and returns below.
            let descriptor = descriptors.next().ok_or(ChainFault::Unterminated)?;
            if count == limit {
                break;
            }
            let segment = Segment { addr: descriptor.addr(), len: descriptor.len() };
            let access = if descriptor.is_write_only() {
                chain.writable.push(segment)
            } else if chain.writable.segments.is_empty() {
                chain.readable.push(segment)
            } else {
                return Err(ChainFault::Order);
            };
            let len = usize_of(segment.len.into());
            if len > 0 && !GuestMemory::check_range(mem, segment.addr, len, access) {
                return Err(ChainFault::Outside { addr: segment.addr.0, len: segment.len });
            }
            if !descriptor.has_next() {
                return Ok(chain);
            }
        }
        Err(ChainFault::TooLong { limit })
    }

    /// The chain's index in the used ring.
    #[must_use]
    pub(crate) fn head(&self) -> u16 {
        self.head
    }
}

impl Buffers {
    fn of(access: Permissions) -> Self {
        Self { access, segments: Vec::new(), len: 0 }
    }

    /// Adds a buffer, and returns the device's access to it.
    fn push(&mut self, segment: Segment) -> Permissions {
        if segment.len > 0 {
            // virtio_queue ends a chain before its sum reaches 2^32 bytes.
            self.len = self.len.saturating_add(usize_of(segment.len.into()));
            self.segments.push(segment);
        }
        self.access
    }

    /// Length in bytes.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The buffers, none of them empty.
    pub(crate) fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The `len` bytes at `offset`, as slices of guest memory. Slices of writable buffers may be
    /// written.
    ///
    /// # Errors
    /// [`ChainFault::TooShort`] if the buffers are too short.
    pub(crate) fn slices<'a>(
        &self,
        mem: &'a GuestView,
        offset: usize,
        len: usize,
    ) -> Result<Vec<VolatileSlice<'a>>, ChainFault> {
        self.slices_for(self.access, mem, offset, len)
    }

    fn slices_for<'a>(
        &self,
        access: Permissions,
        mem: &'a GuestView,
        offset: usize,
        len: usize,
    ) -> Result<Vec<VolatileSlice<'a>>, ChainFault> {
        let needed = offset.saturating_add(len);
        if needed > self.len {
            return Err(ChainFault::TooShort { needed, found: self.len });
        }
        let mut slices = Vec::new();
        let (mut skip, mut left) = (offset, len);
        for segment in &self.segments {
            let size = usize_of(segment.len.into());
            if left == 0 {
                break;
            }
            if skip >= size {
                skip -= size;
                continue;
            }
            let part = left.min(size - skip);
            let addr = segment.addr.0.saturating_add(u64_of(skip));
            for slice in mem.get_slices(GuestAddress(addr), part, access)? {
                slices.push(slice?);
            }
            skip = 0;
            left -= part;
        }
        Ok(slices)
    }

    /// Copies the bytes at `offset` to `data`.
    ///
    /// # Errors
    /// [`ChainFault::TooShort`] if the buffers are too short.
    pub(crate) fn read_at(
        &self,
        mem: &GuestView,
        offset: usize,
        data: &mut [u8],
    ) -> Result<(), ChainFault> {
        let mut done = 0;
        for slice in self.slices_for(Permissions::Read, mem, offset, data.len())? {
            done += slice.read(&mut data[done..], 0).map_err(GuestMemoryError::from)?;
        }
        Ok(())
    }

    /// Copies `data` to the bytes at `offset`.
    ///
    /// # Errors
    /// [`ChainFault::TooShort`] if the buffers are too short.
    pub(crate) fn write_at(
        &self,
        mem: &GuestView,
        offset: usize,
        data: &[u8],
    ) -> Result<(), ChainFault> {
        let mut done = 0;
        for slice in self.slices_for(Permissions::Write, mem, offset, data.len())? {
            done += slice.write(&data[done..], 0).map_err(GuestMemoryError::from)?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "chain_tests.rs"]
mod tests;
