//! The control socket, with which another process controls a microVM.
//!
//! It is a unix stream socket. A client writes one JSON object on each line, a [`Request`]; the
//! monitor answers each with one line, a [`Response`], in order.

mod client;
mod server;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use firn_snapshot::FunctionInfo;

use crate::kvm::KvmStats;
use crate::microvm::{Destination, FreezeReport};

pub use client::{ControlClient, ControlError};
pub use server::{ControlServerError, serve_control};

/// The longest request or response, bytes.
pub(crate) const MAX_LINE: u64 = 1 << 20;

/// A request of a client.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
pub enum Request {
    /// Report costs and counters of the microVM.
    Status,
    /// Pause, save and seal. The microVM stays paused until `resume` or `stop` on the same
    /// connection. If the client disconnects instead, the guest continues, with a new generation
    /// id.
    Freeze {
        /// The place of the snapshot.
        destination: Destination,
        /// Write zero pages too, instead of leaving holes.
        dense: bool,
        /// The function, as the snapshot's manifest describes it.
        function: Option<FunctionInfo>,
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
    Frozen(Box<FreezeReport>),
    /// The request failed.
    Error {
        /// The error, with its causes.
        message: String,
    },
}

#[cfg(test)]
mod tests;
