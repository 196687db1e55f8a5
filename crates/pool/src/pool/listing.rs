//! Listing the contents of a pool.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::imaging::Imaging;
use super::scan::{extent, extent_range};
use super::space::gaps;
use crate::extent::Extent;
use crate::layout::{Record, Superblock};
use crate::learnt::Learnt;
use crate::media::MediumFacts;

/// A state in PASS's address table. Free space is *empty and available*.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExtentState {
    /// A sealed snapshot that its name refers to.
    SnapshottedAvailable,
    /// Being written, used as a replica, or kept for its remaining readers.
    SnapshottedUnavailable,
}

/// The use of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The current snapshot of its name.
    Snapshot,
    /// A snapshot that is being written.
    Staging,
    /// A snapshot to which its name does not refer any more. It is kept while it is pinned;
    /// recovery frees it.
    Superseded,
    /// A replica, which one microVM uses.
    Replica,
}

/// An extent of a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedExtent {
    /// Its name, if it is valid.
    pub name: Option<String>,
    /// Its state, as defined in the paper.
    pub state: ExtentState,
    /// What it is used for.
    pub role: Role,
    /// Location on the medium.
    pub extent: Extent,
    /// Time of allocation, seconds since 1970.
    pub created: u64,
    /// For a replica: the generation of its snapshot.
    pub source: Option<u64>,
    /// Number of pins, if the manager provided the listing.
    pub pins: Option<u32>,
    /// For a ready replica, if the manager provided the listing: the cost of imaging it.
    pub imaging: Option<Imaging>,
    /// For a snapshot: what clients learnt about it. The listing of a manager has what its clients
    /// learnt; the listing of a medium has what is stored.
    #[serde(default)]
    pub learnt: Vec<Learnt>,
}

/// Properties of a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolFacts {
    /// Identity.
    pub uuid: Uuid,
    /// Size of the medium, bytes.
    pub size: u64,
    /// Alignment of extents and tails, bytes.
    pub granule: u64,
    /// Number of names that the address table holds.
    pub names: u32,
    /// Maximum length of a name, bytes.
    pub longest_name: u32,
    /// Guest-size classes, bytes.
    pub classes: Vec<u64>,
    /// Whether extents are zeros before they are free.
    #[serde(default)]
    pub scrub: bool,
    /// Time of creation, seconds since 1970.
    pub created: u64,
    /// First byte available to extents.
    pub data_begin: u64,
    /// End of the bytes available to extents.
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
            scrub: superblock.scrub,
            created: superblock.created,
            data_begin: data.start * superblock.granule,
            data_end: data.end * superblock.granule,
        }
    }
}

/// A contiguous free piece of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FreePiece {
    /// Offset, bytes.
    pub offset: u64,
    /// Length, bytes.
    pub len: u64,
}

/// The contents of a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listing {
    /// The pool's properties.
    pub pool: PoolFacts,
    /// The medium's properties.
    pub medium: MediumFacts,
    /// Every extent, in ascending order of offset.
    pub extents: Vec<ListedExtent>,
    /// Free pieces, in ascending order of offset.
    pub free: Vec<FreePiece>,
    /// Free bytes that are known to be zero, if the manager provided the listing: a freeze into
    /// them writes no zero pages.
    pub zeroed_bytes: u64,
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
                learnt: Vec::new(),
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
            zeroed_bytes: 0,
        }
    }

    /// Free bytes in all pieces together.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        self.free.iter().map(|piece| piece.len).sum()
    }
}
