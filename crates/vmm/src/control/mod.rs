//! The control socket: how another process talks to a microVM's monitor.
//!
//! A unix stream socket. A client writes one JSON object a line, a [`Request`]; the monitor answers
//! each with one line, a [`Response`]. Requests of one connection are answered in order.

mod client;
mod server;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use firn_snapshot::FunctionInfo;

use crate::microvm::{Destination, FreezeReport};
use crate::stats::KvmStats;

pub use client::{ControlClient, ControlError};
pub use server::{ControlServer, ControlServerError};

/// Longest request or response, bytes.
pub(crate) const MAX_LINE: u64 = 1 << 20;

/// What a client asks for.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
pub enum Request {
    /// How the microVM is.
    Status,
    /// Pause, save and seal. The microVM stays paused; `resume` or `stop` comes next on the same
    /// connection. Where the client goes away instead, the guest runs on, under a new generation id.
    Freeze {
        /// Where the snapshot goes.
        destination: Destination,
        /// Write zero pages too, instead of leaving holes.
        dense: bool,
        /// What the snapshot's manifest says of the function inside.
        function: Option<FunctionInfo>,
    },
    /// Let a paused guest run on.
    Resume {
        /// The generation id that it has from now on: its snapshot's clones share the old one.
        generation: Uuid,
    },
    /// End the microVM and its process.
    Stop,
}

/// What a microVM costs and counts now.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Status {
    /// Process id of the monitor.
    pub pid: u32,
    /// Guest memory, bytes.
    pub memory: u64,
    /// What of it is in DRAM and belongs to this microVM alone, bytes.
    pub private: u64,
    /// What of it is in DRAM and can be shared, bytes.
    pub shared: u64,
    /// What KVM counted.
    pub kvm: KvmStats,
    /// Why devices stopped serving the guest, of those that did.
    pub device_errors: Vec<String>,
}

/// What the monitor answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "response", rename_all = "snake_case")]
pub enum Response {
    /// Done; there is nothing to tell.
    Done,
    /// The answer to [`Request::Status`].
    Status(Box<Status>),
    /// The answer to [`Request::Freeze`].
    Frozen(Box<FreezeReport>),
    /// It could not be done.
    Error {
        /// What was wrong, with its causes.
        message: String,
    },
}

#[cfg(test)]
mod tests;
