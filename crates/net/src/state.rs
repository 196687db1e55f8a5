//! What a snapshot keeps of a network.

use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

use crate::flow::FlowKey;
use crate::seq::Seq;

/// The TCP connections of a frozen guest: enough to reset each of them after a thaw.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkState {
    pub(crate) flows: Vec<SavedFlow>,
}

/// One connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedFlow {
    pub(crate) key: FlowKey,
    /// What the guest expects next; `None` if it expects the answer to its SYN.
    pub(crate) next_to_guest: Option<Seq>,
    /// The end of what the guest has sent.
    pub(crate) next_from_guest: Seq,
}

impl NetworkState {
    /// Moves the connections to `address` out of this state.
    #[must_use]
    pub fn split_off(&mut self, address: Ipv4Addr) -> Self {
        let is_to = |flow: &mut SavedFlow| flow.key.remote.ip() == address;
        Self { flows: self.flows.extract_if(.., is_to).collect() }
    }

    /// Adds the connections of another state, which are reset before those of this one.
    #[must_use]
    pub fn after(self, mut other: Self) -> Self {
        other.flows.extend(self.flows);
        other
    }

    /// How many connections there were.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.flows.len()
    }
}
