//! Replicas that nobody runs in, and how they become what their snapshot is again.
//!
//! A microVM writes its replica. When it ends, a thread of low priority compares the replica with its snapshot and copies what differs, one replica
//! after the other. A monitor that ends in order may say which pages were written: then those are compared, and a sample of the others. One list that the
//! sample shows to be wrong is the last that is believed: a next microVM must not start on wrong memory.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::pace::{Pace, be_nice};
use crate::pool::{
    AllocateError, ImagedBy, Imaging, Listing, PageRun, Pool, Replica, ReplicaError,
};

/// The replicas of a pool that nobody runs in.
#[derive(Debug)]
pub(super) struct Replicas {
    shared: Arc<Shared>,
    /// One request images at a time.
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
    /// Those that are what their snapshot is, and what that took.
    ready: Vec<(Replica, Imaging)>,
    /// Those whose microVMs ended, and what they wrote, where that is known.
    waiting: VecDeque<Returned>,
    /// Counts lists: each has another sample.
    lists: u64,
    /// A list was wrong: none is believed any more.
    distrusting: bool,
    /// The one that is made ready just now.
    busy: Option<Busy>,
    ended: bool,
}

/// A replica, and the pages that were written, where that is known.
pub(super) type Returned = (Replica, Option<Vec<PageRun>>);

#[derive(Debug)]
struct Busy {
    name: String,
    /// Set where the replica is wanted no more.
    stop: Arc<AtomicBool>,
}

/// A replica for a microVM.
pub(super) struct Acquired {
    pub(super) replica: Replica,
    /// What the request waited for.
    pub(super) imaging: Imaging,
    /// What was done before, where it was ready.
    pub(super) prepared: Option<Imaging>,
}

impl Replicas {
    pub(super) fn new(pool: Pool, pace: Arc<Pace>) -> io::Result<Self> {
        let (state, changed) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { pool, pace, state, changed });
        let working = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("imaging".into()).spawn(move || {
            be_nice();
            working.serve();
        })?;
        Ok(Self { shared, turn: Mutex::default(), thread: Some(thread) })
    }

    /// A replica of the snapshot of a name. Where none is ready it is made so now.
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
            let at = state.waiting.iter().position(|(replica, _)| fits(replica));
            at.and_then(|at| state.waiting.remove(at))
        };
        let (replica, written) = match waiting {
            Some(returned) => returned,
            None => (self.with_room(|| self.shared.pool.replica(name))?, None),
        };
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let imaging = self.shared.image(&replica, written.as_deref(), || false);
        drop(turn);
        Ok(Acquired { replica, imaging: imaging.unwrap_or_default(), prepared: None })
    }

    /// Takes replicas whose microVMs ended, to make them ready again.
    pub(super) fn take_back(&self, replicas: impl IntoIterator<Item = Returned>) {
        self.shared.state().waiting.extend(replicas);
        self.shared.changed.notify_all();
    }

    /// Waits until all are ready.
    pub(super) fn settle(&self) {
        let state = self.shared.state();
        let at_work = |state: &mut State| !state.waiting.is_empty() || state.busy.is_some();
        drop(self.shared.changed.wait_while(state, at_work));
    }

    /// Tries again without the replicas that are only kept to be ready, where there is no room.
    pub(super) fn with_room<T, E: IsFull>(
        &self,
        allocate: impl Fn() -> Result<T, E>,
    ) -> Result<T, E> {
        match allocate() {
            Err(error) if error.is_full() && self.give_up(None) > 0 => allocate(),
            result => result,
        }
    }

    /// Frees all, or those of the snapshot of a name: how many.
    pub(super) fn give_up(&self, name: Option<&str>) -> u64 {
        let unwanted = |of: &str| name.is_none_or(|name| name == of);
        let mut state = self.shared.state();
        let mut given_up = state.take(|replica| unwanted(replica.source().name()));
        let mut count = given_up.len();
        if let Some(busy) = state.busy.as_ref().filter(|busy| unwanted(&busy.name)) {
            busy.stop.store(true, Ordering::Relaxed);
            count += 1;
            let stopped = Arc::clone(&busy.stop);
            let is_busy = |state: &mut State| {
                state.busy.as_ref().is_some_and(|busy| Arc::ptr_eq(&busy.stop, &stopped))
            };
            state = self
                .shared
                .changed
                .wait_while(state, is_busy)
                .unwrap_or_else(PoisonError::into_inner);
            // It may have been done just before.
            given_up.extend(state.take(|replica| unwanted(replica.source().name())));
        }
        drop(state);
        drop(given_up);
        firn_base::num::u64_of(count)
    }

    /// Frees those whose snapshot is not current any more.
    pub(super) fn drop_stale(&self) {
        let mut state = self.shared.state();
        let stale = state.take(|replica| !self.shared.is_current(replica));
        drop(state);
        drop(stale);
    }

    /// Puts into a listing what making replicas ready took.
    pub(super) fn tell(&self, listing: &mut Listing) {
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
    /// Takes out those that are unwanted. They are freed by dropping them, which is not done under the lock.
    fn take(&mut self, unwanted: impl Fn(&Replica) -> bool) -> Vec<Replica> {
        let (taken, kept): (VecDeque<_>, _) =
            std::mem::take(&mut self.waiting).into_iter().partition(|(r, _)| unwanted(r));
        self.waiting = kept;
        let mut taken: Vec<Replica> = taken.into_iter().map(|(replica, _)| replica).collect();
        taken.extend(self.ready.extract_if(.., |(replica, _)| unwanted(replica)).map(|(r, _)| r));
        taken
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes replicas ready until the end.
    fn serve(&self) {
        let mut state = self.state();
        loop {
            let nothing = |state: &mut State| state.waiting.is_empty() && !state.ended;
            state = self.changed.wait_while(state, nothing).unwrap_or_else(PoisonError::into_inner);
            let returned = state.waiting.pop_front().filter(|_| !state.ended);
            let Some((replica, written)) = returned else { return };
            let stop = Arc::new(AtomicBool::new(!self.is_current(&replica)));
            let name = replica.source().name().to_owned();
            state.busy = Some(Busy { name, stop: Arc::clone(&stop) });
            drop(state);
            let mut patience = Pace::patience();
            let imaging = self.image(&replica, written.as_deref(), || {
                self.pace.give_way(&mut patience);
                stop.load(Ordering::Relaxed)
            });
            state = self.state();
            // Its name may have got another snapshot meanwhile.
            match imaging.filter(|_| self.is_current(&replica)) {
                Some(imaging) => state.ready.push((replica, imaging)),
                None => {
                    drop(state);
                    drop(replica);
                    state = self.state();
                }
            }
            state.busy = None;
            self.changed.notify_all();
        }
    }

    /// Makes a replica what its snapshot is, by the list of what was written if there is one and lists are believed.
    fn image(
        &self,
        replica: &Replica,
        written: Option<&[PageRun]>,
        stop: impl FnMut() -> bool,
    ) -> Option<Imaging> {
        let believed = written.and_then(|written| {
            let mut state = self.state();
            state.lists += 1;
            (!state.distrusting).then_some((written, state.lists))
        });
        let Some((written, list)) = believed else { return replica.image_until(stop) };
        let imaging = replica.image_listed(written, list, stop)?;
        if imaging.by == ImagedBy::WrongList {
            let mut state = self.state();
            state.distrusting = true;
            // Nor are those lists that seemed to be right.
            let listed = |(_, imaging): &mut (Replica, Imaging)| imaging.by == ImagedBy::List;
            let listed: Vec<_> = state.ready.extract_if(.., listed).collect();
            state.waiting.extend(listed.into_iter().map(|(replica, _)| (replica, None)));
            drop(state);
            self.changed.notify_all();
        }
        Some(imaging)
    }

    fn is_current(&self, replica: &Replica) -> bool {
        let source = replica.source();
        let current = self.pool.lookup(source.name());
        current.is_ok_and(|current| current.generation == source.extent().generation)
    }
}

/// Whether an error says that the pool has no room.
pub(super) trait IsFull {
    fn is_full(&self) -> bool;
}

impl IsFull for AllocateError {
    fn is_full(&self) -> bool {
        matches!(self, Self::Full { .. })
    }
}

impl IsFull for ReplicaError {
    fn is_full(&self) -> bool {
        matches!(self, Self::Allocate(error) if error.is_full())
    }
}
