//! Giving back memory that the guest reports as free.

use firn_base::PAGE_SIZE;
use thiserror::Error;

use super::{Backing, GuestMemory, chunks};
use crate::slot::Slot;

/// Discards may add this many separate anonymous ranges over memory mapped from a file. Each splits a
/// mapping in two more, of which a process may have 65,530 by default (`vm.max_map_count`); a guest must not
/// use up what its monitor needs.
pub(super) const MOST_NEW_RANGES: usize = 8192;

/// Why memory was not given back. It keeps its contents where the error does not say otherwise.
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
    /// The kernel refused; a part of the range may read as zeros already.
    #[error("cannot discard {len:#x} bytes at guest address {guest_addr:#x}")]
    Kernel {
        /// First byte.
        guest_addr: u64,
        /// Length in bytes.
        len: u64,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
}

impl GuestMemory {
    /// Gives back `len` bytes at `guest_addr`, whole pages within one region: from now on they read as
    /// zeros, never as what the image holds there, and cost no DRAM until they are touched again.
    ///
    /// A replica in a pool stays as it is: it is no DRAM, and the guest would come back to DRAM. So does a copy, which the
    /// guest would have to come back to in small pages. Whoever reports a page as
    /// free does not care what it holds.
    ///
    /// So does a part of a sealed chunk that was not copied.
    ///
    /// For free page reporting (virtio 1.2, 5.5.6.6). The range may come from the guest as it is: nothing
    /// about it is trusted. It may be called while vCPUs run; a write of the guest into the range that is
    /// under way may be lost or stay.
    ///
    /// # Errors
    ///
    /// [`DiscardError`]; a caller may go on, the guest loses nothing.
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
            // Sealed memory is taken away by whole chunks; a part of one costs no DRAM either.
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
                // Dropping the private copies alone would bring the image's bytes back.
                self.mapped.mapping.map_zero(addr, part_len)
            };
            done.map_err(|e| DiscardError::Kernel { guest_addr, len, source: e.into() })?;
            anonymous.insert(part.clone());
            self.reported.lock().insert(part);
        }
        Ok(())
    }
}
