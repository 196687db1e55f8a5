//! Why a medium cannot be used.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Why a medium cannot be opened or made.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MediumError {
    /// It is not there, or not for this user.
    #[error("opening the medium {path}")]
    Open {
        /// Its path.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// It exists already.
    #[error("{0} exists already: it is used as it is, so give no size, or choose another path")]
    Exists(PathBuf),
    /// It is something else.
    #[error(
        "{path} is {what}, no medium: use a devdax device (ndctl create-namespace --mode=devdax makes \
         one) or a file"
    )]
    NoMedium {
        /// Its path.
        path: PathBuf,
        /// What it is.
        what: &'static str,
    },
    /// Another process writes it.
    #[error(
        "{0} is in use by another process: end it, or ask the pool's manager by the socket that it serves"
    )]
    InUse(PathBuf),
    /// A manager that ended or was killed had clients, and they are still there.
    #[error(
        "{0} is still used by processes that an earlier manager served, such as running microVMs: end them first (`fuser {0}` \
         lists who has it open)"
    )]
    HasClients(PathBuf),
    /// The kernel does not say how large it is.
    #[error("reading size and alignment of {device} in {path}")]
    Sysfs {
        /// The device.
        device: PathBuf,
        /// The file that should say it.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// There are not that many bytes.
    #[error("reserving {size} bytes for {name}")]
    Reserve {
        /// The medium.
        name: String,
        /// Bytes.
        size: u64,
        /// What the system said.
        source: io::Error,
    },
    /// It cannot be bound to the node.
    #[error("binding {name} to NUMA node {node}; /sys/devices/system/node lists those with memory")]
    Node {
        /// The medium.
        name: String,
        /// The node.
        node: u32,
        /// What the system said.
        source: io::Error,
    },
    /// Mapping it failed.
    #[error("mapping the medium {name} of {size} bytes")]
    Map {
        /// The medium.
        name: String,
        /// Bytes.
        size: u64,
        /// What the system said.
        source: io::Error,
    },
    /// Its index could not be built: memory is short, or the medium has bad pages.
    #[error("mapping every page of {name} (its memory is short or bad)")]
    Populate {
        /// The medium.
        name: String,
        /// What the system said.
        source: io::Error,
    },
    /// Less than one granule.
    #[error("{name} has {size} bytes; a medium has at least {least}")]
    TooSmall {
        /// The medium.
        name: String,
        /// Its bytes.
        size: u64,
        /// The least.
        least: u64,
    },
}
