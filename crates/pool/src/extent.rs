//! A continuous piece of a pool.

use serde::{Deserialize, Serialize};

/// Where guest memory and its tail are. Offsets are bytes from the medium's begin; `offset`, `tail_offset` and `len` are
/// multiples of the pool's granule (2 MiB at least), so that guest memory and tail can be mapped apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// The first byte of guest memory; a multiple of the guest-size class.
    pub offset: u64,
    /// Bytes of guest memory, a multiple of 4096; its regions lie one after the other.
    pub guest_bytes: u64,
    /// The first byte of the tail.
    pub tail_offset: u64,
    /// Bytes of the tail.
    pub tail_bytes: u64,
    /// All bytes that the extent takes, both rounded up.
    pub len: u64,
    /// Which writing of the pool this is. No two extents of a pool ever have the same, so pool and generation together name its
    /// content for ever.
    pub generation: u64,
}
