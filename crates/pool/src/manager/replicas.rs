//! Unused replicas: imaging them for the next microVM.
//!
//! A microVM writes to its replica. After the microVM ends, a low-priority thread compares all of
//! the replica with its snapshot and copies what differs, one replica at a time.
//!
//! A guest may have taken over the monitor that returns a replica, so nothing that it reports is
//! used, and a replica is compared only when no process can write to it any more: the kernel knows
//! that by the lock of the descriptor that the monitor got ([`Medium::is_held`]). Until then the
//! replica waits, and the thread looks again at growing intervals.
//!
//! [`Medium::is_held`]: crate::Medium::is_held
//!
//! A request that finds none ready, but one that is not imaged yet, waits for that. The thread then
//! makes one more replica, up to [`MAX_AHEAD`] in all, so that later requests at such intervals
//! find one ready.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::pace::{Pace, lower_priority};
use crate::pool::{AllocateError, Imaging, Listing, Pool, Replica, ReplicaError};

/// Maximum number of replicas of a snapshot, those in use included, at which one more is made in
/// advance. Requests that come together make as many as they need.
const MAX_AHEAD: usize = 4;
/// The first and the longest time until the thread looks again whether a process let go of a
/// replica. A process that ends may close its connection a moment before its mappings.
const LOOK_AGAIN: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(500)];

/// How many times a request looks again whether a full pool has room: 127 ms in all, because the
/// manager's threads may wait for a processor while microVMs run.
const LOOKS: u32 = 8;

/// The unused replicas of a pool.
#[derive(Debug)]
pub(super) struct Replicas {
    shared: Arc<Shared>,
    /// Serialises imaging on behalf of requests.
    turn: Mutex<()>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    pool: Pool,
    pace: Arc<Pace>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Imaged replicas, and the cost of imaging each.
    ready: Vec<(Replica, Imaging)>,
    /// Replicas that are not imaged yet. The processes that had them may still write to them.
    waiting: VecDeque<Replica>,
    /// Snapshots, by name, of which one more replica is to be made.
    more: VecDeque<String>,
    /// A grant was released.
    is_released: bool,
    /// The replica that is being imaged.
    busy: Option<Busy>,
    ended: bool,
}

#[derive(Debug)]
struct Busy {
    name: String,
    /// Set when the replica is not needed any more.
    stop: Arc<AtomicBool>,
}

/// A replica for a microVM.
pub(super) struct Acquired {
    pub(super) replica: Replica,
    /// The imaging that the request waited for.
    pub(super) imaging: Imaging,
    /// The imaging before the request, if the replica was ready.
    pub(super) prepared: Option<Imaging>,
}

impl Replicas {
    pub(super) fn new(pool: Pool, pace: Arc<Pace>) -> io::Result<Self> {
        let (state, changed) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { pool, pace, state, changed });
        let working = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("imaging".into()).spawn(move || {
            lower_priority();
            working.serve();
        })?;
        Ok(Self { shared, turn: Mutex::default(), thread: Some(thread) })
    }

    /// A replica of the snapshot of a name. If none is ready, images one.
    pub(super) fn get(&self, name: &str) -> Result<Acquired, ReplicaError> {
        let current = self.shared.pool.lookup(name)?.generation;
        let fits = |replica: &Replica| replica.source().extent().generation == current;
        let waiting = {
            let mut state = self.shared.state();
            if let Some(at) = state.ready.iter().position(|(replica, _)| fits(replica)) {
                let (replica, imaging) = state.ready.swap_remove(at);
                let prepared = Some(imaging);
                return Ok(Acquired { replica, imaging: Imaging::default(), prepared });
            }
            let usable = |replica: &Replica| fits(replica) && !replica.is_held();
            let at = state.waiting.iter().position(usable);
            let waiting = at.and_then(|at| state.waiting.remove(at));
            if waiting.is_some() && !state.more.iter().any(|more| more == name) {
                state.more.push_back(name.to_owned());
                self.shared.changed.notify_all();
            }
            waiting
        };
        let replica = match waiting {
            Some(replica) => replica,
            None => self.with_room(|| self.shared.pool.replica(name))?,
        };
        let turn = self.turn.lock();
        let imaging = replica.image_until(|| false);
        drop(turn);
        Ok(Acquired { replica, imaging: imaging.unwrap_or_default(), prepared: None })
    }

    /// Takes back what a client released: replicas to image, or none if it was something else,
    /// whose space is to be freed.
    pub(super) fn take_back(&self, replicas: impl IntoIterator<Item = Replica>) {
        let mut state = self.shared.state();
        state.waiting.extend(replicas);
        state.is_released = true;
        drop(state);
        self.shared.changed.notify_all();
    }

    /// Waits until all replicas are imaged that no process can write to.
    pub(super) fn settle(&self) {
        let mut state = self.shared.state();
        let at_work = |state: &mut State| state.has_work() || state.busy.is_some();
        self.shared.changed.wait_while(&mut state, at_work);
    }

    /// Calls `allocate`. While the pool or the host's memory is full, frees all unused replicas and
    /// calls it again. A process that is just ending may still map what it released, or the manager
    /// may not have seen its end yet, so it looks again for a moment.
    pub(super) fn with_room<T, E: IsFull>(
        &self,
        allocate: impl Fn() -> Result<T, E>,
    ) -> Result<T, E> {
        let mut result = allocate();
        let mut next = LOOK_AGAIN[0];
        for look in 0..LOOKS {
            if !is_full(&result) {
                break;
            }
            if look > 0 {
                std::thread::sleep(next);
                next *= 2;
            }
            self.free(None);
            self.shared.pool.free_released();
            result = allocate();
        }
        result
    }

    /// Frees all unused replicas, or those of one snapshot, and returns their number.
    pub(super) fn free(&self, name: Option<&str>) -> u64 {
        let unwanted = |of: &str| name.is_none_or(|name| name == of);
        let mut state = self.shared.state();
        state.more.retain(|name| !unwanted(name));
        let mut freed = state.take(|replica| unwanted(replica.source().name()));
        let mut count = freed.len();
        if let Some(busy) = state.busy.as_ref().filter(|busy| unwanted(&busy.name)) {
            busy.stop.store(true, Ordering::Relaxed);
            count += 1;
            let stopped = Arc::clone(&busy.stop);
            let is_busy = |state: &mut State| {
                state.busy.as_ref().is_some_and(|busy| Arc::ptr_eq(&busy.stop, &stopped))
            };
            self.shared.changed.wait_while(&mut state, is_busy);
            // The thread may have completed it just before it stopped.
            freed.extend(state.take(|replica| unwanted(replica.source().name())));
        }
        drop(state);
        drop(freed);
        firn_base::num::u64_of(count)
    }

    /// Frees unused replicas of snapshots that are not current.
    pub(super) fn drop_stale(&self) {
        let mut state = self.shared.state();
        let stale = state.take(|replica| !self.shared.is_current(replica));
        drop(state);
        drop(stale);
    }

    /// Adds the cost of imaging ready replicas to a listing.
    pub(super) fn add_imaging(&self, listing: &mut Listing) {
        let state = self.shared.state();
        for (replica, imaging) in &state.ready {
            let generation = replica.extent().generation;
            let mut listed = listing.extents.iter_mut();
            if let Some(listed) = listed.find(|listed| listed.extent.generation == generation) {
                listed.imaging = Some(*imaging);
            }
        }
    }
}

impl Drop for Replicas {
    fn drop(&mut self) {
        {
            let mut state = self.shared.state();
            state.ended = true;
            if let Some(busy) = &state.busy {
                busy.stop.store(true, Ordering::Relaxed);
            }
        }
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl State {
    fn has_work(&self) -> bool {
        !self.more.is_empty() || self.waiting.iter().any(|replica| !replica.is_held())
    }

    /// Removes the unwanted replicas. The caller drops them, which frees their extents, without
    /// holding the lock.
    fn take(&mut self, unwanted: impl Fn(&Replica) -> bool) -> Vec<Replica> {
        let (taken, kept): (VecDeque<_>, _) =
            std::mem::take(&mut self.waiting).into_iter().partition(&unwanted);
        self.waiting = kept;
        let mut taken = Vec::from(taken);
        taken.extend(self.ready.extract_if(.., |(replica, _)| unwanted(replica)).map(|(r, _)| r));
        taken
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Images replicas until the manager ends.
    fn serve(&self) {
        let mut state = self.state();
        loop {
            self.wait_for_work(&mut state);
            let released = state.waiting.iter().position(|replica| !replica.is_held());
            let released = released.filter(|_| !state.ended);
            let returned = released.and_then(|at| state.waiting.remove(at));
            let name = match &returned {
                Some(replica) => Some(replica.source().name().to_owned()),
                None => state.more.pop_front().filter(|_| !state.ended),
            };
            let Some(name) = name else { return };
            let stop = Arc::new(AtomicBool::new(false));
            state.busy = Some(Busy { name: name.clone(), stop: Arc::clone(&stop) });
            drop(state);
            let made = returned.or_else(|| self.one_more(&name)).and_then(|replica| {
                let mut pauses = self.pace.pauses();
                let stopped = || {
                    // A start may wait for this to stop.
                    if !stop.load(Ordering::Relaxed) {
                        pauses.yield_to_starts();
                    }
                    stop.load(Ordering::Relaxed)
                };
                let is_current = || self.is_current(&replica);
                let imaging = is_current().then(|| replica.image_until(stopped));
                // The name may have been updated in the meantime.
                let imaging = imaging.flatten().filter(|_| is_current())?;
                Some((replica, imaging))
            });
            state = self.state();
            state.ready.extend(made);
            state.busy = None;
            self.changed.notify_all();
        }
    }

    /// Waits until there is a replica to image or to make, or the manager ends. Frees the space
    /// that processes let go of meanwhile.
    fn wait_for_work(&self, state: &mut MutexGuard<'_, State>) {
        let [mut next, longest] = LOOK_AGAIN;
        loop {
            state.is_released = false;
            let held = MutexGuard::unlocked(state, || self.pool.free_released());
            if state.has_work() || state.ended {
                return;
            }
            if state.is_released {
                next = LOOK_AGAIN[0];
            } else if held == 0 && state.waiting.is_empty() {
                self.changed.wait(state);
            } else {
                self.changed.wait_for(state, next);
                next = (2 * next).min(longest);
            }
        }
    }

    /// One more replica of a snapshot, if there are few and the pool has room.
    fn one_more(&self, name: &str) -> Option<Replica> {
        let generation = self.pool.lookup(name).ok()?.generation;
        let listing = self.pool.list();
        let count = listing.extents.iter().filter(|listed| listed.source == Some(generation));
        if count.count() >= MAX_AHEAD {
            return None;
        }
        self.pool.replica(name).ok()
    }

    fn is_current(&self, replica: &Replica) -> bool {
        let source = replica.source();
        let current = self.pool.lookup(source.name());
        current.is_ok_and(|current| current.generation == source.extent().generation)
    }
}

fn is_full<T, E: IsFull>(result: &Result<T, E>) -> bool {
    result.as_ref().is_err_and(IsFull::is_full)
}

/// Whether an error means that the pool, or the host's memory, is full.
pub(super) trait IsFull {
    fn is_full(&self) -> bool;
}

impl IsFull for AllocateError {
    fn is_full(&self) -> bool {
        matches!(self, Self::Full { .. } | Self::NoMemory { .. })
    }
}

impl IsFull for ReplicaError {
    fn is_full(&self) -> bool {
        matches!(self, Self::Allocate(error) if error.is_full())
    }
}

#[cfg(test)]
#[path = "replicas_tests.rs"]
mod tests;
