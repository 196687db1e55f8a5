//! When the manager's own work goes on: it makes replicas and copies ready while microVMs start on the same processors.
//!
//! A thread's priority is not enough to keep out of their way. It counts within a scheduling group only, and a manager that was started in a session or a
//! control group of its own is in another group than the microVMs (sched(7), autogroup). So the work stops between its pieces
//! for as long as starts are asked for, and goes on when there was none for a while.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long a start has the processors to itself: most functions of the papers have touched their last page by then
/// (docs/concepts/firn-planner.md).
const START: Duration = Duration::from_millis(25);
/// What one replica or copy waits at most, however many starts come: the next of them needs it.
const PATIENCE: Duration = Duration::from_millis(250);
/// The niceness of threads that do such work: a tenth of what a microVM's thread gets, where they share a processor and a group.
const NICENESS: i32 = 10;

/// Paces the work of a manager.
#[derive(Debug)]
pub(super) struct Pace {
    epoch: Instant,
    /// When the last start was asked for, in ns since `epoch`.
    started: AtomicU64,
    /// Who waits for the work to be done.
    hurried: AtomicUsize,
}

/// What a piece of work may still wait.
#[derive(Debug)]
pub(super) struct Patience(Duration);

impl Pace {
    pub(super) fn new() -> Self {
        let (started, hurried) = (AtomicU64::new(0), AtomicUsize::new(0));
        Self { epoch: Instant::now(), started, hurried }
    }

    /// Notes that a start is asked for.
    pub(super) fn start(&self) {
        self.started.store(self.now(), Ordering::Relaxed);
    }

    /// What a replica, or a copy, may wait altogether.
    pub(super) fn patience() -> Patience {
        Patience(PATIENCE)
    }

    /// Lets starts go first. Call it between two pieces of work.
    pub(super) fn give_way(&self, patience: &mut Patience) {
        while self.hurried.load(Ordering::Relaxed) == 0 && !patience.0.is_zero() {
            let started = self.started.load(Ordering::Relaxed);
            let since = Duration::from_nanos(self.now().saturating_sub(started));
            let wait = START.saturating_sub(since).min(patience.0);
            if started == 0 || wait.is_zero() {
                return;
            }
            std::thread::sleep(wait);
            patience.0 -= wait;
        }
    }

    /// Does something that waits for the work: meanwhile it gives way to nobody.
    pub(super) fn hurry<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.hurried.fetch_add(1, Ordering::Relaxed);
        let result = wait();
        self.hurried.fetch_sub(1, Ordering::Relaxed);
        result
    }

    fn now(&self) -> u64 {
        firn_base::ns_since(self.epoch)
    }
}

/// Lowers the priority of this thread, for such work.
pub(super) fn be_nice() {
    // SAFETY: it changes the priority of this thread alone. Where the kernel refuses, the thread stays as it is.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICENESS) };
}

#[cfg(test)]
#[path = "pace_tests.rs"]
mod tests;
