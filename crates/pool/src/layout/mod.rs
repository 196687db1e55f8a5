//! The on-medium format of a pool. `docs/reference/pool-format.md` specifies it. All integers are
//! little-endian.

mod annex;
mod entry;
mod record;
mod superblock;

pub(crate) use annex::{
    ANNEX_COPY_BYTES, ANNEX_HEAD, ANNEX_ROOM, annex_at, annex_copy_len, decode_annex, encode_annex,
    tail_with_annex,
};
pub(crate) use entry::{Entry, NameBody, Word, encode_name};
pub(crate) use record::{FREE, Kind, Record};
pub(crate) use superblock::{COUNTER_AT, MAGIC, SUPERBLOCK_BYTES, Superblock, SuperblockError};

/// Bytes of a cache line.
pub(crate) const LINE: u64 = 64;
/// Bytes of a page.
pub(crate) const PAGE: u64 = 4096;
/// The smallest granule, bytes: extents and their tails are aligned to the pool's granule.
pub const GRANULE: u64 = 2 << 20;
/// The version of the format.
pub(crate) const POOL_VERSION: u32 = 2;

/// Reads a little-endian integer from a block of known size.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..].first_chunk().copied().map_or(0, u32::from_le_bytes)
}

/// Reads a little-endian integer from a block of known size.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].first_chunk().copied().map_or(0, u64::from_le_bytes)
}

/// Writes bytes into a block of known size.
pub(crate) fn put(block: &mut [u8], at: usize, bytes: &[u8]) {
    block[at..at + bytes.len()].copy_from_slice(bytes);
}

#[cfg(test)]
mod tests;
