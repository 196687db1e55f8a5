//! Why an operation on a pool failed: one type for each.

use std::io;

use thiserror::Error;
use uuid::Uuid;

use super::problem::Problem;
use crate::layout::POOL_VERSION;

/// Why no pool was made.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CreateError {
    /// Something is there.
    #[error(
        "{name} holds {what}: choose another medium, or overwrite it (`firn pool create --overwrite`)"
    )]
    NotEmpty {
        /// The medium.
        name: String,
        /// What it holds.
        what: String,
    },
    /// The medium has no room for the metadata and one extent.
    #[error(
        "{name} has {size} bytes; a pool for {names} names of up to {longest_name} bytes needs at least \
         {least}"
    )]
    TooSmall {
        /// The medium.
        name: String,
        /// Its bytes.
        size: u64,
        /// Names asked for.
        names: u32,
        /// Bytes of the longest.
        longest_name: u32,
        /// Bytes that it needs.
        least: u64,
    },
    /// Numbers that no pool can have.
    #[error(
        "a pool has 1 to 1048576 names of 1 to 1024 bytes, and up to 8 ascending guest-size classes, each a \
         power of two and a multiple of {granule} bytes"
    )]
    Options {
        /// The medium's granule, bytes.
        granule: u64,
    },
    /// Its bytes cannot be made durable.
    #[error("writing the new pool to {name}")]
    Medium {
        /// The medium.
        name: String,
        /// What the system said.
        source: io::Error,
    },
}

/// Why a pool cannot be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// There is none.
    #[error("{0} holds no pool: make one with `firn pool create`")]
    NoPool(String),
    /// Of another version.
    #[error(
        "the pool on {name} has version {found}, this firn knows {POOL_VERSION}: use the firn that made it, or a \
         newer one"
    )]
    Version {
        /// The medium.
        name: String,
        /// Its version.
        found: u32,
    },
    /// The superblock is damaged, its twin is whole.
    #[error(
        "the superblock on {0} is damaged, its twin is whole: restore it with `firn pool verify --repair`"
    )]
    Superblock(String),
    /// The medium is not the one on which the pool was made, or was resized.
    #[error(
        "the pool was made for {pool} bytes and {name} has {medium}: give the medium its size back"
    )]
    Size {
        /// The medium.
        name: String,
        /// Bytes at creation.
        pool: u64,
        /// Bytes now.
        medium: u64,
    },
    /// The medium can only be mapped in larger pieces than before.
    #[error(
        "the pool was made in granules of {pool} bytes and {name} is mapped in pieces of {medium}: give the device \
         its alignment back"
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
        "the pool on {name} is damaged: {problem}{}; `firn pool verify` lists all, and with --repair removes what \
         is lost", more(*.others)
    )]
    Damaged {
        /// The medium.
        name: String,
        /// The first problem.
        problem: Problem,
        /// How many there are besides.
        others: usize,
    },
    /// Recovery cannot make its changes durable.
    #[error("writing to {name}")]
    Medium {
        /// The medium.
        name: String,
        /// What the system said.
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
    #[error("writing to {name}")]
    Medium {
        /// The medium.
        name: String,
        /// What the system said.
        source: io::Error,
    },
}

/// The medium under an open pool is not what it was.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MediumFailure {
    /// Another size.
    #[error(
        "the pool's medium {name} had {was} bytes and has {is} now: nothing is written to it any more"
    )]
    Resized {
        /// The medium.
        name: String,
        /// Bytes when it was opened.
        was: u64,
        /// Bytes now.
        is: u64,
    },
    /// Another superblock.
    #[error("the pool {uuid} on {name} was overwritten: nothing is written to it any more")]
    Overwritten {
        /// The medium.
        name: String,
        /// The pool that was opened.
        uuid: Uuid,
    },
    /// It cannot be looked at, or not be synced.
    #[error(
        "the pool's medium {name} fails: nothing is written to it any more until it is opened again"
    )]
    Io {
        /// The medium.
        name: String,
        /// What the system said.
        source: io::Error,
    },
    /// It failed before.
    #[error("the pool's medium {0} has failed before: open the pool again")]
    Earlier(String),
}

/// Why no extent was allocated. Nothing was changed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AllocateError {
    /// Not a name that this pool can hold.
    #[error(
        "{name:?} is no name for a snapshot in this pool: use 1 to {longest} bytes without control characters"
    )]
    Name {
        /// The name.
        name: String,
        /// Bytes of the longest name.
        longest: u32,
    },
    /// No guest has this size.
    #[error("guest memory of {0} bytes: it is a multiple of 4096, and not 0")]
    GuestBytes(u64),
    /// Somebody writes a snapshot of that name.
    #[error("a snapshot {0:?} is being written: try again when it is done")]
    BeingWritten(String),
    /// The address table is full.
    #[error(
        "the pool's address table is full ({names} names): reclaim a snapshot, or make a pool for more names"
    )]
    TableFull {
        /// Its capacity.
        names: u32,
    },
    /// No place is large enough.
    #[error(
        "the pool lacks {missing} bytes: {needed} are needed in one piece, {free} are free in all; reclaim \
         snapshots or end microVMs that hold replicas"
    )]
    Full {
        /// Bytes that the extent has.
        needed: u64,
        /// Bytes that the largest usable free piece lacks.
        missing: u64,
        /// Free bytes, all pieces together.
        free: u64,
    },
    /// The medium fails.
    #[error(transparent)]
    Medium(#[from] MediumFailure),
}

/// Why a snapshot was not published. The name has what it had.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PublishError {
    /// The medium fails.
    #[error(transparent)]
    Medium(#[from] MediumFailure),
}

/// Why there is no such snapshot to use.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LookupError {
    /// Unknown.
    #[error("the pool has no snapshot {0:?}: `firn pool ls` lists those that it has")]
    Unknown(String),
    /// The first one of that name is being written.
    #[error("the snapshot {0:?} is being written: try again when it is done")]
    BeingWritten(String),
}

/// Why nothing was reclaimed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ReclaimError {
    /// There is no such snapshot.
    #[error(transparent)]
    Lookup(#[from] LookupError),
    /// The medium fails.
    #[error(transparent)]
    Medium(#[from] MediumFailure),
}

/// Why there is no replica.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ReplicaError {
    /// There is no such snapshot.
    #[error(transparent)]
    Lookup(#[from] LookupError),
    /// There is no room for it.
    #[error(transparent)]
    Allocate(#[from] AllocateError),
}
