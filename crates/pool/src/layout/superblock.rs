//! The superblock: a pool's identity and layout. Creation writes it and it never changes. Its twin
//! at the end of the medium has the same bytes.

use firn_base::num::{round_down, round_up};
use thiserror::Error;
use uuid::Uuid;

use super::{GRANULE, LINE, PAGE, POOL_VERSION, put, u32_at, u64_at};

/// The first word, written last.
pub(crate) const MAGIC: [u8; 8] = *b"FIRNPOOL";
/// Bytes.
pub(crate) const SUPERBLOCK_BYTES: usize = 256;
const CRC_AT: usize = SUPERBLOCK_BYTES - 4;
/// Offset of the flags, which a pool of version 1 does not have.
const FLAGS_AT: usize = 12;
/// Flag: freed extents are scrubbed. A firn that does not know it must not open the pool.
const SCRUB: u32 = 1;
const CLASSES_AT: usize = 64;
/// Maximum number of guest-size classes.
pub(crate) const MAX_CLASSES: usize = 8;
/// Maximum number of names.
pub(crate) const MAX_NAMES: u32 = 1 << 20;
/// Maximum length of a name in any pool, bytes.
pub(crate) const MAX_LONGEST_NAME: u32 = 1024;
/// Offset of the generation counter, which has its own line in the superblock's page.
pub(crate) const COUNTER_AT: u64 = 2048;
/// Offset of the name in a slot, after word, length and CRC.
pub(crate) const NAME_AT: u64 = 16;

/// A pool's identity and layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Superblock {
    pub(crate) uuid: Uuid,
    /// Bytes of the medium.
    pub(crate) size: u64,
    /// Bytes.
    pub(crate) granule: u64,
    /// Names that the address table holds.
    pub(crate) names: u32,
    /// Bytes of the longest name.
    pub(crate) longest_name: u32,
    /// Seconds since 1970.
    pub(crate) created: u64,
    /// Guest-size classes in bytes, ascending. An extent is aligned to the largest class that is
    /// not larger than its guest memory.
    pub(crate) classes: Vec<u64>,
    /// Whether extents are zeros before they are free.
    pub(crate) scrub: bool,
}

/// Why bytes are not a valid superblock.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub(crate) enum SuperblockError {
    #[error("the magic number does not match")]
    Magic,
    #[error("unknown version {0}")]
    Version(u32),
    #[error("the CRC does not match")]
    Crc,
    #[error("its sizes and offsets are inconsistent")]
    Inconsistent,
}

impl Superblock {
    pub(crate) fn encode(&self) -> [u8; SUPERBLOCK_BYTES] {
        let mut block = [0; SUPERBLOCK_BYTES];
        put(&mut block, 0, &MAGIC);
        // A pool without flags is one of version 1, which an earlier firn opens.
        let (version, flags) = if self.scrub { (POOL_VERSION, SCRUB) } else { (1, 0) };
        put(&mut block, 8, &version.to_le_bytes());
        put(&mut block, FLAGS_AT, &flags.to_le_bytes());
        put(&mut block, 16, self.uuid.as_bytes());
        put(&mut block, 32, &self.size.to_le_bytes());
        put(&mut block, 40, &self.granule.to_le_bytes());
        put(&mut block, 48, &self.names.to_le_bytes());
        put(&mut block, 52, &self.longest_name.to_le_bytes());
        put(&mut block, 56, &self.created.to_le_bytes());
        for (number, class) in self.classes.iter().enumerate() {
            put(&mut block, CLASSES_AT + 8 * number, &class.to_le_bytes());
        }
        let crc = crc32fast::hash(&block[..CRC_AT]);
        put(&mut block, CRC_AT, &crc.to_le_bytes());
        block
    }

    pub(crate) fn decode(block: &[u8; SUPERBLOCK_BYTES]) -> Result<Self, SuperblockError> {
        if !block.starts_with(&MAGIC) {
            return Err(SuperblockError::Magic);
        }
        // Magic number, version and CRC have the same place in every version.
        if u32_at(block, CRC_AT) != crc32fast::hash(&block[..CRC_AT]) {
            return Err(SuperblockError::Crc);
        }
        let version = u32_at(block, 8);
        let scrub = match (version, u32_at(block, FLAGS_AT)) {
            (1, 0) => false,
            (POOL_VERSION, SCRUB) => true,
            (1 | POOL_VERSION, _) => return Err(SuperblockError::Inconsistent),
            _ => return Err(SuperblockError::Version(version)),
        };
        let uuid = block[16..].first_chunk().copied().map(Uuid::from_bytes).unwrap_or_default();
        let classes = (0..MAX_CLASSES).map(|number| u64_at(block, CLASSES_AT + 8 * number));
        let superblock = Self {
            uuid,
            size: u64_at(block, 32),
            granule: u64_at(block, 40),
            names: u32_at(block, 48),
            longest_name: u32_at(block, 52),
            created: u64_at(block, 56),
            classes: classes.take_while(|class| *class != 0).collect(),
            scrub,
        };
        if superblock.is_sound() { Ok(superblock) } else { Err(SuperblockError::Inconsistent) }
    }

    /// Whether all values are in range and the parts fit into the medium. The other methods rely on
    /// this.
    pub(crate) fn is_sound(&self) -> bool {
        let multiples = |class: &u64| class.is_power_of_two() && class.is_multiple_of(self.granule);
        self.granule.is_power_of_two()
            && self.granule >= GRANULE
            && self.size.is_multiple_of(GRANULE)
            && self.size / self.granule <= u64::from(u32::MAX)
            && (1..=MAX_NAMES).contains(&self.names)
            && (1..=MAX_LONGEST_NAME).contains(&self.longest_name)
            && (1..=MAX_CLASSES).contains(&self.classes.len())
            && self.classes.is_sorted_by(|a, b| a < b)
            && self.classes.iter().all(multiples)
            && self.data().is_some()
    }

    /// Number of slots of the address table. A fourth of them stays free to keep searches short.
    pub(crate) fn slots(&self) -> u32 {
        self.names + self.names / 3 + 1
    }

    /// Bytes of a slot.
    pub(crate) fn stride(&self) -> u64 {
        (NAME_AT + u64::from(self.longest_name)).next_multiple_of(LINE)
    }

    /// Offset of a slot.
    pub(crate) fn slot_at(&self, slot: u32) -> u64 {
        PAGE + self.stride() * u64::from(slot)
    }

    /// Number of granules of the medium. The extent map has a record for each.
    pub(crate) fn granules(&self) -> u64 {
        self.size / self.granule
    }

    fn map_at(&self) -> u64 {
        PAGE + self.stride() * u64::from(self.slots())
    }

    /// Offset of the record of the extent that begins at this granule.
    pub(crate) fn record_at(&self, granule: u32) -> u64 {
        self.map_at() + LINE * u64::from(granule)
    }

    /// End of the metadata, bytes.
    pub(crate) fn metadata_end(&self) -> u64 {
        self.map_at() + LINE * self.granules()
    }

    /// The granules available to extents; `None` if there is none.
    pub(crate) fn data(&self) -> Option<std::ops::Range<u64>> {
        let begin = round_up(self.metadata_end(), self.granule)? / self.granule;
        let end = self.twin_at() / self.granule;
        (begin < end).then_some(begin..end)
    }

    /// Offset of the twin.
    pub(crate) fn twin_at(&self) -> u64 {
        Self::twin_of(self.size)
    }

    /// Offset of the twin on a medium of the given size: its last page.
    pub(crate) fn twin_of(size: u64) -> u64 {
        round_down(size, PAGE).saturating_sub(PAGE)
    }

    /// The alignment in bytes of an extent with this much guest memory.
    pub(crate) fn alignment(&self, guest_bytes: u64) -> u64 {
        let fitting = self.classes.iter().rev().find(|class| **class <= guest_bytes);
        *fitting.unwrap_or(&self.granule)
    }
}
