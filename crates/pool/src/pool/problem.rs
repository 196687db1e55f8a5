//! Damage that verification finds in a pool.

use serde::Serialize;
use thiserror::Error;

/// One problem.
#[derive(Clone, Debug, Error, PartialEq, Eq, Serialize)]
#[serde(tag = "problem", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Problem {
    /// The twin of the superblock differs or is damaged.
    #[error("the superblock's twin is damaged")]
    Twin,
    /// The generation counter is behind.
    #[error("the generation counter is {counter}, but generation {found} exists")]
    Counter {
        /// The counter.
        counter: u64,
        /// The highest generation found.
        found: u64,
    },
    /// A slot's word is invalid.
    #[error("slot {slot} of the address table is damaged")]
    Slot {
        /// The slot.
        slot: u32,
    },
    /// The name of a snapshot is damaged.
    #[error("the name in slot {slot} of the address table is damaged; its snapshot is lost")]
    Name {
        /// The slot.
        slot: u32,
    },
    /// A name's extent has no valid record, or the record belongs to another name.
    #[error("the extent of {name:?} has no valid record; the snapshot is lost")]
    Extent {
        /// The name.
        name: String,
        /// Its slot.
        slot: u32,
    },
    /// Two names refer to the same bytes.
    #[error("the extent of {name:?} overlaps the newer extent of {other:?}; the snapshot is lost")]
    Overlap {
        /// The name.
        name: String,
        /// Its slot.
        slot: u32,
        /// The other name.
        other: String,
    },
    /// A name occurs twice.
    #[error("{name:?} occurs twice in the address table; slot {slot} has the older entry")]
    Twice {
        /// The name.
        name: String,
        /// The slot with the older generation.
        slot: u32,
    },
    /// A search does not reach the name.
    #[error("a search for {name:?} ends before its slot {slot}")]
    Unreachable {
        /// The name.
        name: String,
        /// Its slot.
        slot: u32,
    },
    /// The content of a snapshot is invalid, according to the caller's check.
    #[error("the content of {name:?} is invalid: {what}")]
    Content {
        /// The name.
        name: String,
        /// Result of the check.
        what: String,
    },
}
