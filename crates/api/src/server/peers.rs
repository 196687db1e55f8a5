//! The connections of the server: what each is waiting for, and which one has to go.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, sleep, sleep_until};

use super::buffer::Held;
use super::limits::Limits;

/// How often a full server looks for a connection that it can close.
const RETRY: Duration = Duration::from_millis(20);

/// What a connection is doing.
#[derive(Debug, Clone, Copy)]
enum Stage {
    /// The daemon waits for the client, since and at most until then.
    Client { since: Instant, until: Instant },
    /// The client waits for the daemon.
    Serving,
    /// The server has decided to close it.
    Closed,
}

/// One connection.
#[derive(Debug)]
pub(crate) struct Peer {
    stage: watch::Sender<Stage>,
    /// The last answer's share of the buffer, until the next request.
    answer: Mutex<Option<Held>>,
}

impl Peer {
    pub(super) fn new(limit: Duration) -> Self {
        Self { stage: watch::Sender::new(client(limit)), answer: Mutex::new(None) }
    }

    /// The client has sent a request's head, and has `limit` for the body.
    pub(crate) fn reads(&self, limit: Duration) {
        self.answer.lock().take();
        self.set(client(limit));
    }

    /// The request is complete.
    pub(crate) fn serves(&self) {
        self.set(Stage::Serving);
    }

    /// The answer is ready. The client has `limit` to read it and to send the next request.
    pub(crate) fn answers(&self, held: Option<Held>, limit: Duration) {
        *self.answer.lock() = held;
        self.waits(limit);
    }

    /// A part of an answer is ready. The client has `limit` to read it.
    pub(crate) fn waits(&self, limit: Duration) {
        self.set(client(limit));
    }

    /// Has the connection closed.
    pub(crate) fn close(&self) {
        self.set(Stage::Closed);
    }

    fn set(&self, stage: Stage) {
        self.stage.send_if_modified(|now| {
            let open = !matches!(now, Stage::Closed);
            if open {
                *now = stage;
            }
            open
        });
    }

    /// Returns when the connection has to be closed.
    pub(super) async fn expired(&self) {
        let mut stages = self.stage.subscribe();
        loop {
            let stage = *stages.borrow_and_update();
            match stage {
                Stage::Closed => return,
                Stage::Serving => drop(stages.changed().await),
                Stage::Client { until, .. } => tokio::select! {
                    _ = stages.changed() => {}
                    () = sleep_until(until) => return,
                },
            }
        }
    }

    pub(super) fn waits_since(&self) -> Option<Instant> {
        match *self.stage.borrow() {
            Stage::Client { since, .. } => Some(since),
            Stage::Serving | Stage::Closed => None,
        }
    }
}

fn client(limit: Duration) -> Stage {
    let since = Instant::now();
    Stage::Client { since, until: since + limit }
}

/// All connections.
#[derive(Debug)]
pub(super) struct Peers {
    places: Arc<Semaphore>,
    limits: Limits,
    open: Mutex<(u64, BTreeMap<u64, Arc<Peer>>)>,
}

/// A connection's place among [`Peers`].
#[derive(Debug)]
pub(super) struct Place {
    pub(super) peer: Arc<Peer>,
    peers: Arc<Peers>,
    id: u64,
    _place: OwnedSemaphorePermit,
}

impl Peers {
    pub(super) fn new(connections: usize, limits: Limits) -> Arc<Self> {
        let places = Arc::new(Semaphore::new(connections.min(Semaphore::MAX_PERMITS)));
        Arc::new(Self { places, limits, open: Mutex::default() })
    }

    /// Makes room for a new connection. If there is none, closes the one that has kept the daemon
    /// waiting for the longest time; if the daemon is serving all of them, waits for one to end.
    pub(super) async fn enter(self: &Arc<Self>) -> Option<Place> {
        let place = loop {
            if let Ok(place) = Arc::clone(&self.places).try_acquire_owned() {
                break place;
            }
            self.close_oldest();
            tokio::select! {
                place = Arc::clone(&self.places).acquire_owned() => break place.ok()?,
                () = sleep(RETRY) => {}
            }
        };
        let peer = Arc::new(Peer::new(self.limits.head));
        let mut open = self.open.lock();
        open.0 += 1;
        let id = open.0;
        open.1.insert(id, Arc::clone(&peer));
        Some(Place { peer, peers: Arc::clone(self), id, _place: place })
    }

    /// Closes the connection that has kept the daemon waiting for the longest time.
    pub(super) fn close_oldest(&self) {
        let open = self.open.lock();
        let oldest = open.1.values().filter_map(|peer| Some((peer.waits_since()?, peer)));
        if let Some((_, peer)) = oldest.min_by_key(|(since, _)| *since) {
            tracing::debug!("closed a connection that sent no request, for a new one");
            peer.close();
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.peer.answer.lock().take();
        self.peers.open.lock().1.remove(&self.id);
    }
}
