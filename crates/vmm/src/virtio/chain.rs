//! Descriptor chains of a guest, checked before any device looks at them.

use thiserror::Error;
use virtio_queue::DescriptorChain;
use vm_memory::{Bytes, GuestAddress, GuestMemory, GuestMemoryError, Permissions, VolatileSlice};

use firn_memory::GuestView;

/// How a guest's descriptor chain breaks the rules of virtio 1.2, 2.7.
#[derive(Debug, Error)]
pub(crate) enum ChainFault {
    /// It is empty, loops, or leads out of its table.
    #[error("the chain does not come to an end within its table")]
    Unterminated,
    /// It has more buffers than the queue has descriptors.
    #[error("the chain has more than {limit} buffers")]
    TooLong {
        /// Size of the queue.
        limit: u16,
    },
    /// A device-readable buffer follows a device-writable one.
    #[error("a device-readable buffer follows a device-writable one")]
    Order,
    /// A buffer is not guest memory.
    #[error("a buffer of {len} bytes at {addr:#x} is not guest memory")]
    Outside {
        /// Guest-physical address.
        addr: u64,
        /// Bytes.
        len: u32,
    },
    /// The device needs more bytes than the buffers have.
    #[error("the device needs {needed} bytes of buffers and finds {found}")]
    TooShort {
        /// Bytes that the device needs.
        needed: usize,
        /// Bytes that are there.
        found: usize,
    },
    /// The device does not take this kind of buffer, size or alignment.
    #[error("a buffer of {len} bytes at {addr:#x} is none that this queue takes")]
    Unsuitable {
        /// Guest-physical address.
        addr: u64,
        /// Bytes.
        len: u32,
    },
    /// Guest memory that was there is not accessible.
    #[error("guest memory cannot be accessed")]
    Memory(#[from] GuestMemoryError),
}

/// One buffer in guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) addr: GuestAddress,
    pub(crate) len: u32,
}

/// Buffers seen as one run of bytes: no device depends on how a driver cuts its requests
/// (virtio 1.2, 2.7.4.3).
#[derive(Debug)]
pub(crate) struct Buffers {
    /// What the device may do with them: guest memory that is written may have to be copied first.
    access: Permissions,
    segments: Vec<Segment>,
    len: usize,
}

/// A request of the guest: every buffer lies in guest memory, those that the device reads come before
/// those that it writes.
#[derive(Debug)]
pub(crate) struct Chain {
    head: u16,
    /// What the driver gives to the device.
    pub(crate) readable: Buffers,
    /// What the device may fill.
    pub(crate) writable: Buffers,
}

impl Chain {
    /// Reads a chain of at most `limit` buffers out of its table.
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
            // The iterator ends silently at whatever it cannot follow; a chain that is whole ends with
            // a descriptor that has no next, and returns below.
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
            let len = to_usize(segment.len);
            if len > 0 && !GuestMemory::check_range(mem, segment.addr, len, access) {
                return Err(ChainFault::Outside { addr: segment.addr.0, len: segment.len });
            }
            if !descriptor.has_next() {
                return Ok(chain);
            }
        }
        Err(ChainFault::TooLong { limit })
    }

    /// Index under which the chain goes into the used ring.
    #[must_use]
    pub(crate) fn head(&self) -> u16 {
        self.head
    }
}

impl Buffers {
    fn of(access: Permissions) -> Self {
        Self { access, segments: Vec::new(), len: 0 }
    }

    /// Adds a buffer, and says what may be done with it.
    fn push(&mut self, segment: Segment) -> Permissions {
        if segment.len > 0 {
            // A chain's descriptors sum up to less than 2^32 bytes: virtio_queue ends it before.
            self.len = self.len.saturating_add(to_usize(segment.len));
            self.segments.push(segment);
        }
        self.access
    }

    /// Bytes.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The buffers themselves, none of them empty.
    pub(crate) fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The `len` bytes from `offset` on, as slices of guest memory: for reading, and those of the writable buffers for
    /// writing, too.
    ///
    /// # Errors
    /// [`ChainFault::TooShort`] when the buffers end before.
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
            let size = to_usize(segment.len);
            if left == 0 {
                break;
            }
            if skip >= size {
                skip -= size;
                continue;
            }
            let part = left.min(size - skip);
            let addr = segment.addr.0.saturating_add(to_u64(skip));
            for slice in mem.get_slices(GuestAddress(addr), part, access)? {
                slices.push(slice?);
            }
            skip = 0;
            left -= part;
        }
        Ok(slices)
    }

    /// Copies the bytes from `offset` on into `data`.
    ///
    /// # Errors
    /// [`ChainFault::TooShort`] when the buffers end before.
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

    /// Copies `data` to the bytes from `offset` on.
    ///
    /// # Errors
    /// [`ChainFault::TooShort`] when the buffers end before.
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

/// A descriptor's length as a size of the host, which is 64-bit.
pub(crate) fn to_usize(len: u32) -> usize {
    usize::try_from(len).unwrap_or(usize::MAX)
}

/// A size of the host as an offset in a file or in guest memory.
pub(crate) fn to_u64(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}

#[cfg(test)]
#[path = "chain_tests.rs"]
mod tests;
