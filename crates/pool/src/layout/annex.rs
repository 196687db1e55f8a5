//! The annex: the last bytes of a snapshot's extent. It holds what is learnt about the snapshot
//! after it was published. Two copies are written in turn, so that a loss of power leaves one.

use uuid::Uuid;

use firn_base::num::{u64_of, usize_of};

use super::{put, u32_at, u64_at};
use crate::extent::Extent;

/// Bytes of a copy.
pub(crate) const ANNEX_COPY_BYTES: u64 = 64 << 10;
/// Bytes of an annex.
pub(crate) const ANNEX_BYTES: u64 = 2 * ANNEX_COPY_BYTES;
/// Bytes of a copy before its content: word, length, 0.
pub(crate) const ANNEX_HEAD: usize = 16;
/// Maximum length of the content, bytes.
pub(crate) const ANNEX_ROOM: usize = usize_of(ANNEX_COPY_BYTES) - ANNEX_HEAD;

/// The offset of the annex on the medium; `None` for an extent without a tail, which is a replica,
/// and for an extent that an earlier firn allocated without room for it.
pub(crate) fn annex_at(extent: &Extent) -> Option<u64> {
    let at = (extent.offset + extent.len).checked_sub(ANNEX_BYTES)?;
    (extent.tail_bytes > 0 && extent.tail_offset + extent.tail_bytes <= at).then_some(at)
}

/// The length of a tail of `tail_bytes` bytes, enlarged if its last granule would have no room for
/// the annex.
pub(crate) fn tail_with_annex(tail_bytes: u64, granule: u64) -> u64 {
    match tail_bytes.checked_next_multiple_of(granule) {
        Some(end) if tail_bytes > 0 && end - tail_bytes < ANNEX_BYTES => end.saturating_add(1),
        _ => tail_bytes,
    }
}

/// Encodes a copy. Its first 8 bytes are the word that commits it. `sequence` is not 0.
pub(crate) fn encode_annex(uuid: Uuid, generation: u64, sequence: u32, content: &[u8]) -> Vec<u8> {
    let mut copy = vec![0; ANNEX_HEAD + content.len()];
    // At most `ANNEX_ROOM`.
    let len = u32::try_from(content.len()).unwrap_or(u32::MAX);
    put(&mut copy, 8, &len.to_le_bytes());
    put(&mut copy, ANNEX_HEAD, content);
    let word = word(uuid, generation, sequence, &copy);
    put(&mut copy, 0, &word.to_le_bytes());
    copy
}

/// The length of a copy with this head, bytes; `None` if no copy begins with it.
pub(crate) fn annex_copy_len(head: &[u8; ANNEX_HEAD]) -> Option<usize> {
    let content = usize_of(u64::from(u32_at(head, 8)));
    (sequence_of(head) > 0 && content <= ANNEX_ROOM).then_some(ANNEX_HEAD + content)
}

/// Decodes a copy: its sequence number and its content. Returns `None` if it is damaged, or belongs
/// to another extent.
pub(crate) fn decode_annex(copy: &[u8], uuid: Uuid, generation: u64) -> Option<(u32, &[u8])> {
    let sequence = sequence_of(copy);
    let valid = sequence > 0 && u64_at(copy, 0) == word(uuid, generation, sequence, copy);
    valid.then(|| (sequence, &copy[ANNEX_HEAD..]))
}

fn sequence_of(copy: &[u8]) -> u32 {
    u32_at(copy, 0)
}

/// The word of a copy: its sequence number and a CRC, which also covers the extent's identity. The
/// bytes of an extent that had this place before are therefore not valid.
fn word(uuid: Uuid, generation: u64, sequence: u32, copy: &[u8]) -> u64 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(uuid.as_bytes());
    crc.update(&generation.to_le_bytes());
    crc.update(&sequence.to_le_bytes());
    crc.update(&copy[8..]);
    u64::from(crc.finalize()) << 32 | u64::from(sequence)
}

const _: () = assert!(u64_of(ANNEX_ROOM) < ANNEX_COPY_BYTES);

#[cfg(test)]
#[path = "annex_tests.rs"]
mod tests;
