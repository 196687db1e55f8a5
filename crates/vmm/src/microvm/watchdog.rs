//! Ends a microVM whose vCPU asks for ever for a page that the host cannot provide.
//!
//! A vCPU's thread that touches such a page itself is told: `EFAULT` from `KVM_RUN`. With hardware page tables KVM has a thread of the kernel's touch
//! a page that is not there at once (asynchronous page faults), and that thread tells nobody what it met. The vCPU asks again, thousands of times a
//! second, and never leaves `KVM_RUN` (Linux 6.12 and 6.18). KVM's counters show it: faults are taken, and none comes to anything.

use std::sync::Arc;
use std::time::Duration;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use vmm_sys_util::errno::Error;
use vmm_sys_util::timerfd::TimerFd;

use crate::stats::{FaultCounts, KvmCounters};
use crate::vcpu::{EndNotice, VcpuEnd, VcpuFailure};

/// Between two looks.
const PERIOD: Duration = Duration::from_secs(1);
/// Faults of one vCPU in a period, none of which came to anything: more than a vCPU ever has under way (64), each asked for once.
const MANY: u64 = 100;
/// Periods in a row after which the microVM is ended.
const PERIODS: u32 = 2;

/// Looks at the vCPUs' faults from time to time.
pub(super) struct Watchdog {
    timer: TimerFd,
    counters: Arc<KvmCounters>,
    notice: Arc<EndNotice>,
    vcpus: Vec<Watched>,
}

impl Watchdog {
    /// It begins at once.
    pub(super) fn start(counters: Arc<KvmCounters>, notice: Arc<EndNotice>) -> Result<Self, Error> {
        let mut timer = TimerFd::new()?;
        timer.reset(PERIOD, Some(PERIOD))?;
        Ok(Self { timer, counters, notice, vcpus: Vec::new() })
    }
}

impl MutEventSubscriber for Watchdog {
    fn process(&mut self, _: Events, _: &mut EventOps<'_>) {
        // It is said to be readable: nobody waits.
        let _ = self.timer.wait();
        // Without its counters a microVM runs unwatched.
        let Ok(counts) = self.counters.faults() else { return };
        self.vcpus.resize_with(counts.len(), Watched::default);
        let mut looks = self.vcpus.iter_mut().zip(counts);
        if looks.any(|(vcpu, counts)| vcpu.is_stuck(counts)) {
            // What is lost the owner finds out.
            let failure = VcpuFailure::Memory { address: None, source: None };
            self.notice.give(VcpuEnd::Failure(failure));
        }
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        let _ = ops.add(Events::new(&self.timer, EventSet::IN));
    }
}

/// What was seen of one vCPU.
#[derive(Default)]
struct Watched {
    last: FaultCounts,
    /// Periods in a row without an answer.
    unanswered: u32,
}

impl Watched {
    fn is_stuck(&mut self, now: FaultCounts) -> bool {
        let taken = now.taken.saturating_sub(self.last.taken);
        let unanswered = taken >= MANY && now.answered == self.last.answered;
        self.unanswered = if unanswered { self.unanswered + 1 } else { 0 };
        self.last = now;
        self.unanswered >= PERIODS
    }
}

#[cfg(test)]
#[path = "watchdog_tests.rs"]
mod tests;
