//! The manager: one process owns a pool, the others ask it.
//!
//! A unix stream socket. Both sides write frames: 4 bytes `fpmg`, the version (4 bytes), the length of what follows (4 bytes), all
//! little-endian, then one JSON value, a [`Request`] or a [`Response`]. Requests of a connection are answered in order; a descriptor comes
//! with its response (`SCM_RIGHTS`).
//!
//! What a connection was granted (pins, staging extents, replicas) is given up when it ends, however its process ends.
//!
//! Only the manager writes metadata. A descriptor for reading cannot be mapped for writing. One for writing, which a freeze and a
//! replica need, is for the whole medium: the kernel cannot confine it to an extent. So who may connect is who may write the
//! pool: the socket is for its owner alone (mode 0600).

mod client;
mod copies;
mod directory;
mod error;
mod pace;
mod replicas;
mod requests;
mod server;
mod wire;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::extent::Extent;
use crate::media::{Durability, MediumFacts};
use crate::pool::{Imaging, Listing, PoolFacts, Recovery};

pub use client::{ChunkSet, Client, CopyGrant, Description, ExtentGrant, ReplicaGrant};
pub use copies::{ArenaFacts, COPY_CHUNK, NoCopy};
pub use directory::{FindManagerError, ManagerDirectory, RemoveError};
pub use error::{ClientError, Refusal, ServerError};
pub use server::{ClientWatch, Server};

/// The version of the messages.
const MANAGER_VERSION: u32 = 2;

/// What a client asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Request {
    /// What the pool and its medium are, with a descriptor for reading.
    Describe,
    /// The snapshot of a name, pinned, with a descriptor for reading.
    Snapshot { name: String },
    /// A replica of the snapshot of a name, imaged, with a descriptor for writing.
    Replica { name: String },
    /// An extent to freeze into, with a descriptor for writing.
    Begin { name: String, guest_bytes: u64, tail_bytes: u64 },
    /// A copy, made in advance, of a chunk set of a snapshot that this connection has pinned.
    Copy { generation: u64, key: String },
    /// The chunk set itself.
    ChunkSet { generation: u64, key: String },
    /// Store a chunk set in place of the set of a revision, or as a new set.
    SetChunks {
        generation: u64,
        key: String,
        revision: Option<u64>,
        chunks: Vec<ChunkRun>,
        state: Vec<u8>,
    },
    /// Publish what was written and flushed.
    Commit { generation: u64 },
    /// The bytes of a snapshot that this connection has pinned were checked, and found good.
    Verified { generation: u64 },
    /// Give up a pin, a staging extent or a replica.
    Release { generation: u64 },
    /// Give up a replica, of which these pages alone were written.
    GiveBack { generation: u64, written: Vec<(u64, u64)> },
    /// Answered when replicas of runs that ended, and copies, are ready.
    Settle,
    /// All extents.
    List,
    /// Remove a name.
    Reclaim { name: String },
    /// Free what is only kept to be ready, and clear removed slots.
    Collect,
}

/// What the manager answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Response {
    Described { pool: PoolFacts, medium: MediumFacts, recovery: Recovery, pid: u32 },
    Granted(Granted),
    Replica { granted: Granted, source: Extent, imaging: Imaging, prepared: Option<Imaging> },
    Copy { chunks: Vec<ChunkRun>, copied: Result<Vec<ChunkRun>, NoCopy> },
    ChunkSet { revision: u64, chunks: Vec<ChunkRun>, state: Vec<u8> },
    NoChunkSet,
    OtherRevision,
    Published { extent: Extent },
    Noted,
    Released,
    Listing { listing: Listing, arena: ArenaFacts },
    Reclaimed { bytes: u64 },
    Collected { slots: u32, replicas: u64 },
    Refused { refusal: Refusal, message: String },
}

/// Chunks of 2 MiB of guest memory that follow each other: the first, and how many.
pub type ChunkRun = (u32, u32);

/// An extent and what is needed to map it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Granted {
    pool: Uuid,
    granule: u64,
    durability: Durability,
    leaf: u64,
    private_mappings: bool,
    verified: bool,
    extent: Extent,
}

#[cfg(test)]
mod tests;
