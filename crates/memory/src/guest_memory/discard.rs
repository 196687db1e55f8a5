//! Discarding memory that the guest reports as free.

use firn_base::PAGE_SIZE;
use thiserror::Error;

use super::{Backing, GuestMemory, chunks};
use crate::slot::Slot;

/// The number of separate anonymous ranges that discards may add over memory mapped from a file.
/// Each adds up to two mappings, of which a process may have 65,530 by default
/// (`vm.max_map_count`); a guest must not exhaust the mappings of its monitor.
pub(super) const MAX_NEW_RANGES: usize = 8192;

/// Why memory was not discarded. It keeps its contents unless the error states otherwise.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DiscardError {
    /// Not whole pages.
    #[error("cannot discard {len:#x} bytes at guest address {guest_addr:#x}: not whole pages")]
    Misaligned {
        /// First byte.
        guest_addr: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Not within one region of guest memory.
    #[error(
        "cannot discard {len:#x} bytes at guest address {guest_addr:#x}: \
         not within one region of guest memory"
    )]
    OutsideMemory {
        /// First byte.
        guest_addr: u64,
        /// Length in bytes.
        len: u64,
    },
    /// The guest reports too many separate ranges.
    #[error(
        "cannot discard {len:#x} bytes at guest address {guest_addr:#x}: \
         guest memory is in {ranges} separate ranges already; report larger ones"
    )]
    TooManyRanges {
        /// First byte.
        guest_addr: u64,
        /// Length in bytes.
        len: u64,
        /// Separate anonymous ranges in guest memory.
        ranges: usize,
    },
    /// The system call failed; a part of the range may already read as zeros.
    #[error("cannot discard {len:#x} bytes at guest address {guest_addr:#x}")]
    Kernel {
        /// First byte.
        guest_addr: u64,
        /// Length in bytes.
        len: u64,
        /// The error of the system call.
        #[source]
        source: std::io::Error,
    },
}

impl GuestMemory {
    /// Discards `len` bytes at `guest_addr`, whole pages within one region: from now on they read
    /// as zeros, not as the bytes of the image, and use no DRAM until they are touched again.
    ///
    /// Some memory keeps its contents, which a guest that reports a page as free does not use: a
    /// replica in a pool, because it uses no DRAM; a copy, because the guest would get small pages
    /// for it; and a part of a sealed chunk that was not copied.
    ///
    /// It serves free page reporting (virtio 1.2, 5.5.6.6). The range may come unchecked from the
    /// guest. It may be called while vCPUs run; a concurrent write of the guest into the range may
    /// be lost or kept.
    ///
    /// # Errors
    ///
    /// [`DiscardError`]; the caller may continue, and the guest loses no data.
    pub fn discard(&self, guest_addr: u64, len: u64) -> Result<(), DiscardError> {
        if len == 0 || !guest_addr.is_multiple_of(PAGE_SIZE) || !len.is_multiple_of(PAGE_SIZE) {
            return Err(DiscardError::Misaligned { guest_addr, len });
        }
        let outside = DiscardError::OutsideMemory { guest_addr, len };
        let Some(end) = guest_addr.checked_add(len) else { return Err(outside) };
        let within =
            |slot: &&Slot| guest_addr >= slot.guest_addr && end <= slot.guest_addr + slot.len;
        let Some(slot) = self.slots.iter().find(within) else { return Err(outside) };

        let mut anonymous = self.anonymous.lock();
        let parts =
            anonymous.split(guest_addr..end).into_iter().flat_map(|(part, is_anonymous)| {
                let parts = self.copied.split(part).into_iter();
                parts.map(move |(part, is_copied)| (part, is_anonymous, is_copied))
            });
        for (part, is_anonymous, is_copied) in parts {
            if is_copied || (!is_anonymous && matches!(self.backing, Backing::Replica)) {
                continue;
            }
            let ranges = anonymous.len();
            // Sealed memory is replaced by whole chunks; a part of one uses no DRAM.
            let part = match self.backing {
                Backing::Sealed if !is_anonymous => chunks::within(part),
                _ => part,
            };
            if part.is_empty() {
                continue;
            }
            if !is_anonymous && ranges >= self.most_ranges {
                return Err(DiscardError::TooManyRanges { guest_addr, len, ranges });
            }
            let addr = slot.host_addr + (part.start - slot.guest_addr);
            let part_len = part.end - part.start;
            let done = if is_anonymous {
                self.mapped.mapping.drop_pages(addr, part_len)
            } else {
                // Dropping only the private copies would make the image's bytes visible again.
                self.mapped.mapping.map_zero(addr, part_len)
            };
            done.map_err(|e| DiscardError::Kernel { guest_addr, len, source: e.into() })?;
            if let Some(first) = self.layout.image_offset(part.start) {
                let pages = first / PAGE_SIZE..(first + part_len) / PAGE_SIZE;
                self.reported.lock().insert_range(pages);
            }
            if let Some(written) = &self.written {
                written.mark(part.start, part_len);
            }
            anonymous.insert(part);
        }
        Ok(())
    }
}
