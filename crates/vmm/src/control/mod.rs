//! The control socket, with which another process controls a microVM.
//!
//! It is a unix stream socket. A client writes one JSON object on each line, a [`Request`]; the
//! monitor answers each with one line, a [`Response`], in order. The descriptors of a request are
//! sent (`SCM_RIGHTS`) with its first byte, after the response to the request before.

mod client;
mod server;
mod wire;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use firn_snapshot::{Begin, Begun, FreezeReport, Seal};

use crate::kvm::KvmStats;

pub use client::{ControlClient, ControlError};
pub use server::{ControlServerError, serve_control};

/// The longest request or response, bytes.
pub(crate) const MAX_LINE: usize = 1 << 20;

/// A request of a client.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
pub enum Request {
    /// Report costs and counters of the microVM.
    Status,
    /// The first step of a freeze: pause, save, and write the files that come with the request
    /// ([`firn_snapshot::Target`]). The microVM stays paused until `resume` or `stop` on the same
    /// connection. If the client disconnects instead, the guest continues, with a new generation
    /// id.
    Freeze(Begin),
    /// The second step of a freeze, if the guest has not continued: write the file that comes with
    /// the request, or pass the bytes of an extent through what comes with it
    /// ([`firn_snapshot::Seal`]).
    Seal {
        /// What is written.
        seal: Seal,
    },
    /// Resume a paused guest.
    Resume {
        /// The new generation id of the guest, because clones of its snapshot share the old id.
        generation: Uuid,
    },
    /// End the microVM and its process.
    Stop,
}

/// The costs and counters of a microVM.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Status {
    /// Guest memory, bytes.
    pub memory: u64,
    /// Guest memory in DRAM that only this microVM uses, bytes.
    pub private: u64,
    /// Guest memory in DRAM that other microVMs can share, bytes.
    pub shared: u64,
    /// KVM's counters.
    pub kvm: KvmStats,
    /// The errors of devices that stopped.
    pub device_errors: Vec<String>,
}

/// A response of the monitor.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "response", rename_all = "snake_case")]
pub enum Response {
    /// The request succeeded.
    Done,
    /// The answer to [`Request::Status`].
    Status(Box<Status>),
    /// The answer to [`Request::Freeze`].
    Begun {
        /// What was written, or what is needed.
        begun: Begun,
    },
    /// The answer to [`Request::Seal`].
    Sealed(Box<FreezeReport>),
    /// The request failed.
    Error {
        /// The error, with its causes.
        message: String,
    },
}

#[cfg(test)]
mod tests;
