//! Counts the bytes of requests and answers that the daemon holds, and bounds them.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::peers::Peer;

/// The buffer of all requests and answers together.
#[derive(Debug)]
pub(crate) struct Buffer {
    limit: usize,
    used: Mutex<Used>,
    freed: Notify,
}

#[derive(Debug, Default)]
struct Used {
    bytes: usize,
    next: u64,
    holders: BTreeMap<u64, Holder>,
}

#[derive(Debug)]
struct Holder {
    bytes: usize,
    /// The connection that can be closed to free the bytes, unless the request is being served.
    peer: Option<Weak<Peer>>,
    closing: bool,
}

/// A share of the buffer, which is returned when this is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    buffer: Arc<Buffer>,
    id: u64,
}

/// The buffer is full of requests that are being served or that are no longer than this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Full;

impl Buffer {
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, used: Mutex::default(), freed: Notify::new() })
    }

    /// An empty share. The buffer closes `peer` if a shorter request needs the bytes.
    pub(crate) fn hold(self: &Arc<Self>, peer: Option<&Arc<Peer>>) -> Held {
        let mut used = self.used.lock();
        used.next += 1;
        let id = used.next;
        let holder = Holder { bytes: 0, peer: peer.map(Arc::downgrade), closing: false };
        used.holders.insert(id, holder);
        Held { buffer: Arc::clone(self), id }
    }
}

/// What became of a try to enlarge a share.
enum Tried {
    Grown,
    Wait,
    Refused,
}

impl Held {
    /// Adds `bytes` to the share. If the buffer is full, closes the connection that holds the most
    /// and sends or reads it slowly, provided that it holds more than this one.
    pub(crate) async fn grow(&self, bytes: usize) -> Result<(), Full> {
        loop {
            let freed = self.buffer.freed.notified();
            tokio::pin!(freed);
            freed.as_mut().enable();
            match self.try_grow(bytes) {
                Tried::Grown => return Ok(()),
                Tried::Refused => return Err(Full),
                Tried::Wait => freed.await,
            }
        }
    }

    fn try_grow(&self, bytes: usize) -> Tried {
        let mut used = self.buffer.used.lock();
        let used = &mut *used;
        let own = used.holders.get(&self.id).map_or(0, |holder| holder.bytes).saturating_add(bytes);
        if used.bytes.saturating_add(bytes) <= self.buffer.limit {
            used.bytes += bytes;
            if let Some(holder) = used.holders.get_mut(&self.id) {
                holder.bytes = own;
            }
            return Tried::Grown;
        }
        if used.holders.values().any(|holder| holder.closing) {
            return Tried::Wait;
        }
        let others = used.holders.iter_mut().filter(|(id, _)| **id != self.id);
        let larger = others.filter_map(|(_, holder)| {
            let peer = holder.peer.as_ref()?.upgrade()?;
            (holder.bytes > own).then_some((holder, peer))
        });
        match larger.max_by_key(|(holder, _)| holder.bytes) {
            Some((holder, peer)) => {
                tracing::warn!(
                    bytes = holder.bytes,
                    "the buffer is full: closed a slow connection"
                );
                holder.closing = true;
                peer.close();
                Tried::Wait
            }
            None => Tried::Refused,
        }
    }

    /// Keeps the share while the request is served: its connection is not closed.
    pub(crate) fn keep(&self) {
        if let Some(holder) = self.buffer.used.lock().holders.get_mut(&self.id) {
            holder.peer = None;
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut used = self.buffer.used.lock();
        if let Some(holder) = used.holders.remove(&self.id) {
            used.bytes -= holder.bytes;
        }
        drop(used);
        self.buffer.freed.notify_waiters();
    }
}

#[cfg(test)]
#[path = "buffer_tests.rs"]
mod tests;
