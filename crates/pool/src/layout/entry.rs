//! A slot of the address table: a state word and a name.

use firn_base::num::{u64_of, usize_of};

use super::superblock::NAME_AT;
use super::{put, u32_at};

const STATE_SHIFT: u32 = 32;
const GENERATION_SHIFT: u32 = 40;
const GENERATION_MASK: u64 = (1 << 24) - 1;
const REMOVED: u64 = 1;
const AVAILABLE: u64 = 2;

/// A slot's state word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    /// Empty; a search for a name ends here, because no name was placed further on while this slot
    /// was used.
    Empty,
    /// Empty; a search for a name continues.
    Removed,
    /// The slot's name has a snapshot, which begins at this granule.
    Available {
        granule: u32,
        /// The lowest 24 bits of the snapshot's generation, to detect a record that replaced a lost
        /// one.
        generation: u64,
    },
}

impl Word {
    /// The word of a snapshot.
    pub(crate) fn available(granule: u32, generation: u64) -> Self {
        Self::Available { granule, generation: generation & GENERATION_MASK }
    }

    pub(crate) fn encode(self) -> u64 {
        match self {
            Self::Empty => 0,
            Self::Removed => REMOVED << STATE_SHIFT,
            Self::Available { granule, generation } => {
                u64::from(granule) | AVAILABLE << STATE_SHIFT | generation << GENERATION_SHIFT
            }
        }
    }

    /// Returns `None` for an invalid word.
    pub(crate) fn decode(word: u64) -> Option<Self> {
        let state = word >> STATE_SHIFT & 0xff;
        let granule = u32::try_from(word & u64::from(u32::MAX)).unwrap_or_default();
        match state {
            0 if word == 0 => Some(Self::Empty),
            REMOVED if word == REMOVED << STATE_SHIFT => Some(Self::Removed),
            AVAILABLE => Some(Self::Available { granule, generation: word >> GENERATION_SHIFT }),
            _ => None,
        }
    }

    /// Whether this is the word of the given snapshot.
    pub(crate) fn refers_to(self, granule: u32, generation: u64) -> bool {
        self == Self::available(granule, generation)
    }
}

/// The name in a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NameBody {
    Name(String),
    /// Not a valid name.
    Damaged,
}

/// A slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// `None` if the word is invalid.
    pub(crate) word: Option<Word>,
    pub(crate) name: NameBody,
}

impl Entry {
    pub(crate) fn decode(bytes: &[u8]) -> Self {
        Self { word: Word::decode(super::u64_at(bytes, 0)), name: decode_name(bytes) }
    }
}

/// Encodes the bytes after a slot's word: length, CRC, name.
pub(crate) fn encode_name(name: &str) -> Vec<u8> {
    let head = usize_of(NAME_AT) - 8;
    let mut body = vec![0; head + name.len()];
    // At most `MAX_LONGEST_NAME`.
    let len = u32::try_from(name.len()).unwrap_or(u32::MAX);
    put(&mut body, 0, &len.to_le_bytes());
    put(&mut body, 4, &crc32fast::hash(name.as_bytes()).to_le_bytes());
    put(&mut body, head, name.as_bytes());
    body
}

fn decode_name(bytes: &[u8]) -> NameBody {
    let len = u64::from(u32_at(bytes, 8));
    let crc = u32_at(bytes, 12);
    let name = &bytes[usize_of(NAME_AT)..];
    if len == 0 || len > u64_of(name.len()) {
        return NameBody::Damaged;
    }
    let name = &name[..usize_of(len)];
    match std::str::from_utf8(name) {
        Ok(text) if crc32fast::hash(name) == crc => NameBody::Name(text.to_owned()),
        _ => NameBody::Damaged,
    }
}
