//! Ends a microVM whose vCPU faults forever on a page that the host cannot provide.
//!
//! If the vCPU's own thread accesses such a page, `KVM_RUN` returns `EFAULT`. With hardware page
//! tables KVM may let a kernel thread access the missing page (asynchronous page faults), and that
//! thread reports no error. The vCPU then faults again, thousands of times a second, and never
//! leaves `KVM_RUN` (Linux 6.12 and 6.18). KVM's counters show this: faults are taken, and none is
//! resolved.

use std::sync::Arc;
use std::time::Duration;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use vmm_sys_util::errno::Error;
use vmm_sys_util::timerfd::TimerFd;

use crate::kvm::{FaultCounts, KvmCounters};
use crate::vcpu::{Notices, VcpuEnd, VcpuFailure};

/// Interval between two checks.
const PERIOD: Duration = Duration::from_secs(1);
/// Unresolved faults of one vCPU in a period that are too many. A vCPU has at most 64 asynchronous
/// faults in flight, and each counts once.
const MAX_UNRESOLVED: u64 = 100;
/// Consecutive periods after which the microVM is ended.
const PERIODS: u32 = 2;

/// Checks the vCPUs' faults periodically.
pub(super) struct Watchdog {
    timer: TimerFd,
    counters: Arc<KvmCounters>,
    notices: Arc<Notices>,
    vcpus: Vec<Watched>,
}

impl Watchdog {
    /// Starts the timer.
    pub(super) fn start(counters: Arc<KvmCounters>, notices: Arc<Notices>) -> Result<Self, Error> {
        let mut timer = TimerFd::new()?;
        timer.reset(PERIOD, Some(PERIOD))?;
        Ok(Self { timer, counters, notices, vcpus: Vec::new() })
    }
}

impl MutEventSubscriber for Watchdog {
    fn process(&mut self, _: Events, _: &mut EventOps<'_>) {
        // The timer is readable, so this does not block.
        let _ = self.timer.wait();
        // A microVM without counters is not checked.
        let Ok(counts) = self.counters.faults() else { return };
        self.vcpus.resize_with(counts.len(), Watched::default);
        let mut pairs = self.vcpus.iter_mut().zip(counts);
        if pairs.any(|(vcpu, counts)| vcpu.is_stuck(counts)) {
            // The microVM finds out which memory is lost.
            let failure = VcpuFailure::Memory { address: None, source: None };
            self.notices.give(VcpuEnd::Failure(failure));
        }
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        let _ = ops.add(Events::new(&self.timer, EventSet::IN));
    }
}

/// The recent faults of one vCPU.
#[derive(Default)]
struct Watched {
    last: FaultCounts,
    /// Consecutive periods without a resolved fault.
    unresolved: u32,
}

impl Watched {
    fn is_stuck(&mut self, now: FaultCounts) -> bool {
        let taken = now.taken.saturating_sub(self.last.taken);
        let unresolved = taken >= MAX_UNRESOLVED && now.resolved == self.last.resolved;
        self.unresolved = if unresolved { self.unresolved + 1 } else { 0 };
        self.last = now;
        self.unresolved >= PERIODS
    }
}

#[cfg(test)]
#[path = "watchdog_tests.rs"]
mod tests;
