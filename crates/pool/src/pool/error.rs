//! Errors of operations on a pool: one type for each operation.

use std::io;

use thiserror::Error;
use uuid::Uuid;

use super::problem::Problem;
use crate::layout::POOL_VERSION;

/// Why a pool was not created.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CreateError {
    /// The medium is not empty.
    #[error(
        "{name} contains {what}: choose another medium, or overwrite it (`firn pool create --overwrite`)"
    )]
    NotEmpty {
        /// The medium.
        name: String,
        /// What it contains.
        what: String,
    },
    /// The medium is too small for the metadata and one extent.
    #[error(
        "{name} has {size} bytes: a pool for {names} names of up to {longest_name} bytes needs at least \
         {least}"
    )]
    TooSmall {
        /// The medium.
        name: String,
        /// Its size, bytes.
        size: u64,
        /// Requested number of names.
        names: u32,
        /// Requested maximum length of a name, bytes.
        longest_name: u32,
        /// Minimum size, bytes.
        least: u64,
    },
    /// The options are out of range.
    #[error(
        "invalid options: a pool has 1 to 1048576 names of 1 to 1024 bytes, and up to 8 ascending \
         guest-size classes, each a power of two and a multiple of {granule} bytes"
    )]
    Options {
        /// The medium's granule, bytes.
        granule: u64,
    },
    /// The pool's bytes cannot be made durable.
    #[error("cannot write the new pool to {name}")]
    Medium {
        /// The medium.
        name: String,
        /// The system's error.
        source: io::Error,
    },
}

/// Why a pool cannot be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The medium contains no pool.
    #[error("{0} holds no pool: create one with `firn pool create`")]
    NoPool(String),
    /// The pool has another version.
    #[error(
        "the pool on {name} has version {found}, this firn supports {POOL_VERSION}: use the firn version \
         that created the pool, or a newer one"
    )]
    Version {
        /// The medium.
        name: String,
        /// Its version.
        found: u32,
    },
    /// The superblock is damaged and its twin is intact.
    #[error(
        "the superblock on {0} is damaged but its twin is intact: restore it with `firn pool verify \
         --repair`"
    )]
    Superblock(String),
    /// The medium is not the one on which the pool was created, or it was resized.
    #[error(
        "the pool was created for {pool} bytes and {name} has {medium}: restore the size of the medium"
    )]
    Size {
        /// The medium.
        name: String,
        /// Bytes at creation.
        pool: u64,
        /// Bytes now.
        medium: u64,
    },
    /// The medium requires a larger alignment than at creation.
    #[error(
        "the pool was created with granules of {pool} bytes and {name} requires {medium}: restore the \
         alignment of the device"
    )]
    Granule {
        /// The medium.
        name: String,
        /// Bytes at creation.
        pool: u64,
        /// Bytes now.
        medium: u64,
    },
    /// The metadata is damaged.
    #[error(
        "the pool on {name} is damaged: {problem}{}; `firn pool verify` lists all problems, and with \
         --repair removes lost snapshots", more(*.others)
    )]
    Damaged {
        /// The medium.
        name: String,
        /// The first problem.
        problem: Problem,
        /// Number of further problems.
        others: usize,
    },
    /// Recovery cannot make its changes durable.
    #[error("cannot write to {name}")]
    Medium {
        /// The medium.
        name: String,
        /// The system's error.
        source: io::Error,
    },
}

fn more(others: usize) -> String {
    if others == 0 { String::new() } else { format!(" (and {others} more)") }
}

/// Why a damaged pool cannot be repaired.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RepairError {
    /// Superblock and twin are both damaged, or the medium is refused for another reason.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The repair cannot be made durable.
    #[error("cannot write to {name}")]
    Medium {
        /// The medium.
        name: String,
        /// The system's error.
        source: io::Error,
    },
}

/// Why the medium of an open pool is not usable.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MediumFailure {
    /// Its size changed.
    #[error(
        "the pool's medium {name} had {was} bytes and has {is} now: firn does not write to it any more"
    )]
    Resized {
        /// The medium.
        name: String,
        /// Bytes when it was opened.
        was: u64,
        /// Bytes now.
        is: u64,
    },
    /// Its superblock changed.
    #[error("the pool {uuid} on {name} was overwritten: firn does not write to it any more")]
    Overwritten {
        /// The medium.
        name: String,
        /// The pool that was opened.
        uuid: Uuid,
    },
    /// Reading its size or syncing it fails.
    #[error("the pool's medium {name} fails: firn does not write to it until it is opened again")]
    Io {
        /// The medium.
        name: String,
        /// The system's error.
        source: io::Error,
    },
    /// An earlier operation failed.
    #[error("an earlier operation on the pool's medium {0} failed: open the pool again")]
    Earlier(String),
}

/// Why no extent was allocated. Nothing was changed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AllocateError {
    /// The name is not valid in this pool.
    #[error(
        "{name:?} is not a valid name in this pool: use 1 to {longest} bytes without control characters"
    )]
    Name {
        /// The name.
        name: String,
        /// Maximum length of a name, bytes.
        longest: u32,
    },
    /// The size of guest memory is not valid.
    #[error("{0} bytes of guest memory are not valid: use a positive multiple of 4096")]
    GuestBytes(u64),
    /// A snapshot of this name is being written.
    #[error("a snapshot {0:?} is being written: retry when it is complete")]
    BeingWritten(String),
    /// The address table is full.
    #[error(
        "the pool's address table is full ({names} names): remove a snapshot, or create a pool for more \
         names"
    )]
    TableFull {
        /// Its capacity.
        names: u32,
    },
    /// No free piece is large enough.
    #[error(
        "the pool lacks {missing} bytes: {needed} are needed in one piece, {free} are free in total; \
         remove snapshots or stop microVMs that hold replicas"
    )]
    Full {
        /// Size of the extent, bytes.
        needed: u64,
        /// Bytes missing in the largest usable free piece.
        missing: u64,
        /// Free bytes in all pieces together.
        free: u64,
    },
    /// The host has no memory for a replica's own. The pool goes on.
    #[error(
        "the host has no memory for {bytes} bytes of a replica in {name}: free some, or stop microVMs \
         that hold replicas"
    )]
    NoMemory {
        /// The medium.
        name: String,
        /// Size of the replica, bytes.
        bytes: u64,
        /// The system's error.
        source: io::Error,
    },
    /// The medium fails.
    #[error(transparent)]
    Medium(#[from] MediumFailure),
}

/// Why a snapshot was not published. The name still refers to its previous snapshot, if any.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PublishError {
    /// The medium fails.
    #[error(transparent)]
    Medium(#[from] MediumFailure),
}

/// Why a name has no usable snapshot.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LookupError {
    /// The name has no snapshot.
    #[error("the pool has no snapshot {0:?}: `firn pool ls` lists its snapshots")]
    Unknown(String),
    /// The first snapshot of this name is being written.
    #[error("the snapshot {0:?} is being written: retry when it is complete")]
    BeingWritten(String),
}

/// Why nothing was removed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ReclaimError {
    /// The name has no usable snapshot.
    #[error(transparent)]
    Lookup(#[from] LookupError),
    /// The medium fails.
    #[error(transparent)]
    Medium(#[from] MediumFailure),
}

/// Why no replica was allocated.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ReplicaError {
    /// The name has no usable snapshot.
    #[error(transparent)]
    Lookup(#[from] LookupError),
    /// Allocating its extent failed.
    #[error(transparent)]
    Allocate(#[from] AllocateError),
}
