//! Why a snapshot could not be written.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::container::Section;

/// Why [`crate::Writer`] gave up. The destination is as it was before.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FreezeError {
    /// The destination has no last name, as `/` and `..` have none.
    #[error("{} cannot be a snapshot's directory: give a path that ends in a name", .path.display())]
    BadDestination {
        /// The destination.
        path: PathBuf,
    },
    /// The directory that the snapshot shall lie in cannot be opened.
    #[error("the snapshot's parent directory {} cannot be opened; create it first", .path.display())]
    Parent {
        /// The parent directory.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// The destination exists, and is something else than a snapshot.
    #[error("{} exists and is not a snapshot: {reason}; it was left alone: choose another path, or remove it", .path.display())]
    NotASnapshot {
        /// The destination.
        path: PathBuf,
        /// What shows it.
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
    /// Other processes kept changing the destination.
    #[error("{} was changed by other processes again and again; try again when they are done", .path.display())]
    Contended {
        /// The destination.
        path: PathBuf,
    },
    /// No space, or a quota reached.
    #[error(
        "no space (or quota) to write {}: it needs {needed} bytes, and {available} are available; free \
         some, or choose another file system",
        .path.display()
    )]
    NoSpace {
        /// The file.
        path: PathBuf,
        /// Bytes that the whole file takes.
        needed: u64,
        /// Bytes that there were for it.
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
    /// The source of guest memory gave another number of bytes than a chunk has.
    #[error(
        "the source of guest memory gave {actual} bytes instead of {expected} at offset {image_offset:#x} of the image"
    )]
    ChunkLength {
        /// Offset in the image.
        image_offset: u64,
        /// Bytes asked for.
        expected: usize,
        /// Bytes given.
        actual: usize,
    },
    /// The writable disk could not be read.
    #[error("the writable disk cannot be read")]
    Overlay {
        /// Why it failed.
        source: io::Error,
    },
    /// [`crate::Writer::seal`] before [`crate::Writer::write_image`].
    #[error("a snapshot without an image of guest memory cannot be sealed: write the image first")]
    NoImage,
    /// A disk's path that the manifest cannot hold.
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
    /// A section is larger than a reader accepts.
    #[error("the {section} has {len} bytes; a snapshot holds at most {max}")]
    TooLarge {
        /// The section.
        section: Section,
        /// Its length in bytes.
        len: usize,
        /// Most bytes allowed.
        max: u64,
    },
    /// The extent of a pool could not be written.
    #[error("cannot {action} the snapshot's extent")]
    Extent {
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// What is not zero of the writable disk lies in more pieces than a reader accepts.
    #[error(
        "the writable disk's data lies in more than {max} pieces, the most that a snapshot in a pool has: freeze \
         into a directory, or free some of the disk's space in the guest (fstrim)"
    )]
    TooManyRuns {
        /// Most pieces allowed.
        max: u64,
    },
    /// The operating system refused.
    #[error("cannot {action} {}", .path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}
