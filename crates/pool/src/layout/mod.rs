//! The bytes of a pool: `docs/reference/pool-format.md` has them as tables. All integers are little-endian.

mod entry;
mod record;
mod superblock;

pub(crate) use entry::{Entry, NameBody, Word, encode_name};
pub(crate) use record::{FREE, Kind, Record};
pub(crate) use superblock::{COUNTER_AT, MAGIC, SUPERBLOCK_BYTES, Superblock, SuperblockError};

/// Bytes of a cache line.
pub(crate) const LINE: u64 = 64;
/// Bytes of a page.
pub(crate) const PAGE: u64 = 4096;
/// The least granule, bytes: extents and their tails begin at multiples of the pool's granule.
pub const GRANULE: u64 = 2 << 20;
/// The version of the format.
pub const POOL_VERSION: u32 = 1;

/// A little-endian integer of a block whose size is known.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..].first_chunk().copied().map_or(0, u32::from_le_bytes)
}

/// A little-endian integer of a block whose size is known.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].first_chunk().copied().map_or(0, u64::from_le_bytes)
}

/// Puts bytes into a block whose size is known.
pub(crate) fn put(block: &mut [u8], at: usize, bytes: &[u8]) {
    block[at..at + bytes.len()].copy_from_slice(bytes);
}

#[cfg(test)]
mod tests;
