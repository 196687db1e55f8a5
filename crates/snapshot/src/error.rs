//! Errors of opening a snapshot.

use std::io;
use std::path::PathBuf;

use firn_pool::{ClientError, MapExtentError};
use thiserror::Error;

use crate::digests::DigestError;
use crate::profile::ProfileError;
use crate::section::Section;

/// Why [`crate::Snapshot::open`] failed. Nothing was written or started.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The path does not exist.
    #[error("no snapshot at {}: the path does not exist; check its spelling", .path.display())]
    NotFound {
        /// The snapshot's directory.
        path: PathBuf,
    },
    /// The path is not a snapshot.
    #[error("{} is not a snapshot: {reason}; give a directory that firn freeze made", .path.display())]
    NotASnapshot {
        /// The directory, or the file in it.
        path: PathBuf,
        /// The reason.
        reason: &'static str,
    },
    /// A file of the snapshot is missing.
    #[error("{} is missing: the snapshot is incomplete; copy the whole directory again, or freeze again", .path.display())]
    MissingFile {
        /// The file.
        path: PathBuf,
    },
    /// A file of the snapshot is not a regular file.
    #[error("{} is not a regular file: a snapshot must not contain links; copy the file itself", .path.display())]
    NotAFile {
        /// The file.
        path: PathBuf,
    },
    /// A file is too short.
    #[error(
        "{}{} is truncated: {actual} bytes of {expected}; copy the snapshot again, or freeze again",
        .path.display(), section_suffix(*.section)
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// The first truncated section, for `snapshot.firn`.
        section: Option<Section>,
        /// Expected length in bytes.
        expected: u64,
        /// Actual length in bytes.
        actual: u64,
    },
    /// A file is too long.
    #[error(
        "{} is too long: {actual} bytes instead of {expected}; it belongs to another snapshot, or data \
        was appended; copy the snapshot again, or freeze again",
        .path.display()
    )]
    TooLong {
        /// The file.
        path: PathBuf,
        /// Expected length in bytes.
        expected: u64,
        /// Actual length in bytes.
        actual: u64,
    },
    /// A file is not the one that fs-verity protects by the manifest.
    #[error(
        "{} is not the file that the snapshot's manifest names: {}; copy the file again, or check the \
         snapshot with firn verify --protect, which also protects its files again",
        .path.display(), if *.protected { "its fs-verity digest differs" } else { "fs-verity does not protect it" }
    )]
    Protection {
        /// The file.
        path: PathBuf,
        /// Whether fs-verity protects it, with another digest.
        protected: bool,
    },
    /// A snapshot that must be signed is not.
    #[error(
        "{} is missing: the snapshot is not signed; if you trust it, sign it with firn verify \
         --signing-key", .path.display()
    )]
    Unsigned {
        /// The file with the signature.
        path: PathBuf,
    },
    /// The signature is not one for the tenant with the key.
    #[error(
        "{} has no valid signature for the tenant {tenant:?}: it was made with another key or for \
         another tenant, or it was changed; give the key and the tenant that the snapshot was \
         signed with, or, if you trust it, sign it again with firn verify --signing-key",
        .path.display()
    )]
    Signature {
        /// The file with the signature, or the name of a snapshot in a pool.
        path: PathBuf,
        /// The tenant.
        tenant: String,
    },
    /// A file differs from the one that was signed.
    #[error(
        "{} is not the file that was signed; copy the snapshot again, or, if you trust it, sign it \
         again with firn verify --signing-key", .path.display()
    )]
    NotSigned {
        /// The file.
        path: PathBuf,
    },
    /// A snapshot in a pool that must be signed is not.
    #[error(
        "the snapshot {} in the pool is not signed; freeze it again with a key, or, if you trust \
         it, sign it with firn verify --pool --signing-key", .name.display()
    )]
    UnsignedInPool {
        /// The snapshot.
        name: PathBuf,
    },
    /// A snapshot in a pool differs from what was signed.
    #[error(
        "the {part} of {} in the pool is not what was signed; freeze it again, or, if you trust \
         it, sign it again with firn verify --pool --signing-key", .name.display()
    )]
    NotSignedInPool {
        /// The snapshot.
        name: PathBuf,
        /// What differs.
        part: &'static str,
    },
    /// A section's CRC does not match.
    #[error("{}: the {section} is damaged: its CRC does not match; copy the snapshot again, or freeze again", .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The section.
        section: Section,
    },
    /// A section's CRC matches, but its content is invalid.
    #[error("{}: the {section} is malformed: {reason}; freeze again, or report a bug", .path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The section.
        section: Section,
        /// The reason.
        reason: &'static str,
    },
    /// A section's length is more than the maximum.
    #[error("{}: the {section} has a length of {len} bytes; at most {max} are allowed; freeze again, or report a bug", .path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The section.
        section: Section,
        /// The section's length in bytes.
        len: u64,
        /// The maximum length in bytes.
        max: u64,
    },
    /// The container version is not supported.
    #[error(
        "{} has container version {found}; this firn reads versions up to {supported}: thaw it with the \
         firn that froze it, or freeze again",
        .path.display()
    )]
    ContainerVersion {
        /// The file.
        path: PathBuf,
        /// Version of the file.
        found: u32,
        /// The newest supported version.
        supported: u32,
    },
    /// The profile version is not supported.
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
        /// Supported version.
        supported: u32,
    },
    /// The profile does not match the snapshot.
    #[error("the profile in {} is invalid", .path.display())]
    Profile {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: ProfileError,
    },
    /// The snapshot was frozen on another architecture.
    #[error(
        "{} was frozen on {}; this host is {}: thaw it on a host with the architecture of the snapshot",
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
    /// The snapshot was replaced during every attempt to open it.
    #[error("{} was replaced {attempts} times while it was opened; try again when no freeze is running", .path.display())]
    Replaced {
        /// The snapshot's directory.
        path: PathBuf,
        /// Number of attempts.
        attempts: u32,
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

/// Why a snapshot in a pool cannot be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenPooledError {
    /// The manager returned an error.
    #[error(transparent)]
    Manager(#[from] ClientError),
    /// The extent cannot be mapped.
    #[error(transparent)]
    Map(#[from] MapExtentError),
    /// The medium's descriptor cannot be duplicated.
    #[error("cannot duplicate the descriptor of the pool's medium")]
    Descriptor(#[source] io::Error),
    /// The content of the extent is invalid.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The guest memory is damaged.
    #[error("the snapshot {name} in the pool at {} is damaged; freeze it again", .pool.display())]
    Damaged {
        /// The snapshot.
        name: String,
        /// The socket of the pool's manager.
        pool: PathBuf,
        /// The first damaged page.
        source: DigestError,
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
