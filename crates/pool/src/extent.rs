//! A contiguous part of a pool.

use serde::{Deserialize, Serialize};

/// The location of guest memory and its tail. Offsets are in bytes from the beginning of the
/// medium. `offset`, `tail_offset` and `len` are multiples of the pool's granule (at least 2 MiB),
/// so guest memory and tail can be mapped separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// Offset of guest memory; a multiple of the guest-size class.
    pub offset: u64,
    /// Bytes of guest memory, a multiple of 4096; its regions are stored one after the other.
    pub guest_bytes: u64,
    /// Offset of the tail.
    pub tail_offset: u64,
    /// Bytes of the tail.
    pub tail_bytes: u64,
    /// Bytes of the extent: guest memory and tail, each rounded up.
    pub len: u64,
    /// A number that no other extent of the pool ever has. Pool and generation together identify
    /// the content.
    pub generation: u64,
}
