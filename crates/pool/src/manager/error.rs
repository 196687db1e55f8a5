//! Errors of managers and of requests to them.

use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Why a manager cannot start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServerError {
    /// Another manager uses the socket.
    #[error("a pool's manager already listens on {0}: stop it, or choose another socket")]
    InUse(PathBuf),
    /// The path is not a socket.
    #[error("{0} exists and is not a socket: choose another path")]
    NotASocket(PathBuf),
    /// The socket or its thread cannot be created.
    #[error("cannot create the socket {path}")]
    Socket {
        /// Its path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// The kind of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Refusal {
    /// The name has no snapshot.
    Unknown,
    /// A snapshot of the name is being written.
    BeingWritten,
    /// The pool has too little space for the extent, or no slot for the name.
    Full,
    /// The request is invalid.
    Invalid,
    /// The connection is confined and may not send this request.
    Confined,
    /// The pool's medium fails.
    Medium,
}

/// Why a request to a manager failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ClientError {
    /// No manager listens on the socket.
    #[error(
        "no pool's manager answers on {0}: start one with `firn pool serve`, or pass the pool's medium to \
         start one automatically"
    )]
    NotRunning(PathBuf),
    /// The connection closed before the response.
    #[error("the pool's manager on {0} closed the connection before its response")]
    Closed(PathBuf),
    /// Sending or receiving failed.
    #[error("cannot communicate with the pool's manager on {path}")]
    Socket {
        /// The socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The manager uses another protocol version.
    #[error(
        "the pool's manager on {path} uses protocol version {found} and this firn version {}: restart \
         the manager with this firn",
        super::MANAGER_VERSION
    )]
    Version {
        /// The socket.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
    /// The response is not valid.
    #[error("the response on {0} is not that of a pool's manager")]
    UnexpectedResponse(PathBuf),
    /// The manager refused.
    #[error("{message}")]
    Refused {
        /// The kind of refusal.
        refusal: Refusal,
        /// The manager's error message, with its causes.
        message: String,
    },
}
