//! A record of the extent map: one cache line, which describes the extent that begins at the
//! record's granule.

use uuid::Uuid;

use super::{put, u32_at, u64_at};

/// The word of a granule at which no extent begins.
pub(crate) const FREE: u64 = 0;
/// Bytes of a record.
pub(crate) const RECORD_BYTES: usize = 64;
const USED: u64 = 1;

/// The use of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Snapshot,
    Replica,
}

/// An extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) kind: Kind,
    /// The slot of its name.
    pub(crate) slot: u32,
    pub(crate) guest_bytes: u64,
    pub(crate) tail_bytes: u64,
    pub(crate) generation: u64,
    /// Seconds since 1970.
    pub(crate) created: u64,
    /// For a replica: the generation of its snapshot.
    pub(crate) source: u64,
}

impl Record {
    /// Encodes the line. Its first 8 bytes are the word that commits it.
    pub(crate) fn encode(&self, uuid: Uuid, granule: u32) -> [u8; RECORD_BYTES] {
        let mut line = [0; RECORD_BYTES];
        put(&mut line, 8, &self.guest_bytes.to_le_bytes());
        put(&mut line, 16, &self.tail_bytes.to_le_bytes());
        put(&mut line, 24, &self.generation.to_le_bytes());
        put(&mut line, 32, &self.created.to_le_bytes());
        put(&mut line, 40, &self.source.to_le_bytes());
        put(&mut line, 48, &self.slot.to_le_bytes());
        let kind: u32 = match self.kind {
            Kind::Snapshot => 1,
            Kind::Replica => 2,
        };
        put(&mut line, 52, &kind.to_le_bytes());
        let word = word(&line, uuid, granule);
        put(&mut line, 0, &word.to_le_bytes());
        line
    }

    /// Decodes a line whose word is not [`FREE`]; `None` if it is damaged.
    pub(crate) fn decode(line: &[u8; RECORD_BYTES], uuid: Uuid, granule: u32) -> Option<Self> {
        if u64_at(line, 0) != word(line, uuid, granule) {
            return None;
        }
        let kind = match u32_at(line, 52) {
            1 => Kind::Snapshot,
            2 => Kind::Replica,
            _ => return None,
        };
        Some(Self {
            kind,
            slot: u32_at(line, 48),
            guest_bytes: u64_at(line, 8),
            tail_bytes: u64_at(line, 16),
            generation: u64_at(line, 24),
            created: u64_at(line, 32),
            source: u64_at(line, 40),
        })
    }
}

/// The word that marks a record as used. Its CRC covers the record and its place, so a line copied
/// from another pool or granule is invalid.
fn word(line: &[u8; RECORD_BYTES], uuid: Uuid, granule: u32) -> u64 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(uuid.as_bytes());
    crc.update(&granule.to_le_bytes());
    crc.update(&line[8..]);
    u64::from(crc.finalize()) << 32 | USED
}
