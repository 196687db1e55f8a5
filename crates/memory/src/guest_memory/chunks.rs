//! Copy-on-write by chunk, for memory of which the kernel has no private mappings (devdax).
//!
//! Such memory is mapped shared and for reading alone, from a descriptor for reading: neither the guest nor this process
//! can write to it. Whoever is about to write asks for a copy of the chunk first. The copy takes the chunk's place at the
//! same host address, so KVM's slots and every view stay as they are.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use firn_base::{GuestRange, RangeSet, ns_since};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::Mapped;
use crate::plan::Leaf;
use crate::slot::Slot;

/// Bytes of a chunk: the granule of a devdax mapping.
const CHUNK: u64 = Leaf::Size2M.bytes();

/// What was copied of sealed memory, because it was to be written: by the guest, by the monitor, or ahead of the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkCopies {
    /// Chunks of 2 MiB that were copied.
    pub chunks: u64,
    /// Their bytes: private memory of this guest's.
    pub bytes: u64,
    /// How long that took in all, ns.
    pub ns: u64,
    /// Writes of the guest's that ended `KVM_RUN`, over all vCPUs.
    pub write_faults: u64,
}

/// Why sealed memory cannot be written. It is as it was.
#[derive(Debug, Error)]
#[error(
    "cannot copy the 2 MiB of sealed guest memory at {guest_addr:#x}; is DRAM free, and vm.max_map_count high enough?"
)]
pub struct CopyChunkError {
    /// First byte of the chunk.
    guest_addr: u64,
    /// What the kernel said.
    source: std::io::Error,
}

/// Sealed memory, and what is not sealed any more.
#[derive(Debug)]
pub(super) struct Chunks {
    mapped: Arc<Mapped>,
    slots: Vec<Slot>,
    /// Whatever is not in this set is sealed.
    anonymous: Arc<Mutex<RangeSet>>,
    copied: AtomicU64,
    ns: AtomicU64,
    write_faults: AtomicU64,
}

impl Chunks {
    pub(super) fn new(
        mapped: Arc<Mapped>,
        slots: Vec<Slot>,
        anonymous: Arc<Mutex<RangeSet>>,
    ) -> Self {
        let [copied, ns, write_faults] = [(); 3].map(|()| AtomicU64::new(0));
        Self { mapped, slots, anonymous, copied, ns, write_faults }
    }

    pub(super) fn copies(&self) -> ChunkCopies {
        let chunks = self.copied.load(Ordering::Relaxed);
        let ns = self.ns.load(Ordering::Relaxed);
        let write_faults = self.write_faults.load(Ordering::Relaxed);
        ChunkCopies { chunks, bytes: chunks * CHUNK, ns, write_faults }
    }

    pub(super) fn count_write_fault(&self) {
        self.write_faults.fetch_add(1, Ordering::Relaxed);
    }

    /// Copies what is sealed of a range, by whole chunks; returns how many. What of the range is no memory is left out.
    pub(super) fn make_writable(&self, range: GuestRange) -> Result<u64, CopyChunkError> {
        let mut anonymous = self.anonymous.lock();
        let mut copied = 0;
        for slot in &self.slots {
            let start = range.start.max(slot.guest_addr);
            let end = range.end().min(slot.guest_addr + slot.len);
            if start >= end {
                continue;
            }
            // A chunk is sealed as a whole or not at all, so no two parts have one in common.
            let sealed =
                anonymous.split(start..end).into_iter().filter(|(_, anonymous)| !anonymous);
            for (part, _) in sealed {
                let mut at = part.start - part.start % CHUNK;
                while at < part.end {
                    let begun = Instant::now();
                    let host = slot.host_addr + (at - slot.guest_addr);
                    self.mapped
                        .mapping
                        .copy_in_place(host, CHUNK)
                        .map_err(|errno| CopyChunkError { guest_addr: at, source: errno.into() })?;
                    anonymous.insert(at..at + CHUNK);
                    self.copied.fetch_add(1, Ordering::Relaxed);
                    self.ns.fetch_add(ns_since(begun), Ordering::Relaxed);
                    copied += 1;
                    at += CHUNK;
                }
            }
        }
        Ok(copied)
    }
}

/// The whole chunks of a range; empty where there is none.
pub(super) fn within(range: Range<u64>) -> Range<u64> {
    let start = range.start.next_multiple_of(CHUNK);
    start..(range.end - range.end % CHUNK).max(start)
}
