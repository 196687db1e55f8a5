//! The recorder's thread: waits for faults, fills pages and records touches.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use firn_base::PAGE_SIZE;
use firn_base::num::usize_of;
use firn_snapshot::MemoryLayout;

use super::{FaultObserver, Recording, TouchedPages};
use crate::guest_memory::{GuestMemory, GuestView};
use crate::pager::{PageStore, PagerError, poison, wait};
use crate::plan::Leaf;
use crate::slot::Slot;
use crate::trace::{Access, Touch, Toucher};
use crate::uffd::{Event, Fault, FaultKind, Fill, Uffd, UffdError};

/// The state of a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PageState {
    /// It was touched; its contents do not come from the image any more.
    touched: bool,
    /// It was written to.
    written: bool,
    /// It is present: touched, and not discarded since.
    present: bool,
}

impl PageState {
    pub(super) fn is_present(self) -> bool {
        self.present
    }
}

pub(super) struct Server {
    uffd: Uffd,
    slots: Vec<Slot>,
    layout: MemoryLayout,
    view: GuestView,
    store: PageStore,
    observer: Box<dyn FaultObserver>,
    stop: Arc<OwnedFd>,
    active: Arc<AtomicBool>,
    /// By image page.
    states: Vec<PageState>,
    events: VecDeque<Event>,
    /// The address of the fault that is being resolved.
    current: Option<u64>,
    recording: Recording,
}

impl Server {
    pub(super) fn new(
        uffd: Uffd,
        memory: &GuestMemory,
        store: PageStore,
        observer: Box<dyn FaultObserver>,
        stop: Arc<OwnedFd>,
        active: Arc<AtomicBool>,
    ) -> Self {
        let layout = memory.layout().clone();
        let states = vec![PageState::default(); usize_of(layout.pages())];
        Self {
            uffd,
            slots: memory.slots().to_vec(),
            layout,
            view: memory.vm_memory(),
            store,
            observer,
            stop,
            active,
            states,
            events: VecDeque::new(),
            current: None,
            recording: Recording::default(),
        }
    }

    /// Resolves faults until a stop is requested.
    pub(super) fn serve(&mut self) -> Result<Recording, PagerError> {
        loop {
            let stopped = wait(&self.uffd, &self.stop)?;
            self.take_events()?;
            if stopped && self.events.is_empty() {
                return Ok(std::mem::take(&mut self.recording));
            }
            while let Some(event) = self.events.pop_front() {
                if let Event::Fault(fault) = event {
                    self.current = Some(fault.address);
                    self.answer(fault)?;
                    self.current = None;
                }
            }
        }
    }

    /// After a failure: makes accesses to missing pages end in an error.
    pub(super) fn poison(&mut self) {
        poison(&self.uffd, &self.stop, self.current, std::mem::take(&mut self.events));
    }

    /// Takes the pending events. Pages that are being discarded count as missing from here on: the
    /// thread that discards them continues as soon as the event is read.
    fn take_events(&mut self) -> Result<(), PagerError> {
        for event in self.uffd.events()? {
            if let Event::Remove(range) = &event {
                for address in range.clone().step_by(usize_of(PAGE_SIZE)) {
                    if let Some((_, image)) = self.page_at(address) {
                        self.states[image].present = false;
                    }
                }
            }
            self.events.push_back(event);
        }
        Ok(())
    }

    /// The guest page and the image page at an address of this process.
    fn page_at(&self, address: u64) -> Option<(u64, usize)> {
        let slot = self.slots.iter().find(|slot| {
            address.checked_sub(slot.host_addr).is_some_and(|inside| inside < slot.len)
        })?;
        let guest = slot.guest_addr + (address - slot.host_addr);
        let image = self.layout.image_offset(guest)?;
        Some((guest / PAGE_SIZE, usize_of(image / PAGE_SIZE)))
    }

    fn answer(&mut self, fault: Fault) -> Result<(), PagerError> {
        // All registered ranges are guest memory.
        let Some((page, image)) = self.page_at(fault.address) else { return Ok(()) };
        let range = fault.address..fault.address + PAGE_SIZE;
        let state = self.states[image];
        let writes = fault.kind != FaultKind::MissingRead;
        if state.present && (state.written || !writes) {
            // The fault was reported twice because a signal woke the thread, or the page is being
            // discarded, and is zero from now on.
            if fault.kind == FaultKind::WriteProtected {
                return Ok(self.uffd.wake(range)?);
            }
            let fill = if state.written { Fill::empty() } else { Fill::WRITE_PROTECTED };
            return self.retried(|uffd| install(uffd, &range, &ZEROS, fill));
        }
        let access = match (state.touched, writes) {
            (false, false) => Some(Access::Read),
            (false, true) => Some(Access::Write),
            (true, true) if !state.written => Some(Access::LaterWrite),
            (true, _) => None,
        };
        let access = access.filter(|_| self.active.load(Ordering::SeqCst));
        if let Some(access) = access {
            self.record(page, access, fault.thread);
        }
        let now = PageState { touched: true, written: state.written || writes, present: true };
        if state.present {
            self.retried(|uffd| uffd.write_protect(range.clone(), false))?;
        } else {
            self.fill(image, &range, now)?;
        }
        self.states[image] = now;
        if access.is_some() {
            self.observer.release();
        }
        if !self.active.load(Ordering::SeqCst) {
            self.fill_ahead(fault.address)?;
        }
        Ok(())
    }

    /// Fills a missing page: with the checked page of the image, or with zeros where it was
    /// discarded.
    fn fill(&mut self, image: usize, range: &Range<u64>, now: PageState) -> Result<(), PagerError> {
        let mut content = ZEROS;
        if !self.states[image].touched {
            self.store.read(image as u64, &mut content)?;
        }
        let fill = if now.written { Fill::empty() } else { Fill::WRITE_PROTECTED };
        self.retried(|uffd| install(uffd, range, &content, fill))
    }

    /// After the recording: fills the untouched pages after one, up to the next touched page.
    fn fill_ahead(&mut self, address: u64) -> Result<(), PagerError> {
        let now = PageState { touched: true, written: true, present: true };
        let ahead = address + PAGE_SIZE..address + Leaf::Size2M.bytes();
        for address in ahead.step_by(usize_of(PAGE_SIZE)) {
            let Some((_, image)) = self.page_at(address) else { break };
            if self.states[image].touched {
                break;
            }
            self.fill(image, &(address..address + PAGE_SIZE), now)?;
            self.states[image] = now;
        }
        Ok(())
    }

    fn record(&mut self, page: u64, access: Access, thread: u32) {
        let touched = TouchedPages { view: &self.view, layout: &self.layout, states: &self.states };
        let origin = self.observer.observe(page, thread, &touched);
        if origin.leaf.is_none() && origin.by != Toucher::Device {
            self.recording.unknown_leaves += 1;
        }
        self.recording.touches.push(Touch {
            page,
            access,
            by: origin.by,
            leaf: origin.leaf.unwrap_or(Leaf::Size4K),
            gap: origin.gap,
        });
    }

    /// Repeats an operation until no pending event of discarded memory blocks it.
    fn retried(
        &mut self,
        operation: impl Fn(&Uffd) -> Result<(), UffdError>,
    ) -> Result<(), PagerError> {
        loop {
            match operation(&self.uffd) {
                Err(UffdError::Changing { .. }) => {
                    self.take_events()?;
                    std::thread::yield_now();
                }
                result => return Ok(result?),
            }
        }
    }
}

const ZEROS: [u8; 4096] = [0; 4096];

/// Fills a missing page. Where a page is present or the memory is unmapped, the waiting threads are
/// woken.
fn install(uffd: &Uffd, range: &Range<u64>, content: &[u8], fill: Fill) -> Result<(), UffdError> {
    match uffd.copy(range.start, content, fill) {
        Err(UffdError::Present { .. } | UffdError::Unregistered { .. }) => uffd.wake(range.clone()),
        result => result,
    }
}
