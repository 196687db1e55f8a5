//! Errors of media.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Why a medium cannot be opened or created.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MediumError {
    /// The path does not exist or this user has no access.
    #[error("cannot open the medium {path}")]
    Open {
        /// Its path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file already exists.
    #[error("{0} already exists: omit the size to use the existing file, or choose another path")]
    Exists(PathBuf),
    /// The path is not a supported medium.
    #[error(
        "{path} is {what}: use a devdax device (`ndctl create-namespace --mode=devdax` creates one) or \
         a file"
    )]
    NoMedium {
        /// Its path.
        path: PathBuf,
        /// What the path refers to.
        what: &'static str,
    },
    /// Another process has the medium open for writing.
    #[error(
        "{0} is in use by another process: stop that process, or connect to the pool's manager through \
         its socket"
    )]
    InUse(PathBuf),
    /// Clients of an earlier manager still use the medium.
    #[error(
        "{0} is still used by clients of an earlier manager, such as running microVMs: stop them first \
         (`fuser {0}` lists them)"
    )]
    HasClients(PathBuf),
    /// The kernel does not report the device's size or alignment.
    #[error("cannot read the size or alignment of {device} from {path}")]
    Sysfs {
        /// The device.
        device: PathBuf,
        /// The sysfs file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Not enough space or memory.
    #[error("cannot reserve {size} bytes for {name}")]
    Reserve {
        /// The medium.
        name: String,
        /// Bytes.
        size: u64,
        /// The system's error.
        source: io::Error,
    },
    /// The medium cannot be bound to the NUMA node.
    #[error(
        "cannot bind {name} to NUMA node {node}; /sys/devices/system/node/has_memory lists the nodes with memory"
    )]
    Node {
        /// The medium.
        name: String,
        /// The node.
        node: u32,
        /// The system's error.
        source: io::Error,
    },
    /// Mapping the medium failed.
    #[error("cannot map the {size} bytes of the medium {name}")]
    Map {
        /// The medium.
        name: String,
        /// Bytes.
        size: u64,
        /// The system's error.
        source: io::Error,
    },
    /// Building the index failed: too little memory, or the medium has bad pages.
    #[error("cannot map every page of {name}: too little memory, or the medium has bad pages")]
    Populate {
        /// The medium.
        name: String,
        /// The system's error.
        source: io::Error,
    },
    /// The medium is smaller than one granule.
    #[error("{name} has {size} bytes; a medium needs at least {least}")]
    TooSmall {
        /// The medium.
        name: String,
        /// Its size, bytes.
        size: u64,
        /// The minimum, bytes.
        least: u64,
    },
}
