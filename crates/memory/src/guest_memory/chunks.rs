//! Copy-on-write by chunk, for media that the kernel cannot map privately (devdax).
//!
//! Such memory is mapped shared and read-only, from a read-only descriptor: neither the guest nor
//! this process can write to it. Before a write, the chunk is copied. The copy replaces the chunk
//! at the same host address, so KVM's slots and all views stay valid.

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

/// Copies of sealed chunks that were made before a write: by the guest, by the monitor, or before
/// the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkCopies {
    /// Chunks of 2 MiB that were copied.
    pub chunks: u64,
    /// Their bytes: private memory of this guest.
    pub bytes: u64,
    /// Total time of the copies, ns.
    pub ns: u64,
    /// Writes of the guest that ended `KVM_RUN`, over all vCPUs.
    pub write_faults: u64,
}

/// Why a sealed chunk was not copied. It is unchanged.
#[derive(Debug, Error)]
#[error(
    "cannot copy the 2 MiB of sealed guest memory at {guest_addr:#x}; is DRAM free, and vm.max_map_count high enough?"
)]
pub struct CopyChunkError {
    /// First byte of the chunk.
    guest_addr: u64,
    /// The error of the system call.
    source: std::io::Error,
}

/// Sealed memory, and the chunks of it that were copied.
#[derive(Debug)]
pub(super) struct Chunks {
    mapped: Arc<Mapped>,
    slots: Vec<Slot>,
    /// All memory outside this set is sealed.
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

    /// Copies the sealed chunks of a range and returns their number. Addresses outside guest memory
    /// are ignored.
    pub(super) fn make_writable(&self, range: GuestRange) -> Result<u64, CopyChunkError> {
        let mut anonymous = self.anonymous.lock();
        let mut copied = 0;
        for slot in &self.slots {
            let start = range.start.max(slot.guest_addr);
            let end = range.end().min(slot.guest_addr + slot.len);
            if start >= end {
                continue;
            }
            // A chunk is sealed as a whole or not at all, so no two parts share one.
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

/// The whole chunks of a range; may be empty.
pub(super) fn within(range: Range<u64>) -> Range<u64> {
    let start = range.start.next_multiple_of(CHUNK);
    start..(range.end - range.end % CHUNK).max(start)
}
