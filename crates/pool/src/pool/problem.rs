//! What can be wrong with a pool.

use serde::Serialize;
use thiserror::Error;

/// One thing that is wrong.
#[derive(Clone, Debug, Error, PartialEq, Eq, Serialize)]
#[serde(tag = "problem", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Problem {
    /// The twin of the superblock differs or is damaged.
    #[error("the superblock's twin is damaged")]
    Twin,
    /// The generation counter is behind.
    #[error("the generation counter says {counter}, and there is a generation {found}")]
    Counter {
        /// The counter.
        counter: u64,
        /// The highest generation found.
        found: u64,
    },
    /// A slot's word is none that firn writes.
    #[error("slot {slot} of the address table is damaged")]
    Slot {
        /// The slot.
        slot: u32,
    },
    /// A snapshot whose name is damaged.
    #[error("the name in slot {slot} of the address table is damaged; its snapshot is lost")]
    Name {
        /// The slot.
        slot: u32,
    },
    /// A name whose extent is not recorded, or not as its own.
    #[error("the extent of {name:?} is not recorded as its own; the snapshot is lost")]
    Extent {
        /// The name.
        name: String,
        /// Its slot.
        slot: u32,
    },
    /// Two names for the same bytes.
    #[error(
        "the extent of {name:?} overlaps that of {other:?}, which is newer; the snapshot is lost"
    )]
    Overlap {
        /// The name.
        name: String,
        /// Its slot.
        slot: u32,
        /// The other name.
        other: String,
    },
    /// The same name twice.
    #[error("{name:?} is twice in the address table; slot {slot} has the older one")]
    Twice {
        /// The name.
        name: String,
        /// The slot with the older generation.
        slot: u32,
    },
    /// A search does not come to the name.
    #[error("a search for {name:?} ends before its slot {slot}")]
    Unreachable {
        /// The name.
        name: String,
        /// Its slot.
        slot: u32,
    },
    /// The content is not what was frozen: what the caller's check said.
    #[error("the content of {name:?}: {what}")]
    Content {
        /// The name.
        name: String,
        /// What is wrong.
        what: String,
    },
}
