//! The last part of the function's output.

use std::collections::VecDeque;

use crate::protocol::LOG_TAIL_BYTES;

/// Keeps the last [`LOG_TAIL_BYTES`] bytes that were pushed.
#[derive(Debug, Default)]
pub(crate) struct LogTail {
    bytes: VecDeque<u8>,
    received: u64,
    ended: bool,
}

impl LogTail {
    /// Appends `bytes`. An empty slice marks the end of the output.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.ended |= bytes.is_empty();
        self.received =
            self.received.saturating_add(u64::try_from(bytes.len()).unwrap_or(u64::MAX));
        self.bytes.extend(bytes);
        let excess = self.bytes.len().saturating_sub(LOG_TAIL_BYTES);
        self.bytes.drain(..excess);
    }

    /// Total number of bytes pushed.
    pub(crate) fn received(&self) -> u64 {
        self.received
    }

    /// Whether the output has ended.
    pub(crate) fn ended(&self) -> bool {
        self.ended
    }

    /// Takes the text. Bytes that are not UTF-8 become U+FFFD.
    pub(crate) fn take(&mut self) -> String {
        let bytes = std::mem::take(&mut self.bytes);
        String::from_utf8_lossy(&Vec::from(bytes)).into_owned()
    }
}
