//! Copies of parts of sealed extents, made in advance: the arena.
//!
//! Clients store copy sets: runs of pages. A set belongs to a snapshot and a key that the client
//! chooses. The manager does not interpret the key, the choice of the pages, or the state that the
//! client stores with them.
//!
//! A copy holds the pages of a set, packed ([`pack_copy`]), in a memfd. A microVM maps it shared,
//! in place of the extent's pages, so its writes cause neither page faults nor copies.
//! A copy is lent to one microVM and never reused: its writes, and a descriptor that it kept, do
//! not affect other microVMs. The manager makes the next copy in the background.
//!
//! Sets last as long as their snapshot (`keep`). Those of an earlier manager are copied from their
//! first request on, or when the manager prepares copies.
//!
//! Copies use DRAM. Ready and lent copies together stay within the size of the arena.

mod keep;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use firn_base::num::{u64_of, usize_of};
use firn_base::{PAGE_SIZE, PageRange};
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::{Errno, Result};
use serde::{Deserialize, Serialize};

use super::pace::{Pace, Pauses, lower_priority};
use crate::media::{How, MediumKind, Memory, prefer_node};
use crate::pool::{Pin, Pool, now};
use crate::runs::{COPY_CHUNK, bytes_of, first_pages, is_whole, pack_copy};

/// Number of copies kept ready of each set: one for the next start, and one for a start while the
/// first is being replaced.
const READY: usize = 2;
/// Maximum number of copy sets. The least recently requested set is dropped for a new one.
const MOST_SETS: usize = 1024;
/// Bytes copied at a time: small enough to stay in the processor's cache.
const PIECE: usize = 64 << 10;

/// Usage of the arena, in bytes of DRAM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArenaFacts {
    /// Maximum size.
    pub size: u64,
    /// Copies that are ready or being made.
    pub ready: u64,
    /// Copies lent to microVMs.
    pub lent: u64,
    /// The NUMA node of new copies while it has room; otherwise the kernel chooses.
    pub node: Option<u32>,
}

/// Why a start gets no copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NoCopy {
    /// The copy set is empty.
    Unneeded,
    /// No copy is ready; one is being made.
    BeingMade,
    /// The arena is full.
    ArenaFull,
    /// The system cannot allocate pages of 2 MiB.
    NoHugePages,
}

/// The generation of a snapshot, and the client's key.
pub(super) type Key = (u64, String);

/// A copy set as returned to clients.
#[derive(Debug)]
pub(super) struct StoredSet {
    pub(super) revision: u64,
    pub(super) runs: Vec<PageRange>,
    pub(super) state: Vec<u8>,
}

/// A copy set lent to a start.
#[derive(Debug)]
pub(super) struct Loan {
    /// The pages of the set, ascending.
    pub(super) runs: Vec<PageRange>,
    /// The copy, or why there is none.
    pub(super) copy: std::result::Result<Lent, NoCopy>,
}

/// A lent copy. Dropping it returns its bytes to the arena.
#[derive(Debug)]
pub(super) struct Lent {
    /// How many of the set's first pages it holds.
    pub(super) pages: u64,
    /// The copy. It is sent to the client and not kept.
    pub(super) file: Option<OwnedFd>,
    shared: Arc<Shared>,
}

impl Drop for Lent {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        state.lent -= self.pages * PAGE_SIZE;
        for set in state.sets.values_mut() {
            set.failed = set.failed.filter(|failed| *failed != NoCopy::ArenaFull);
        }
        self.shared.wake(state);
    }
}

/// The arena of a pool's manager.
#[derive(Debug)]
pub(super) struct Copies {
    shared: Arc<Shared>,
    worker: Option<JoinHandle<()>>,
    keeper: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    pool: Pool,
    pace: Arc<Pace>,
    state: Mutex<State>,
    work: Condvar,
    done: Condvar,
    /// Wakes the thread that stores sets.
    learnt: Condvar,
    /// Held while sets are stored: an annex has one writer at a time.
    storing: Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    size: u64,
    /// The NUMA node on which copies are made.
    node: Option<u32>,
    /// Bytes of copies that are ready or being made.
    ready: u64,
    lent: u64,
    sets: HashMap<Key, CopySet>,
    /// Generations of the snapshots whose stored sets were read.
    recalled: HashSet<u64>,
    /// Generations of the snapshots whose sets changed and are not stored yet.
    changed: BTreeSet<u64>,
    /// Counts requests.
    now: u64,
    /// There may be copies to make.
    busy: bool,
    ended: bool,
}

#[derive(Debug, Default)]
struct CopySet {
    name: String,
    /// The pages to copy, ascending.
    runs: Vec<PageRange>,
    /// The client's own state.
    state: Vec<u8>,
    /// Number of the last replacement, unique over all sets.
    revision: u64,
    ready: Vec<Ready>,
    /// A copy of these pages is being made.
    making: bool,
    /// Why the last copy was not made.
    failed: Option<NoCopy>,
    /// Number of its last request; 0 for none since the manager started.
    requested: u64,
    /// Number of starts that requested a copy.
    starts: u64,
    /// Time of the last of them, seconds since 1970.
    last_start: u64,
}

#[derive(Debug)]
struct Ready {
    /// How many of the set's first pages it holds.
    pages: u64,
    file: OwnedFd,
}

/// A copy to make.
struct Job {
    key: Key,
    name: String,
    runs: Vec<PageRange>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Wakes the worker.
    fn wake(&self, mut state: MutexGuard<'_, State>) {
        state.busy = true;
        drop(state);
        self.work.notify_all();
    }
}

impl Copies {
    /// Creates an arena of an eighth of the host's memory.
    pub(super) fn new(pool: Pool, pace: Arc<Pace>) -> Self {
        let size = rustix::system::sysinfo();
        let size = u64::from(size.mem_unit).saturating_mul(size.totalram) / 8;
        let state = Mutex::new(State { size, ..State::default() });
        let [work, done, learnt] = [(); 3].map(|()| Condvar::new());
        let storing = Mutex::default();
        let shared = Arc::new(Shared { pool, pace, state, work, done, learnt, storing });
        // Without the first thread no copy is ever ready, and all starts run without copies.
        // Without the second, sets are stored only when the manager ends.
        let worker = spawn("pool-copies", &shared, make_all);
        let keeper = spawn("pool-learnt", &shared, keep::store_changes);
        Self { shared, worker, keeper }
    }

    /// Sets the maximum size. Lent copies are not affected.
    pub(super) fn set_size(&self, size: u64) {
        let mut state = self.shared.state();
        state.size = size;
        state.drop_ready(|_, _| true);
        self.shared.wake(state);
    }

    /// Makes later copies on a NUMA node while it has room.
    pub(super) fn set_node(&self, node: u32) -> Result<()> {
        // The policy is one of a thread, so another thread finds out whether the kernel accepts it.
        std::thread::spawn(move || prefer_node(node)).join().unwrap_or(Err(Errno::IO))?;
        self.shared.state().node = Some(node);
        Ok(())
    }

    /// Waits until all possible copies are ready.
    pub(super) fn settle(&self) {
        if self.worker.is_some() {
            let mut state = self.shared.state();
            self.shared.done.wait_while(&mut state, |state| state.busy && !state.ended);
        }
    }

    pub(super) fn facts(&self) -> ArenaFacts {
        let state = self.shared.state();
        ArenaFacts { size: state.size, ready: state.ready, lent: state.lent, node: state.node }
    }

    /// The set of a pinned snapshot and a key; `None` where there is none.
    pub(super) fn set(&self, pin: &Pin, key: &str) -> Option<StoredSet> {
        self.shared.recall(pin);
        let state = self.shared.state();
        let set = state.sets.get(&(pin.extent().generation, key.to_owned()))?;
        let (runs, client) = (set.runs.clone(), set.state.clone());
        Some(StoredSet { revision: set.revision, runs, state: client })
    }

    /// Stores the set of a key for a pinned snapshot, in place of the set of `revision`, or as a
    /// new set. Returns `false` and changes nothing if the stored set has another revision. Ready
    /// copies of other pages are dropped and replaced.
    pub(super) fn replace(
        &self,
        pin: &Pin,
        key: &str,
        revision: Option<u64>,
        runs: Vec<PageRange>,
        client: Vec<u8>,
    ) -> bool {
        self.shared.recall(pin);
        let runs = keep::within(pin, runs);
        let generation = pin.extent().generation;
        let key = (generation, key.to_owned());
        let mut state = self.shared.state();
        if state.sets.get(&key).map(|set| set.revision) != revision {
            return false;
        }
        if revision.is_none() {
            state.make_room_for_set();
        }
        state.now += 1;
        let now = state.now;
        let set = state.sets.entry(key.clone()).or_default();
        set.revision = now;
        let same = revision.is_some() && set.runs == runs && set.state == client;
        set.state = client;
        if revision.is_none() {
            pin.name().clone_into(&mut set.name);
            set.requested = now;
        }
        let replaced = revision.is_none() || set.runs != runs;
        set.runs = runs;
        if !same {
            state.changed.insert(generation);
            self.shared.learnt.notify_all();
        }
        if replaced {
            state.drop_ready(|other, _| *other == key);
            self.shared.wake(state);
        }
        true
    }

    /// Lends a copy of a set to a start of a pinned snapshot; `None` if there is no such set.
    pub(super) fn lend(&self, pin: &Pin, key: &str) -> Option<Loan> {
        self.shared.recall(pin);
        let key = (pin.extent().generation, key.to_owned());
        let mut state = self.shared.state();
        let now = state.now + 1;
        let set = state.sets.get_mut(&key)?;
        set.requested = now;
        set.starts += 1;
        set.last_start = self::now();
        let runs = set.runs.clone();
        let copy = match set.ready.pop() {
            Some(Ready { pages, file }) => {
                state.ready -= pages * PAGE_SIZE;
                state.lent += pages * PAGE_SIZE;
                Ok(Lent { pages, file: Some(file), shared: self.shared.clone() })
            }
            None if runs.is_empty() => Err(NoCopy::Unneeded),
            // The worker retries now.
            None => Err(set.failed.take().unwrap_or(NoCopy::BeingMade)),
        };
        state.now = now;
        self.shared.wake(state);
        Some(Loan { runs, copy })
    }

    /// Drops the sets and copies of snapshots that are not current.
    pub(super) fn drop_stale(&self) {
        let mut state = self.shared.state();
        let current = |key: &Key, set: &CopySet| {
            let current = self.shared.pool.lookup(&set.name);
            current.is_ok_and(|current| current.generation == key.0)
        };
        state.drop_ready(|key, set| !current(key, set));
        state.sets.retain(|key, set| current(key, set));
        let State { sets, recalled, .. } = &mut *state;
        let current: HashSet<u64> = sets.keys().map(|(generation, _)| *generation).collect();
        recalled.retain(|generation| current.contains(generation));
    }

    /// Drops all ready copies. No copies are made until the next request for a set.
    pub(super) fn drop_all(&self) {
        let mut state = self.shared.state();
        state.drop_ready(|_, _| true);
        for set in state.sets.values_mut() {
            set.requested = 0;
        }
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        self.shared.state().ended = true;
        self.shared.work.notify_all();
        self.shared.learnt.notify_all();
        for thread in [self.worker.take(), self.keeper.take()].into_iter().flatten() {
            // A panic of the thread was already reported.
            let _ = thread.join();
        }
    }
}

impl State {
    fn drop_ready(&mut self, which: impl Fn(&Key, &CopySet) -> bool) {
        for (key, set) in &mut self.sets {
            if which(key, set) {
                self.ready -= set.ready.drain(..).map(|ready| ready.pages * PAGE_SIZE).sum::<u64>();
            }
        }
    }

    /// Makes room for a new set.
    fn make_room_for_set(&mut self) {
        if self.sets.len() < MOST_SETS {
            return;
        }
        let oldest = self.sets.iter().min_by_key(|(_, set)| set.requested);
        if let Some(oldest) = oldest.map(|(key, _)| key.clone()) {
            self.drop_ready(|key, _| *key == oldest);
            self.sets.remove(&oldest);
            self.recalled.remove(&oldest.0);
        }
    }

    /// The keys in the order of their last request, the oldest first.
    fn by_request(&self) -> Vec<(u64, Key)> {
        let mut keys: Vec<_> =
            self.sets.iter().map(|(key, set)| (set.requested, key.clone())).collect();
        keys.sort_unstable();
        keys
    }

    /// The copy to make next: of the set that was requested last.
    fn next(&mut self) -> Option<Job> {
        self.by_request().into_iter().rev().find_map(|(requested, key)| self.job(key, requested))
    }

    fn job(&mut self, key: Key, requested: u64) -> Option<Job> {
        let (size, held) = (self.size, self.ready + self.lent);
        let set = self.sets.get_mut(&key)?;
        let busy = set.ready.len() >= READY || set.making || set.failed.is_some();
        if busy || set.requested == 0 {
            return None;
        }
        let runs = within_arena(&set.runs, size);
        let wanted = bytes_of(&runs);
        if wanted == 0 {
            set.failed = (!set.runs.is_empty()).then_some(NoCopy::ArenaFull);
            return None;
        }
        if held + wanted > size {
            // A second copy does not evict copies of other sets.
            if !set.ready.is_empty() {
                return None;
            }
            self.make_room(requested, wanted);
            if self.ready + self.lent + wanted > size {
                self.sets.get_mut(&key)?.failed = Some(NoCopy::ArenaFull);
                return None;
            }
        }
        let set = self.sets.get_mut(&key)?;
        set.making = true;
        self.ready += wanted;
        Some(Job { name: set.name.clone(), key, runs })
    }

    /// Drops copies of sets that were requested before `requested`, oldest first, until `wanted`
    /// bytes are free.
    fn make_room(&mut self, requested: u64, wanted: u64) {
        for (_, key) in self.by_request().into_iter().filter(|(other, _)| *other < requested) {
            if self.ready + self.lent + wanted <= self.size {
                return;
            }
            self.drop_ready(|other, _| *other == key);
        }
    }
}

fn spawn(name: &str, shared: &Arc<Shared>, run: fn(&Shared)) -> Option<JoinHandle<()>> {
    let shared = shared.clone();
    std::thread::Builder::new().name(name.into()).spawn(move || run(&shared)).ok()
}

/// The pages of a set that a copy holds: a set larger than the arena is copied partially. The limit
/// is a whole number of chunks, so it cuts no chunk of a set of whole chunks.
fn within_arena(runs: &[PageRange], size: u64) -> Vec<PageRange> {
    first_pages(runs, size / COPY_CHUNK * (COPY_CHUNK / PAGE_SIZE))
}

/// Makes copies until the arena ends. Long operations run in low-priority threads, which do not
/// hold the lock.
fn make_all(shared: &Shared) {
    let mut state = shared.state();
    while !state.ended {
        let Some(job) = state.next() else {
            state.busy = false;
            shared.done.notify_all();
            shared.work.wait(&mut state);
            continue;
        };
        let node = state.node;
        drop(state);
        let pin = shared.pool.pin(&job.name).ok();
        let pin = pin.filter(|pin| pin.extent().generation == job.key.0);
        let made = pin.map(|pin| {
            // Before there is a thread that could take the processor of a start.
            let mut pauses = shared.pace.pauses();
            pauses.yield_to_starts();
            let make = || {
                lower_priority();
                if let Some(node) = node {
                    prefer_node(node)?;
                }
                make(&shared.pool, &pin, &job.runs, &mut pauses)
            };
            std::thread::scope(|scope| {
                let thread = std::thread::Builder::new().spawn_scoped(scope, make);
                let failed = |_| Errno::NOMEM;
                thread.map_err(failed).and_then(|thread| thread.join().unwrap_or(Err(Errno::IO)))
            })
        });
        state = shared.state();
        state.finished(job, made);
    }
}

impl State {
    /// Stores a completed copy or the failure; `None` if the snapshot is not current any more.
    fn finished(&mut self, job: Job, made: Option<Result<OwnedFd>>) {
        let Job { key, runs, .. } = job;
        let wanted = bytes_of(&runs);
        self.ready -= wanted;
        let Some(set) = self.sets.get_mut(&key) else { return };
        set.making = false;
        let wanted_now = set.requested > 0 && within_arena(&set.runs, self.size) == runs;
        match made {
            // The set may have been replaced, or its copies dropped, meanwhile.
            Some(Ok(file)) if wanted_now && self.ready + self.lent + wanted <= self.size => {
                set.ready.push(Ready { pages: wanted / PAGE_SIZE, file });
                self.ready += wanted;
            }
            Some(Ok(_)) => {}
            Some(Err(_)) => set.failed = Some(NoCopy::NoHugePages),
            None => {
                self.drop_ready(|other, _| *other == key);
                self.sets.remove(&key);
            }
        }
    }
}

/// Makes a memfd with these pages of an extent. Whole chunks take reserved huge pages if enough are
/// free, because allocating them is cheap. Other pages cannot: a file of reserved huge pages is
/// only mapped at multiples of 2 MiB. Those of a medium that is made of such pages it does not
/// take: what is free is for a moment a replica's, which gives its space to the host and takes it
/// back.
fn make(pool: &Pool, pin: &Pin, runs: &[PageRange], pauses: &mut Pauses<'_>) -> Result<OwnedFd> {
    let reserved = MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    if runs.iter().all(is_whole)
        && pool.medium().kind != MediumKind::Hugetlbfs
        && let Ok(copy) = fill(pool, pin, runs, pauses, reserved, Memory::take_reserved)
    {
        return Ok(copy);
    }
    fill(pool, pin, runs, pauses, MemfdFlags::empty(), Memory::take_huge)
}

fn fill(
    pool: &Pool,
    pin: &Pin,
    runs: &[PageRange],
    pauses: &mut Pauses<'_>,
    pages: MemfdFlags,
    take: impl Fn(&Memory, u64) -> Result<()>,
) -> Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | pages;
    let file = memfd_create("firn-copy", flags)?;
    let bytes = bytes_of(runs);
    ftruncate(&file, bytes)?;
    let how = How { writable: true, synchronous: false, align: COPY_CHUNK };
    let memory = Memory::map(&file, 0, bytes, how)?;
    let medium = pool.shared_medium();
    let mut piece = vec![0; PIECE];
    let mut parts = pack_copy(runs);
    parts.sort_unstable_by_key(|(_, place)| *place);
    let mut taken = 0;
    for (part, place) in parts {
        let from = pin.extent().offset + part.first * PAGE_SIZE;
        let len = part.pages * PAGE_SIZE;
        let mut at = 0;
        while at < len {
            if place + at >= taken {
                pauses.yield_to_starts();
                // Only whole chunks must be huge pages; the last pages of a copy cannot be.
                if is_whole(&part) {
                    take(&memory, taken)?;
                } else if taken + COPY_CHUNK <= bytes {
                    let _ = take(&memory, taken);
                }
                taken += COPY_CHUNK;
            }
            let next = usize_of((len - at).min(taken - place - at)).min(PIECE);
            let piece = &mut piece[..next];
            medium.load(from + at, piece);
            // New memory is zero.
            if piece.iter().any(|byte| *byte != 0) {
                memory.store(place + at, piece);
            }
            at += u64_of(next);
        }
    }
    drop(memory);
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

#[cfg(test)]
#[path = "copies_tests.rs"]
mod tests;
