//! Why a snapshot is refused.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::container::Section;
use crate::profile::ProfileError;

/// Why [`crate::Snapshot::open`] refuses a snapshot. Nothing has been written or started then.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The path does not exist.
    #[error("no snapshot at {}: the path does not exist; check its spelling", .path.display())]
    NotFound {
        /// The snapshot's directory.
        path: PathBuf,
    },
    /// What lies there is something else.
    #[error("{} is not a snapshot: {reason}; give a directory that firn freeze made", .path.display())]
    NotASnapshot {
        /// The directory, or the file in it.
        path: PathBuf,
        /// What shows it.
        reason: &'static str,
    },
    /// A file of the snapshot is missing.
    #[error("{} is missing: the snapshot is incomplete; copy the whole directory again, or freeze again", .path.display())]
    MissingFile {
        /// The file.
        path: PathBuf,
    },
    /// A file of the snapshot is a link, a directory, a device.
    #[error("{} is not a regular file: a snapshot holds its files themselves, not links to them", .path.display())]
    NotAFile {
        /// The file.
        path: PathBuf,
    },
    /// A file is shorter than it must be.
    #[error(
        "{}{} is truncated: {actual} bytes of {expected}; copy the snapshot again, or freeze again",
        .path.display(), section_suffix(*.section)
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// The first section that is cut, for `snapshot.firn`.
        section: Option<Section>,
        /// Length that the file must have, in bytes.
        expected: u64,
        /// Length that it has, in bytes.
        actual: u64,
    },
    /// A file is longer than it must be.
    #[error(
        "{} is too long: {actual} bytes instead of {expected}; it belongs to another snapshot, or was \
         appended to: copy the snapshot again, or freeze again",
        .path.display()
    )]
    TooLong {
        /// The file.
        path: PathBuf,
        /// Length that the file must have, in bytes.
        expected: u64,
        /// Length that it has, in bytes.
        actual: u64,
    },
    /// A section's bytes are not those that were written.
    #[error("{}: the {section} is damaged: its CRC does not match; copy the snapshot again, or freeze again", .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The section.
        section: Section,
    },
    /// A section's CRC is right, but what it says cannot be.
    #[error("{}: the {section} is malformed: {reason}; freeze again, or report a bug", .path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The section.
        section: Section,
        /// What is wrong.
        reason: &'static str,
    },
    /// A section claims a length that no snapshot has.
    #[error("{}: the {section} claims {len} bytes; at most {max} are allowed; freeze again, or report a bug", .path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The section.
        section: Section,
        /// Length claimed, in bytes.
        len: u64,
        /// Length allowed, in bytes.
        max: u64,
    },
    /// Written in a container version that this firn does not read.
    #[error(
        "{} has container version {found}; this firn reads version {supported}: thaw it with the firn \
         that froze it, or freeze again",
        .path.display()
    )]
    ContainerVersion {
        /// The file.
        path: PathBuf,
        /// Version of the file.
        found: u32,
        /// Version that is read.
        supported: u32,
    },
    /// The profile has a version that this firn does not read.
    #[error(
        "{} has profile version {found}; this firn reads version {supported}: thaw it with the firn \
         that froze it, or freeze again",
        .path.display()
    )]
    ProfileVersion {
        /// The file.
        path: PathBuf,
        /// Version of the file.
        found: u32,
        /// Version that is read.
        supported: u32,
    },
    /// The profile is not one of this snapshot.
    #[error("{} holds a profile that cannot be used", .path.display())]
    Profile {
        /// The file.
        path: PathBuf,
        /// Why.
        source: ProfileError,
    },
    /// Frozen on another architecture.
    #[error(
        "{} was frozen on {}; this host is {}: thaw it on a host of its own architecture",
        .path.display(), architecture_name(*.found), architecture_name(*.host)
    )]
    Architecture {
        /// The file.
        path: PathBuf,
        /// Architecture of the file, as ELF's `e_machine`.
        found: u32,
        /// Architecture of this host, as ELF's `e_machine`.
        host: u32,
    },
    /// Each attempt found another snapshot in the place of the one it had begun to read.
    #[error("{} was replaced {attempts} times while it was opened; try again when no freeze runs", .path.display())]
    Replaced {
        /// The snapshot's directory.
        path: PathBuf,
        /// How often it was tried.
        attempts: u32,
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

fn section_suffix(section: Option<Section>) -> String {
    section.map_or_else(String::new, |section| format!(" ({section})"))
}

fn architecture_name(machine: u32) -> String {
    match machine {
        62 => "x86-64".into(),
        183 => "AArch64".into(),
        other => format!("architecture {other} (ELF e_machine)"),
    }
}
