//! The memory that the windows of a guest's flows share.

use crate::buffer::{TOTAL_LIMIT, share};

/// The largest window of a flow in bytes: the most of the guest that it holds.
pub(super) const LARGEST: usize = 512 << 10;
/// The window of a new flow in bytes, and the least that it keeps when it has grown.
const FIRST: usize = 16 << 10;

/// What a guest may send without asking again: at most [`TOTAL_LIMIT`] bytes, and the least share
/// for each flow.
#[derive(Debug, Default)]
pub(crate) struct Windows {
    promised: usize,
    flows: usize,
}

impl Windows {
    /// The window of a new flow.
    pub(super) fn open(&mut self) -> usize {
        let window = share(self.promised).min(FIRST);
        self.promised += window;
        self.flows += 1;
        window
    }

    /// A flow with `window` has ended.
    pub(super) const fn close(&mut self, window: usize) {
        self.promised -= window;
        self.flows -= 1;
    }

    /// The window of a flow that had `window` and has taken `taken` bytes: larger while there is
    /// memory.
    pub(super) fn grow(&mut self, window: usize, taken: usize) -> usize {
        let left = TOTAL_LIMIT.saturating_sub(self.promised);
        let more = self.goal().saturating_sub(window).min(taken).min(left);
        self.promised += more;
        window + more
    }

    /// The window of a flow that had `window`, of which the guest does not know `unknown` bytes:
    /// an equal part of the memory, when others need the rest.
    pub(super) fn shrink(&mut self, window: usize, unknown: usize) -> usize {
        let less = window.saturating_sub(self.goal()).min(unknown);
        self.promised -= less;
        window - less
    }

    /// What a flow in use should have.
    fn goal(&self) -> usize {
        let equal = TOTAL_LIMIT / self.flows.max(1);
        share(self.promised).max(equal).clamp(FIRST, LARGEST)
    }

    /// Bytes of all windows.
    #[cfg(test)]
    pub(super) const fn promised(&self) -> usize {
        self.promised
    }
}

#[cfg(test)]
#[path = "windows_tests.rs"]
mod tests;
