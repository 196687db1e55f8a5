//! Pacing of background work: the manager images replicas and makes copies while microVMs start on
//! the same processors.
//!
//! A low thread priority is not sufficient. It only counts within a scheduling group, and a manager
//! started in its own session or control group is in another group than the microVMs (sched(7),
//! autogroup). Background work therefore pauses between its pieces while starts are requested, and
//! continues when there was none for a while.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Time for which a start has the processors to itself. Most functions of the papers have touched
/// their last page by then (docs/concepts/firn-planner.md).
const START: Duration = Duration::from_millis(25);
/// Maximum total pause for one replica or copy, however many starts are requested: a later start
/// needs it.
const MAX_PAUSE: Duration = Duration::from_millis(250);
/// Niceness of background threads. Within a scheduling group, such a thread gets a tenth of the
/// time of a microVM's thread.
const NICENESS: i32 = 10;

/// Paces the background work of a manager.
#[derive(Debug)]
pub(super) struct Pace {
    epoch: Instant,
    /// Time of the last requested start, ns since `epoch`.
    started: AtomicU64,
    /// Number of callers that wait for background work to complete.
    waiters: AtomicUsize,
}

/// The pauses of the work for one replica or copy.
#[derive(Debug)]
pub(super) struct Pauses<'a> {
    pace: &'a Pace,
    /// How long it may pause yet.
    left: Duration,
}

impl Pace {
    pub(super) fn new() -> Self {
        let (started, waiters) = (AtomicU64::new(0), AtomicUsize::new(0));
        Self { epoch: Instant::now(), started, waiters }
    }

    /// Records that a start was requested.
    pub(super) fn start(&self) {
        self.started.store(self.now(), Ordering::Relaxed);
    }

    /// Time of the last requested start.
    #[cfg(test)]
    pub(super) fn last_start(&self) -> u64 {
        self.started.load(Ordering::Relaxed)
    }

    /// Those of the work for one replica or copy.
    pub(super) fn pauses(&self) -> Pauses<'_> {
        Pauses { pace: self, left: MAX_PAUSE }
    }

    /// Runs `wait`, which waits for background work. The work does not pause meanwhile.
    pub(super) fn without_pauses<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.waiters.fetch_add(1, Ordering::Relaxed);
        let result = wait();
        self.waiters.fetch_sub(1, Ordering::Relaxed);
        result
    }

    fn now(&self) -> u64 {
        firn_base::ns_since(self.epoch)
    }
}

impl Pauses<'_> {
    /// Pauses while starts are requested. Call it between two pieces of work.
    pub(super) fn yield_to_starts(&mut self) {
        let pace = self.pace;
        while pace.waiters.load(Ordering::Relaxed) == 0 && !self.left.is_zero() {
            let started = pace.started.load(Ordering::Relaxed);
            let since = Duration::from_nanos(pace.now().saturating_sub(started));
            let wait = START.saturating_sub(since).min(self.left);
            if started == 0 || wait.is_zero() {
                return;
            }
            std::thread::sleep(wait);
            self.left -= wait;
        }
    }
}

/// Lowers the priority of this thread for background work.
pub(super) fn lower_priority() {
    // SAFETY: the call changes only the priority of this thread. If the kernel refuses, the
    // priority is unchanged.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICENESS) };
}

#[cfg(test)]
#[path = "pace_tests.rs"]
mod tests;
