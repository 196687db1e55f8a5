//! Repeated accesses: how a page that was touched becomes missing again and keeps its contents.
//!
//! Present pages are moved to the same place in a second memory (`UFFDIO_MOVE`, Linux 6.8), and
//! each is moved back at its next fault. KVM drops its mappings of a page that is moved.

use std::num::NonZero;

use firn_base::PAGE_SIZE;
use firn_snapshot::MemoryLayout;

use super::{RecordError, Recording};
use crate::guest_memory::{GuestMemory, GuestView};
use crate::slot::host_addr;
use crate::trace::{Access, Repeat, Touch};
use crate::uffd::{RegisterMode, Uffd};

/// The repetition of accesses: when all pages are set aside, and where they are until their next
/// access.
pub(super) struct Sampling {
    period: u64,
    aside: GuestMemory,
    view: GuestView,
    /// The guest's work since all pages were set aside.
    worked: u64,
    /// The guest's work that is not in a gap so far.
    pending: u64,
    /// The sum of the gaps since the last touch.
    since_touch: u64,
    /// Whether the second invocation is being recorded.
    second: bool,
}

impl Sampling {
    /// The second memory is registered with the userfaultfd of guest memory, as the kernel
    /// requires.
    pub(super) fn new(
        period: NonZero<u64>,
        layout: &MemoryLayout,
        uffd: &Uffd,
    ) -> Result<Self, RecordError> {
        let aside = GuestMemory::anonymous(layout.clone())?;
        aside.register(uffd, RegisterMode::MISSING)?;
        let view = aside.vm_memory();
        let (period, second) = (period.get(), false);
        Ok(Self { period, aside, view, worked: 0, pending: 0, since_touch: 0, second })
    }

    pub(super) fn period(&self) -> u64 {
        self.period
    }

    /// Where a guest page is set aside, in this process.
    pub(super) fn address(&self, page: u64) -> u64 {
        // Both memories have the same layout.
        host_addr(self.aside.slots(), page * PAGE_SIZE).unwrap_or_default()
    }

    /// The pages that are set aside. Reading any other page would wait for the recorder.
    pub(super) fn view(&self) -> &GuestView {
        &self.view
    }

    /// Adds to the guest's work.
    pub(super) fn work(&mut self, work: u64) {
        self.worked += work;
        self.pending += work;
    }

    /// Whether a period of work has ended; the next one begins then.
    pub(super) fn period_ended(&mut self) -> bool {
        let ended = self.worked >= self.period;
        if ended {
            self.worked = 0;
        }
        ended
    }

    /// Starts the second invocation.
    pub(super) fn start_second(&mut self) {
        (self.second, self.worked, self.pending) = (true, 0, 0);
    }

    /// Adds an access to the recording. `first` is whether it is the page's first access or first
    /// write.
    pub(super) fn record(&mut self, mut touch: Touch, first: bool, recording: &mut Recording) {
        self.work(touch.gap);
        touch.gap = std::mem::take(&mut self.pending);
        let Recording { touches, again: Some(again), .. } = recording else { return };
        if self.second {
            if touch.access == Access::LaterWrite {
                touch.access = Access::Write;
            }
            again.second.push(touch);
        } else if first {
            touch.gap += std::mem::take(&mut self.since_touch);
            touches.push(touch);
        } else {
            self.since_touch += touch.gap;
            again.repeats.push(Repeat { after: touches.len(), touch });
        }
    }
}
