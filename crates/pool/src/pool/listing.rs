//! What a pool holds, as people and programs are told.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::imaging::Imaging;
use super::scan::{extent, extent_range};
use super::space::gaps;
use crate::extent::Extent;
use crate::layout::{Record, Superblock};
use crate::media::MediumFacts;

/// A state of PASS's address table. (What no extent has is *empty and available*.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExtentState {
    /// A sealed snapshot under its name.
    SnapshottedAvailable,
    /// Being written, being run in, or kept for those who still read it.
    SnapshottedUnavailable,
}

/// What an extent is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The snapshot of its name.
    Snapshot,
    /// A snapshot that is being written.
    Staging,
    /// A snapshot that its name does not refer to any more, kept while it is pinned; freed by recovery.
    Superseded,
    /// A microVM's own.
    Replica,
}

/// An extent of a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedExtent {
    /// Its name, where that is whole.
    pub name: Option<String>,
    /// Its state, as the paper has it.
    pub state: ExtentState,
    /// What it is used for.
    pub role: Role,
    /// Where it is.
    pub extent: Extent,
    /// When it was allocated, seconds since 1970.
    pub created: u64,
    /// Of a replica: the generation of its snapshot.
    pub source: Option<u64>,
    /// How many have it pinned, where the manager says it.
    pub pins: Option<u32>,
    /// Of a replica that is ready, where the manager says it: what making it ready took.
    pub imaging: Option<Imaging>,
}

/// What a pool is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolFacts {
    /// Its identity.
    pub uuid: Uuid,
    /// Bytes of the medium.
    pub size: u64,
    /// Bytes to whose multiples extents and tails are aligned.
    pub granule: u64,
    /// Names that the address table holds.
    pub names: u32,
    /// Bytes of the longest name.
    pub longest_name: u32,
    /// Guest-size classes, bytes.
    pub classes: Vec<u64>,
    /// Seconds since 1970.
    pub created: u64,
    /// Where extents may begin and must end, bytes.
    pub data_begin: u64,
    /// See `data_begin`.
    pub data_end: u64,
}

impl PoolFacts {
    pub(super) fn of(superblock: &Superblock) -> Self {
        let data = superblock.data().unwrap_or_default();
        Self {
            uuid: superblock.uuid,
            size: superblock.size,
            granule: superblock.granule,
            names: superblock.names,
            longest_name: superblock.longest_name,
            classes: superblock.classes.clone(),
            created: superblock.created,
            data_begin: data.start * superblock.granule,
            data_end: data.end * superblock.granule,
        }
    }
}

/// A free piece of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FreePiece {
    /// Its first byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// All that a pool holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listing {
    /// What the pool is.
    pub pool: PoolFacts,
    /// What the medium is.
    pub medium: MediumFacts,
    /// Every extent, in the order of the medium.
    pub extents: Vec<ListedExtent>,
    /// What is free, in the order of the medium.
    pub free: Vec<FreePiece>,
}

impl Listing {
    pub(super) fn new(
        superblock: &Superblock,
        medium: &MediumFacts,
        extents: impl Iterator<Item = (u32, Record, Option<String>, Role, Option<u32>)>,
    ) -> Self {
        let mut listed = Vec::new();
        let mut used = Vec::new();
        for (granule, record, name, role, pins) in extents {
            used.extend(extent_range(superblock, granule, &record));
            listed.push(ListedExtent {
                name,
                state: match role {
                    Role::Snapshot => ExtentState::SnapshottedAvailable,
                    _ => ExtentState::SnapshottedUnavailable,
                },
                role,
                extent: extent(superblock, granule, &record),
                created: record.created,
                source: (role == Role::Replica).then_some(record.source),
                pins,
                imaging: None,
            });
        }
        let data = superblock.data().unwrap_or_default();
        let size = superblock.granule;
        let free = gaps(used.into_iter(), &data)
            .map(|gap| FreePiece { offset: gap.start * size, len: (gap.end - gap.start) * size });
        Self {
            pool: PoolFacts::of(superblock),
            medium: medium.clone(),
            extents: listed,
            free: free.collect(),
        }
    }

    /// Free bytes, all pieces together.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        self.free.iter().map(|piece| piece.len).sum()
    }
}
