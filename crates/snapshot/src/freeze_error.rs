//! Errors of writing a snapshot.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

use crate::attach::AttachError;
use crate::section::Section;

/// Why writing a snapshot failed. The destination is unchanged.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FreezeError {
    /// The destination does not end in a name, like `/` and `..`.
    #[error("{} cannot be a snapshot's directory: give a path that ends in a name", .path.display())]
    BadDestination {
        /// The destination.
        path: PathBuf,
    },
    /// The parent directory cannot be opened.
    #[error("the snapshot's parent directory {} cannot be opened; create it first", .path.display())]
    Parent {
        /// The parent directory.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// The destination exists and is not a snapshot.
    #[error("{} exists and is not a snapshot: {reason}; it was not changed; choose another path, or remove it", .path.display())]
    NotASnapshot {
        /// The destination.
        path: PathBuf,
        /// The reason.
        reason: &'static str,
    },
    /// The file system cannot swap two directories in one step.
    #[error(
        "the file system of {} cannot exchange directories (renameat2), so a snapshot there cannot be \
         replaced safely: remove the old one first, or use a local file system",
        .path.display()
    )]
    ExchangeUnsupported {
        /// The destination.
        path: PathBuf,
    },
    /// Other processes changed the destination during every attempt.
    #[error("other processes changed {} during every attempt; try again when no other process changes it", .path.display())]
    Contended {
        /// The destination.
        path: PathBuf,
    },
    /// There is no space left, or a quota is reached.
    #[error(
        "no space (or quota) to write {}: it needs {needed} bytes, and {available} are available; free \
        space, or choose another file system",
        .path.display()
    )]
    NoSpace {
        /// The file.
        path: PathBuf,
        /// Size of the whole file in bytes.
        needed: u64,
        /// Bytes that were available.
        available: u64,
    },
    /// Guest memory could not be read.
    #[error("guest memory cannot be read at offset {image_offset:#x} of the image")]
    Memory {
        /// Offset in the image.
        image_offset: u64,
        /// Why it failed.
        source: io::Error,
    },
    /// The source of guest memory returned the wrong number of bytes.
    #[error(
        "the source of guest memory returned {actual} bytes instead of {expected} at offset {image_offset:#x} of the image"
    )]
    ChunkLength {
        /// Offset in the image.
        image_offset: u64,
        /// Requested bytes.
        expected: usize,
        /// Returned bytes.
        actual: usize,
    },
    /// The pages that were written since the last freeze are not known.
    #[error("the microVM does not track which pages of its memory are written")]
    NotTracked,
    /// The writable disk could not be read.
    #[error("the writable disk cannot be read")]
    Overlay {
        /// Why it failed.
        source: io::Error,
    },
    /// A step of a freeze came with too few or too many descriptors.
    #[error("this step of a freeze takes {expected} descriptors, and {actual} came")]
    Descriptors {
        /// The descriptors that it takes.
        expected: usize,
        /// The descriptors that came.
        actual: usize,
    },
    /// The second step of a freeze without a first, or the machine has run since.
    #[error("no freeze of this machine has begun since it last ran")]
    NotBegun,
    /// The second step of a freeze does not belong to the first.
    #[error("a snapshot that was begun as {begun} cannot be sealed as {sealed}")]
    Steps {
        /// What was begun.
        begun: &'static str,
        /// What was to be sealed.
        sealed: &'static str,
    },
    /// The supervisor cannot make, or not use, what the monitor passes an extent through.
    #[error("cannot receive the snapshot from the monitor")]
    Window {
        /// Why it failed.
        source: io::Error,
    },
    /// The supervisor takes no more of an extent: it has failed or ended.
    #[error("the supervisor of the freeze takes no more of the snapshot")]
    HandOver {
        /// Why it failed.
        source: io::Error,
    },
    /// A monitor passes what is not a part of the extent.
    #[error("the monitor passed a part of the snapshot that cannot be written: {reason}")]
    Passed {
        /// The reason.
        reason: &'static str,
    },
    /// A monitor has passed too little.
    #[error("the monitor did not pass {missing} of the {of} parts of the snapshot")]
    Incomplete {
        /// The parts that are missing, of up to 2 MiB each.
        missing: u64,
        /// All parts.
        of: u64,
    },
    /// A monitor passes no bytes, or passes them too slowly.
    #[error("the monitor did not pass the snapshot within {limit:?}")]
    Stalled {
        /// The time limit.
        limit: Duration,
    },
    /// The machine's report contradicts what it wrote.
    #[error("the monitor's report on the freeze is not true: {reason}")]
    Report {
        /// The contradiction.
        reason: &'static str,
    },
    /// The signature cannot be made.
    #[error("cannot sign the snapshot")]
    Sign {
        /// Why it failed.
        source: Box<AttachError>,
    },
    /// A snapshot cannot be signed.
    #[error("{} cannot be signed: its length is not that of a snapshot with this memory.img", .path.display())]
    Unsignable {
        /// Its `snapshot.firn`.
        path: PathBuf,
    },
    /// A descriptor cannot be duplicated.
    #[error("cannot duplicate a descriptor for the monitor")]
    Duplicate {
        /// Why it failed.
        source: io::Error,
    },
    /// A disk's path is not UTF-8.
    #[error("the path of disk {} is not UTF-8: rename the file", .path.display())]
    PathNotUtf8 {
        /// The disk's path.
        path: PathBuf,
    },
    /// The manifest could not be encoded.
    #[error("the manifest cannot be encoded")]
    Encode {
        /// Why it failed.
        source: postcard::Error,
    },
    /// A section is larger than the maximum.
    #[error("the {section} has {len} bytes; a snapshot holds at most {max}")]
    TooLarge {
        /// The section.
        section: Section,
        /// Its length in bytes.
        len: usize,
        /// The maximum length in bytes.
        max: u64,
    },
    /// The extent of a pool could not be written.
    #[error("cannot {action} the snapshot's extent")]
    Extent {
        /// The failed action.
        action: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The writable disk's data is in more pieces than the maximum.
    #[error(
        "the writable disk's data is in more than {max} pieces, the maximum for a snapshot in a pool: freeze into \
        a directory, or free space on the disk in the guest (fstrim)"
    )]
    TooManyRuns {
        /// The maximum number of pieces.
        max: u64,
    },
    /// The operating system returned an error.
    #[error("cannot {action} {}", .path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The failed action.
        action: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}
