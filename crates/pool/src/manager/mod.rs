//! The manager: one process owns a pool and serves other processes.
//!
//! The protocol uses a unix stream socket. Both sides write frames: 4 bytes `fpmg`, the version (4
//! bytes), the length of the rest (4 bytes), all little-endian, then one JSON value, a [`Request`]
//! or a [`Response`]. The manager responds to the requests of a connection in order. A descriptor
//! is sent with its response (`SCM_RIGHTS`).
//!
//! The manager releases the grants of a connection (pins, staging extents, replicas) when the
//! connection ends, also when its process was killed. It uses the space of a grant again when the
//! kernel knows of no process that has it mapped.
//!
//! A client that runs a guest confines its connection first ([`Request::Confine`]). What it can do
//! then is limited in effect, size and number ([`requests`]).
//!
//! Only the manager writes metadata. A descriptor for reading cannot be mapped for writing. A
//! descriptor for writing, which a freeze and a replica need, reaches a replica of a memfd alone,
//! and otherwise the whole medium: the kernel cannot confine it to an extent. Every process that
//! can connect can therefore write the pool, so the socket is restricted to its owner (mode 0600).

mod client;
mod copies;
mod directory;
mod error;
mod pace;
mod replicas;
mod requests;
mod server;
mod wire;
mod zeroing;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::extent::Extent;
use crate::media::{Durability, MediumFacts};
use crate::pool::{Imaging, Listing, PoolFacts, Recovery};
use crate::runs::PageRun;

pub use client::{
    Client, CopyGrant, CopySet, Description, ExtentGrant, ReplicaGrant, StartGrant, Wanted,
};
pub use copies::{ArenaFacts, NoCopy};
pub use directory::{FindManagerError, ManagerDirectory, RemoveError};
pub use error::{ClientError, Refusal, ServerError};
pub use server::{ClientWatch, Server};

/// The version of the protocol.
const MANAGER_VERSION: u32 = 7;

/// A request of a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Request {
    /// The properties of the pool and its medium, with a descriptor for reading.
    Describe,
    /// The snapshot of a name, pinned, with a descriptor for reading.
    Snapshot { name: String },
    /// A replica of the snapshot of a name, imaged, with a descriptor for writing.
    Replica { name: String },
    /// An extent to freeze into, with a descriptor for writing.
    Begin { name: String, guest_bytes: u64, tail_bytes: u64 },
    /// A copy, made in advance, of a copy set of a snapshot that this connection has pinned; of
    /// the last one, if there is no generation.
    Copy { generation: Option<u64>, key: String },
    /// A copy set of such a snapshot.
    CopySet { generation: u64, key: String },
    /// Store a copy set in place of the set of a revision, or as a new set.
    StoreCopySet {
        generation: u64,
        key: String,
        revision: Option<u64>,
        runs: Vec<PageRun>,
        state: Vec<u8>,
    },
    /// Publish a staging extent whose content is flushed.
    Commit { generation: u64 },
    /// Record that the bytes of a snapshot that this connection has pinned are valid.
    Verified { generation: u64 },
    /// Whether the snapshot of a generation that this connection has pinned is the current one of
    /// its name.
    IsCurrent { generation: u64 },
    /// From now on, refuse all requests except [those](Request::is_confined) about grants that this
    /// connection has. A connection is never unconfined.
    Confine,
    /// The same, if nothing is left to request for a start: the last snapshot is checked, and the
    /// replica or copy that was requested after it is there.
    ConfineForStart,
    /// Release a pin, a staging extent or a replica.
    Release { generation: u64 },
    /// Respond when released replicas are imaged, copies are ready and free space is zeroed.
    Settle,
    /// List all extents.
    List,
    /// Remove a name.
    Reclaim { name: String },
    /// Free unused replicas and copies, and clear removed slots.
    Collect,
}

impl Request {
    /// Whether a confined connection may send it: nothing that gives access to further bytes or
    /// that changes what other clients trust.
    fn is_confined(&self) -> bool {
        match self {
            // Only the prediction of its own snapshot is replaced, and none is added.
            Self::StoreCopySet { revision, .. } => revision.is_some(),
            Self::CopySet { .. }
            | Self::IsCurrent { .. }
            | Self::Confine
            | Self::ConfineForStart
            | Self::Release { .. } => true,
            _ => false,
        }
    }
}

/// A response of the manager.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Response {
    Described {
        pool: PoolFacts,
        medium: MediumFacts,
        recovery: Recovery,
        pid: u32,
    },
    Granted(Granted),
    Replica {
        granted: Granted,
        source: Extent,
        imaging: Imaging,
        prepared: Option<Imaging>,
    },
    /// The pages of a copy set, and how many of the first of them are in the copy.
    Copy {
        runs: Vec<PageRun>,
        copied: Result<u64, NoCopy>,
    },
    CopySet {
        revision: u64,
        runs: Vec<PageRun>,
        state: Vec<u8>,
    },
    NoCopySet,
    OtherRevision,
    Published {
        extent: Extent,
    },
    Noted,
    /// Whether the connection is confined.
    Confined(bool),
    Current(bool),
    Released,
    Listing {
        listing: Listing,
        arena: ArenaFacts,
    },
    Reclaimed {
        bytes: u64,
    },
    Collected {
        slots: u32,
        replicas: u64,
    },
    Refused {
        refusal: Refusal,
        message: String,
    },
}

/// An extent and the information to map it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Granted {
    pool: Uuid,
    granule: u64,
    durability: Durability,
    leaf: u64,
    private_mappings: bool,
    verified: bool,
    extent: Extent,
    /// Where in the descriptor the extent begins, bytes.
    begin: u64,
    /// Of a staging extent: the parts that are zero, as begin and end from the extent's beginning.
    zeroed: Vec<(u64, u64)>,
}

#[cfg(test)]
mod hostile_tests;
#[cfg(test)]
mod tests;
