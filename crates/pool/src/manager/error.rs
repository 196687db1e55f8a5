//! Why a manager, or a request to one, failed.

use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Why a manager does not serve.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServerError {
    /// Another manager answers there.
    #[error("a pool's manager already serves {0}: end it, or choose another socket")]
    Taken(PathBuf),
    /// Something else is there.
    #[error("{0} exists and is no socket: choose another path")]
    NoSocket(PathBuf),
    /// It cannot be made.
    #[error("making the socket {path}")]
    Socket {
        /// Its path.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// The kind of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Refusal {
    /// No snapshot has the name.
    Unknown,
    /// Its first snapshot, or an update of it, is being written.
    BeingWritten,
    /// There is no room: for the extent or for the name.
    Full,
    /// The request makes no sense.
    Invalid,
    /// The pool's medium fails.
    Medium,
}

/// Why a request to a manager failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ClientError {
    /// Nobody listens.
    #[error(
        "no pool's manager answers on {0}: start one with `firn pool serve`, or name the pool's medium, whose manager is then started"
    )]
    Gone(PathBuf),
    /// The connection broke before the answer.
    #[error("the pool's manager on {0} ended before it answered")]
    Ended(PathBuf),
    /// Talking to the socket failed.
    #[error("talking to the pool's manager on {path}")]
    Socket {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// It speaks another version.
    #[error(
        "the pool's manager on {path} speaks version {found} and this firn version {}: start it again with this firn",
        super::MANAGER_VERSION
    )]
    Version {
        /// The socket.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
    /// The answer is none of ours.
    #[error("the answer on {0} is not that of a pool's manager")]
    Answer(PathBuf),
    /// The manager refused.
    #[error("{message}")]
    Refused {
        /// What kind of refusal.
        refusal: Refusal,
        /// What the manager says, with the causes.
        message: String,
    },
}
