//! What a snapshot keeps of the connections, and the resets after a thaw.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::{MAX_FLOWS, Proxy};
use crate::flow::{FlowKey, FlowProtocol};
use crate::neighbour;
use crate::state::{NetworkState, SavedFlow};
use crate::table::Flow;

/// The resets after a thaw, which other threads wait for.
///
/// The guest has handled them when it has answered a question that its device got after the last
/// of them. Clones are the same one.
#[derive(Clone, Debug, Default)]
pub struct PendingResets(Arc<(Mutex<usize>, Condvar)>);

impl PendingResets {
    /// Waits until the guest has handled all resets. Without a reset it returns at once.
    ///
    /// # Errors
    /// It has not within `limit`: how many there are in all.
    pub fn wait(&self, limit: Duration) -> Result<(), usize> {
        let (count, changed) = &*self.0;
        let deadline = Instant::now() + limit;
        let mut count = count.lock();
        while *count > 0 {
            if changed.wait_until(&mut count, deadline).timed_out() && *count > 0 {
                return Err(*count);
            }
        }
        Ok(())
    }

    fn set(&self, pending: usize) {
        let (count, changed) = &*self.0;
        *count.lock() = pending;
        changed.notify_all();
    }
}

/// Connections of before a thaw.
#[derive(Debug, Default)]
pub(super) struct Thaw {
    /// Those that are not reset.
    resets: VecDeque<SavedFlow>,
    question: Question,
    pending: PendingResets,
    /// The connection of the last frame, as it was before.
    last: Option<(FlowKey, Option<SavedFlow>)>,
}

/// The question that follows the last reset. The guest's kernel handles frames in their order, so
/// its answer comes after it has handled the resets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Question {
    #[default]
    None,
    Due,
    Sent,
}

impl Thaw {
    pub(super) fn has_frames(&self) -> bool {
        !self.resets.is_empty() || self.question == Question::Due
    }

    /// The guest has answered a question about its address.
    pub(super) fn answered(&mut self) {
        if self.question == Question::Sent {
            self.question = Question::None;
            self.pending.set(0);
        }
    }

    /// The frame that is made next is of this connection.
    pub(super) fn made(&mut self, last: Option<(FlowKey, Option<SavedFlow>)>) {
        self.last = last;
    }
}

impl Proxy {
    /// Reports its resets to those that wait for `pending`.
    #[must_use]
    pub fn with_resets(mut self, pending: PendingResets) -> Self {
        self.thaw.pending = pending;
        self
    }

    /// The connections, for [`Proxy::restore`]. The guest does not run.
    #[must_use]
    pub fn save(&self) -> NetworkState {
        let live = self.table.iter().filter_map(|(_, flow)| match flow {
            Flow::Tcp(flow) => flow.saved(),
            Flow::Datagram(_) => None,
        });
        NetworkState { flows: self.thaw.resets.iter().copied().chain(live).collect() }
    }

    /// The same, where the last frame of [`Proxy::receive`] does not reach the guest.
    #[must_use]
    pub fn save_without_last(&self) -> NetworkState {
        let mut state = self.save();
        if let Some((key, before)) = self.thaw.last {
            state.flows.retain(|flow| flow.key != key);
            state.flows.extend(before);
        }
        state
    }

    /// Ends all connections, and resets those of `state` in the guest, before any other frame. Each
    /// reset has the sequence number that the guest expects, so the guest accepts it.
    pub fn restore(&mut self, state: &NetworkState) {
        self.table.remove_all(&mut self.shared);
        self.answers.clear();
        self.answer_bytes = 0;
        // A snapshot may be damaged.
        let is_valid = |flow: &&SavedFlow| {
            let key = &flow.key;
            key.protocol == FlowProtocol::Tcp
                && self.is_guest(key.guest.ip())
                && key.remote.is_ipv4() == key.guest.is_ipv4()
        };
        let resets = state.flows.iter().filter(is_valid).take(MAX_FLOWS).copied().collect();
        // A metadata service does not know the guest's address, and nothing waits for its resets.
        let asks = self.metadata.is_none();
        let thaw = &mut self.thaw;
        thaw.last = None;
        thaw.resets = resets;
        thaw.question =
            if thaw.resets.is_empty() || !asks { Question::None } else { Question::Due };
        thaw.pending.set(thaw.resets.len());
    }

    /// Resets of [`Proxy::restore`] that [`Proxy::receive`] has not returned.
    #[must_use]
    pub fn resets_left(&self) -> usize {
        self.thaw.resets.len()
    }

    /// Makes the next frame of a thaw. Returns whether there is one.
    pub(super) fn next_of_thaw(&mut self) -> bool {
        if let Some(flow) = self.thaw.resets.pop_front() {
            self.thaw.made(Some((flow.key, Some(flow))));
            self.make_reset(&flow.key, flow.next_to_guest, Some(flow.next_from_guest));
            return true;
        }
        if self.thaw.question == Question::Due {
            self.thaw.question = Question::Sent;
            self.thaw.made(None);
            neighbour::ask_for_guest(&mut self.frame, &self.shared.link);
            return true;
        }
        false
    }
}

#[cfg(test)]
#[path = "thaw_tests.rs"]
mod tests;
