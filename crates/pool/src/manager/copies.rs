//! Copies of the chunks that a snapshot's microVMs write, made before they start: the arena.
//!
//! A copy holds some chunks of a sealed extent, packed one behind the other, in a memfd of pages of 2 MiB. A microVM maps it
//! shared, in place of the extent's own chunks, and writes without a fault and without a copy. A copy is lent to one
//! microVM and never used again: nothing that it wrote, and no descriptor that it kept, reaches another. The next one is
//! made in the background.
//!
//! Copies are DRAM. What all of them take, ready and lent, stays within the arena's size.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use firn_base::num::{u64_of, usize_of};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::{Errno, Result};
use serde::{Deserialize, Serialize};

use super::forecast::Forecast;
use super::pace::{Pace, lower_priority};
use crate::extent::Extent;
use crate::media::{How, Memory};
use crate::pool::{Pin, Pool};

/// Bytes of a chunk.
pub const COPY_CHUNK: u64 = 2 << 20;
/// Copies that are kept ready of each snapshot: one for the next start, and one for a start that comes while that is made
/// again.
const READY: usize = 2;
/// Snapshots that are remembered: each is a list of chunks.
const MOST_KNOWN: usize = 1024;
/// Bytes that are copied at once: they stay in the processor's cache.
const PIECE: usize = 64 << 10;

/// What the arena holds, in bytes of DRAM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArenaFacts {
    /// What it may hold at most.
    pub size: u64,
    /// Copies that are ready, or being made.
    pub ready: u64,
    /// Copies that microVMs have.
    pub lent: u64,
}

/// Why a start gets no copy. Its writes are copied by the kernel, page by page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NoCopy {
    /// Nothing is expected to be written.
    Unneeded,
    /// None is ready; it is being made.
    BeingMade,
    /// The arena is full.
    ArenaFull,
    /// The system has no memory in pages of 2 MiB.
    NoHugePages,
}

/// Which chunks a planner has copied ahead. The manager only keeps apart what it learns of each rule.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct CopyRule {
    /// How many pages of a chunk have to be written.
    pub written: u64,
    /// How many have to be touched through leaves of 4 KiB, in a chunk that is only read; 0: no such chunk is copied.
    pub read: u64,
}

/// A snapshot, and which chunks its planner wants.
pub(super) type Key = (u64, CopyRule);

/// What a start is given.
#[derive(Debug)]
pub(super) struct Loan {
    /// The chunks that it is expected to write, ascending.
    pub(super) expected: Vec<u32>,
    /// The copy, or why there is none.
    pub(super) copy: std::result::Result<Lent, NoCopy>,
}

/// A copy that a microVM has; its bytes are the arena's again when this is dropped.
#[derive(Debug)]
pub(super) struct Lent {
    /// The chunks, ascending.
    pub(super) chunks: Vec<u32>,
    /// The copy. The connection sends it and keeps nothing.
    pub(super) file: Option<OwnedFd>,
    shared: Arc<Shared>,
}

impl Drop for Lent {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        state.lent -= bytes(&self.chunks);
        for known in state.known.values_mut() {
            known.failed = known.failed.filter(|failed| *failed != NoCopy::ArenaFull);
        }
        self.shared.wake(state);
    }
}

/// The arena of a pool's manager.
#[derive(Debug)]
pub(super) struct Copies {
    shared: Arc<Shared>,
    worker: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    pool: Pool,
    pace: Arc<Pace>,
    state: Mutex<State>,
    work: Condvar,
    done: Condvar,
}

#[derive(Debug, Default)]
struct State {
    size: u64,
    /// Bytes of copies that are ready, or being made.
    ready: u64,
    lent: u64,
    known: HashMap<Key, Known>,
    /// Counts requests.
    now: u64,
    /// There may be work.
    busy: bool,
    ended: bool,
}

#[derive(Debug, Default)]
struct Known {
    name: String,
    /// Whole chunks of guest memory.
    chunks: u64,
    forecast: Forecast,
    ready: Vec<Ready>,
    /// A copy of these chunks is being made.
    making: bool,
    /// Why the last one was not made.
    failed: Option<NoCopy>,
    /// When it was last asked for.
    asked: u64,
}

#[derive(Debug)]
struct Ready {
    chunks: Vec<u32>,
    file: OwnedFd,
}

/// A copy to be made.
struct Job {
    key: Key,
    name: String,
    chunks: Vec<u32>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the worker look for work.
    fn wake(&self, mut state: MutexGuard<'_, State>) {
        state.busy = true;
        drop(state);
        self.work.notify_all();
    }
}

impl Copies {
    /// An arena of an eighth of the host's memory.
    pub(super) fn new(pool: Pool, pace: Arc<Pace>) -> Self {
        let size = rustix::system::sysinfo();
        let size = u64::from(size.mem_unit).saturating_mul(size.totalram) / 8;
        let state = Mutex::new(State { size, ..State::default() });
        let (work, done) = (Condvar::new(), Condvar::new());
        let shared = Arc::new(Shared { pool, pace, state, work, done });
        let own = shared.clone();
        // Without a thread no copy is ever ready, and all starts do without.
        let worker = std::thread::Builder::new()
            .name("pool-copies".into())
            .spawn(move || make_all(&own))
            .ok();
        Self { shared, worker }
    }

    /// Sets what it may hold at most. What is lent stays.
    pub(super) fn set_size(&self, size: u64) {
        let mut state = self.shared.state();
        state.size = size;
        state.drop_ready(|_, _| true);
        self.shared.wake(state);
    }

    /// Waits until all that can be made are ready.
    pub(super) fn settle(&self) {
        if self.worker.is_some() {
            let state = self.shared.state();
            drop(self.shared.done.wait_while(state, |state| state.busy && !state.ended));
        }
    }

    pub(super) fn facts(&self) -> ArenaFacts {
        let state = self.shared.state();
        ArenaFacts { size: state.size, ready: state.ready, lent: state.lent }
    }

    /// Lends a copy to a start from the snapshot of a pin. `seed` is what its profile names; `None` where that is needed first.
    pub(super) fn lend(&self, pin: &Pin, rule: CopyRule, seed: Option<&[u32]>) -> Option<Loan> {
        let Extent { generation, guest_bytes, .. } = pin.extent();
        let mut state = self.shared.state();
        if seed.is_none() && !state.known.contains_key(&(generation, rule)) {
            return None;
        }
        state.now += 1;
        let now = state.now;
        if !state.known.contains_key(&(generation, rule)) && state.known.len() >= MOST_KNOWN {
            state.forget_oldest();
        }
        let known = state.known.entry((generation, rule)).or_default();
        known.name = pin.name().to_owned();
        known.asked = now;
        known.chunks = guest_bytes / COPY_CHUNK;
        let whole = known.chunks;
        if let Some(seed) = seed {
            let seed = seed.iter().copied().filter(|chunk| u64::from(*chunk) < whole);
            known.forecast.seed(&seed.collect::<Vec<_>>());
        }
        let expected = known.forecast.expected();
        let copy = match known.ready.pop() {
            Some(Ready { chunks, file }) => {
                let bytes = bytes(&chunks);
                state.ready -= bytes;
                state.lent += bytes;
                Ok(Lent { chunks, file: Some(file), shared: self.shared.clone() })
            }
            None if expected.is_empty() => Err(NoCopy::Unneeded),
            // It is tried again now.
            None => Err(known.failed.take().unwrap_or(NoCopy::BeingMade)),
        };
        self.shared.wake(state);
        Some(Loan { expected, copy })
    }

    /// Learns which chunks a run wrote. Copies of other chunks than those that are now expected are made anew.
    pub(super) fn observe(&self, key: Key, written: &[u32]) {
        let mut state = self.shared.state();
        let Some(known) = state.known.get_mut(&key) else { return };
        let before = known.forecast.expected();
        let whole = known.chunks;
        let written: Vec<u32> =
            written.iter().copied().filter(|chunk| u64::from(*chunk) < whole).collect();
        known.forecast.observe(&written);
        if known.forecast.expected() != before {
            state.drop_ready(|other, _| *other == key);
            self.shared.wake(state);
        }
    }

    /// Gives up what is of snapshots that are not current any more.
    pub(super) fn drop_stale(&self) {
        let mut state = self.shared.state();
        let current = |key: &Key, known: &Known| {
            let current = self.shared.pool.lookup(&known.name);
            current.is_ok_and(|current| current.generation == key.0)
        };
        state.drop_ready(|key, known| !current(key, known));
        state.known.retain(|key, known| current(key, known));
    }

    /// Gives up what is ready, and what was learnt.
    pub(super) fn drop_all(&self) {
        let mut state = self.shared.state();
        state.drop_ready(|_, _| true);
        state.known.clear();
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        self.shared.state().ended = true;
        self.shared.work.notify_all();
        if let Some(worker) = self.worker.take() {
            // A worker that panicked has told why.
            let _ = worker.join();
        }
    }
}

impl State {
    fn drop_ready(&mut self, which: impl Fn(&Key, &Known) -> bool) {
        for (key, known) in &mut self.known {
            if which(key, known) {
                self.ready -= known.ready.drain(..).map(|ready| bytes(&ready.chunks)).sum::<u64>();
            }
        }
    }

    fn forget_oldest(&mut self) {
        let oldest = self.known.iter().min_by_key(|(_, known)| known.asked).map(|(key, _)| *key);
        if let Some(oldest) = oldest {
            self.drop_ready(|key, _| *key == oldest);
            self.known.remove(&oldest);
        }
    }

    /// What is to be made next: of those who asked last first.
    fn next(&mut self) -> Option<Job> {
        let mut keys: Vec<(u64, Key)> =
            self.known.iter().map(|(k, known)| (known.asked, *k)).collect();
        keys.sort_unstable();
        keys.into_iter().rev().find_map(|(asked, key)| self.job(key, asked))
    }

    fn job(&mut self, key: Key, asked: u64) -> Option<Job> {
        let (size, held) = (self.size, self.ready + self.lent);
        let known = self.known.get_mut(&key)?;
        if known.ready.len() >= READY || known.making || known.failed.is_some() {
            return None;
        }
        let mut chunks = known.forecast.expected();
        // What is larger than the arena is copied in part.
        chunks.truncate(usize_of(size / COPY_CHUNK));
        let wanted = bytes(&chunks);
        if wanted == 0 {
            known.failed = (!known.forecast.expected().is_empty()).then_some(NoCopy::ArenaFull);
            return None;
        }
        if held + wanted > size {
            // A spare copy is not worth another snapshot's.
            if !known.ready.is_empty() {
                return None;
            }
            self.make_room(asked, wanted);
            if self.ready + self.lent + wanted > size {
                self.known.get_mut(&key)?.failed = Some(NoCopy::ArenaFull);
                return None;
            }
        }
        let known = self.known.get_mut(&key)?;
        known.making = true;
        self.ready += wanted;
        Some(Job { key, name: known.name.clone(), chunks })
    }

    /// Drops copies of snapshots that were asked for before `asked`, oldest first, until so much is free.
    fn make_room(&mut self, asked: u64, wanted: u64) {
        let mut older: Vec<(u64, Key)> =
            self.known.iter().map(|(k, known)| (known.asked, *k)).collect();
        older.retain(|(other, _)| *other < asked);
        older.sort_unstable();
        for (_, key) in older {
            if self.ready + self.lent + wanted <= self.size {
                return;
            }
            self.drop_ready(|other, _| *other == key);
        }
    }
}

fn bytes(chunks: &[u32]) -> u64 {
    u64_of(chunks.len()) * COPY_CHUNK
}

/// Makes copies until the arena ends. What takes long is done by threads of low priority, which never hold the lock.
fn make_all(shared: &Shared) {
    let mut state = shared.state();
    while !state.ended {
        let Some(job) = state.next() else {
            state.busy = false;
            shared.done.notify_all();
            state = shared.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        drop(state);
        let pin = shared.pool.pin(&job.name).ok();
        let pin = pin.filter(|pin| pin.extent().generation == job.key.0);
        let made = pin.map(|pin| {
            let make = || {
                lower_priority();
                make(&shared.pool, &pin, &job.chunks, &shared.pace)
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
    /// Takes over what was made, or why not; `None` where the snapshot is not current any more.
    fn finished(&mut self, job: Job, made: Option<Result<OwnedFd>>) {
        let Job { key, chunks, .. } = job;
        let wanted = bytes(&chunks);
        self.ready -= wanted;
        let Some(known) = self.known.get_mut(&key) else { return };
        known.making = false;
        let limit = usize_of(self.size / COPY_CHUNK);
        let mut expected = known.forecast.expected();
        expected.truncate(limit);
        match made {
            // Meanwhile something else may be expected.
            Some(Ok(file))
                if expected == chunks && self.ready + self.lent + wanted <= self.size =>
            {
                known.ready.push(Ready { chunks, file });
                self.ready += wanted;
            }
            Some(Ok(_)) => {}
            Some(Err(_)) => known.failed = Some(NoCopy::NoHugePages),
            None => {
                self.drop_ready(|other, _| *other == key);
                self.known.remove(&key);
            }
        }
    }
}

/// A memfd of huge pages with these chunks of an extent: of those that the host has set aside where enough are free, for they come from
/// memory that nobody else had, and need not be found.
fn make(pool: &Pool, pin: &Pin, chunks: &[u32], pace: &Pace) -> Result<OwnedFd> {
    let set_aside = MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    fill(pool, pin, chunks, pace, set_aside, Memory::take_set_aside)
        .or_else(|_| fill(pool, pin, chunks, pace, MemfdFlags::empty(), Memory::take_huge))
}

fn fill(
    pool: &Pool,
    pin: &Pin,
    chunks: &[u32],
    pace: &Pace,
    pages: MemfdFlags,
    take: impl Fn(&Memory, u64) -> Result<()>,
) -> Result<OwnedFd> {
    let mut budget = Pace::budget();
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | pages;
    let file = memfd_create("firn-copy", flags)?;
    ftruncate(&file, bytes(chunks))?;
    let how = How { writable: true, synchronous: false, align: COPY_CHUNK };
    let memory = Memory::map(&file, 0, bytes(chunks), how)?;
    let medium = pool.shared_medium();
    let mut piece = vec![0; PIECE];
    for (place, chunk) in (0_u64..).zip(chunks) {
        pace.yield_to_starts(&mut budget);
        take(&memory, place * COPY_CHUNK)?;
        let from = pin.extent().offset + u64::from(*chunk) * COPY_CHUNK;
        for at in (0..COPY_CHUNK).step_by(PIECE) {
            medium.load(from + at, &mut piece);
            // Fresh memory is zero.
            if piece.iter().any(|byte| *byte != 0) {
                memory.store(place * COPY_CHUNK + at, &piece);
            }
        }
    }
    drop(memory);
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

#[cfg(test)]
#[path = "copies_tests.rs"]
mod tests;
