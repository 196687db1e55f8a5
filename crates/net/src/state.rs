//! What a snapshot keeps of a network.

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
    /// How many connections there were.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.flows.len()
    }
}
