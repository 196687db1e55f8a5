//! The recorder's thread: waits for faults, fills pages and records touches.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use firn_base::PAGE_SIZE;
use firn_base::num::usize_of;
use firn_snapshot::{ImageRegion, MemoryLayout};
use parking_lot::Mutex;
use vm_memory::{Bytes, GuestAddress};

use super::again::Sampling;
use super::{FaultObserver, Recording, TouchedPages};
use crate::guest_memory::{GuestMemory, GuestView};
use crate::pager::{PageStore, PagerError, poison, wait};
use crate::plan::Leaf;
use crate::slot::{Slot, host_addr};
use crate::trace::{Access, Again, Touch, Toucher};
use crate::uffd::{Event, Fault, FaultKind, Fill, Uffd, UffdError};

/// The shortest time without a fault after which a guest is interrupted. It is longer than an
/// interruption takes, so that the guest makes progress.
const SHORTEST_LIMIT: Duration = Duration::from_millis(1);

/// The state of a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PageState {
    /// It was touched; its contents do not come from the image any more.
    touched: bool,
    /// It was written to.
    written: bool,
    /// It is present: touched, and neither discarded nor set aside since.
    present: bool,
    /// It is set aside until its next access.
    aside: bool,
    /// A device touched it first: it is not set aside. KVM and the monitor access such pages, the
    /// clock's and the queues', at their own times, and KVM cannot be interrupted while it waits.
    device: bool,
}

impl PageState {
    pub(super) fn is_present(self) -> bool {
        self.present
    }

    pub(super) fn is_aside(self) -> bool {
        self.aside
    }
}

pub(super) struct Server {
    uffd: Arc<Uffd>,
    slots: Vec<Slot>,
    layout: MemoryLayout,
    view: GuestView,
    store: PageStore,
    observer: Box<dyn FaultObserver>,
    active: Arc<AtomicBool>,
    sampling: Option<Sampling>,
    /// By image page.
    states: Vec<PageState>,
    events: VecDeque<Event>,
    /// The address of the fault that is being resolved.
    current: Option<u64>,
    recording: Recording,
}

/// Resolves faults until a stop is requested. After a failure, calls `failed` and makes accesses to
/// missing pages end in an error.
pub(super) fn serve(
    server: &Mutex<Server>,
    stop: &OwnedFd,
    failed: impl Fn(&PagerError),
) -> Result<Recording, PagerError> {
    let uffd = server.lock().uffd.clone();
    let serve = || -> Result<Recording, PagerError> {
        loop {
            let limit = server.lock().limit();
            let stopped = wait(&uffd, stop, limit)?;
            let mut server = server.lock();
            match server.answer_pending()? {
                0 if stopped => return Ok(std::mem::take(&mut server.recording)),
                0 if limit.is_some() => server.count_and_set_aside()?,
                _ => {}
            }
        }
    };
    serve().inspect_err(|error| {
        failed(error);
        let mut server = server.lock();
        let (current, events) = (server.current, std::mem::take(&mut server.events));
        drop(server);
        poison(&uffd, stop, current, events);
    })
}

impl Server {
    pub(super) fn new(
        uffd: Arc<Uffd>,
        memory: &GuestMemory,
        store: PageStore,
        observer: Box<dyn FaultObserver>,
        active: Arc<AtomicBool>,
        sampling: Option<Sampling>,
    ) -> Self {
        let layout = memory.layout().clone();
        let states = vec![PageState::default(); usize_of(layout.pages())];
        let again = sampling.as_ref().map(|sampling| Again::every(sampling.period()));
        Self {
            uffd,
            slots: memory.slots().to_vec(),
            layout,
            view: memory.vm_memory(),
            store,
            observer,
            active,
            sampling,
            states,
            events: VecDeque::new(),
            current: None,
            recording: Recording { again, ..Recording::default() },
        }
    }

    /// The request begins with the next access.
    pub(super) fn start_request(&mut self) {
        if let Recording { touches, again: Some(again), .. } = &mut self.recording {
            again.request = touches.len() + again.repeats.len();
        }
    }

    /// The second invocation begins with the next access.
    pub(super) fn start_second(&mut self) -> Result<(), PagerError> {
        self.count_work();
        if let Some(sampling) = &mut self.sampling {
            sampling.start_second();
        }
        let set_aside = self.set_aside();
        self.observer.release();
        set_aside?;
        // Some events may have been taken on the way.
        self.answer_pending().map(drop)
    }

    /// How long a guest may run without a fault until its work is counted. Units of work are ns, or
    /// instructions of about 1 ns.
    fn limit(&self) -> Option<Duration> {
        let sampling = self.sampling.as_ref().filter(|_| self.active.load(Ordering::SeqCst))?;
        Some(Duration::from_nanos(sampling.period()).max(SHORTEST_LIMIT))
    }

    /// For a guest that does not fault.
    fn count_and_set_aside(&mut self) -> Result<(), PagerError> {
        self.count_work();
        let set_aside = self.set_aside_after_period();
        self.observer.release();
        set_aside
    }

    /// Stops the guest, until the observer releases it, and counts its work.
    fn count_work(&mut self) {
        let Some(sampling) = &mut self.sampling else { return };
        let touched = TouchedPages {
            view: &self.view,
            aside: Some(sampling.view()),
            layout: &self.layout,
            states: &self.states,
        };
        let work = self.observer.pause(&touched);
        sampling.work(work);
    }

    /// Resolves the pending events, and returns their number.
    fn answer_pending(&mut self) -> Result<usize, PagerError> {
        self.take_events()?;
        let mut answered = 0;
        while let Some(event) = self.events.pop_front() {
            if let Event::Fault(fault) = event {
                self.current = Some(fault.address);
                self.answer(fault)?;
                self.current = None;
            }
            answered += 1;
        }
        Ok(answered)
    }

    /// Takes the pending events. Pages that are being discarded count as missing from here on: the
    /// thread that discards them continues as soon as the event is read.
    fn take_events(&mut self) -> Result<(), PagerError> {
        for event in self.uffd.events()? {
            if let Event::Remove(range) = &event {
                for address in range.clone().step_by(usize_of(PAGE_SIZE)) {
                    if let Some((page, image)) = self.page_at(address) {
                        self.discarded(page, image);
                    }
                }
            }
            self.events.push_back(event);
        }
        Ok(())
    }

    fn discarded(&mut self, page: u64, image: usize) {
        self.states[image].present = false;
        if let Some(sampling) = self.sampling.as_ref().filter(|_| self.states[image].aside) {
            // The page is present there, and has the size of the zeros.
            let _ = sampling.view().write_slice(&ZEROS, GuestAddress(page * PAGE_SIZE));
        }
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
        let first = !state.touched || (writes && !state.written);
        let recorded = (first || state.aside) && self.active.load(Ordering::SeqCst);
        if recorded {
            let access = match (state.touched && first, writes) {
                (true, _) => Access::LaterWrite,
                (false, true) => Access::Write,
                (false, false) => Access::Read,
            };
            self.record((page, image), access, first, fault.thread);
            self.set_aside_after_period()?;
        }
        self.make_present(page, image, writes)?;
        if recorded {
            self.observer.release();
        }
        if !self.active.load(Ordering::SeqCst) {
            self.fill_ahead(fault.address)?;
        }
        Ok(())
    }

    /// Makes a page present for an access.
    fn make_present(&mut self, page: u64, image: usize, writes: bool) -> Result<(), PagerError> {
        let start = host_addr(&self.slots, page * PAGE_SIZE).unwrap_or_default();
        let range = start..start + PAGE_SIZE;
        let state = self.states[image];
        let written = state.written || writes;
        let now = PageState { touched: true, written, present: true, aside: false, ..state };
        match &self.sampling {
            Some(sampling) if state.aside => {
                let from = sampling.address(page);
                self.retried(|uffd| uffd.move_pages(from..from + PAGE_SIZE, start))?;
                if !written {
                    self.retried(|uffd| uffd.write_protect(range.clone(), true))?;
                }
                self.uffd.wake(range)?;
            }
            _ if state.present => self.retried(|uffd| uffd.write_protect(range.clone(), false))?,
            _ => self.fill(image, &range, now)?,
        }
        self.states[image] = now;
        Ok(())
    }

    /// Sets all pages aside if a period of the guest's work has ended.
    fn set_aside_after_period(&mut self) -> Result<(), PagerError> {
        let ended = self.sampling.as_mut().is_some_and(Sampling::period_ended);
        if ended { self.set_aside() } else { Ok(()) }
    }

    /// Sets all present pages aside, except those of devices: the next access to each is a fault.
    fn set_aside(&mut self) -> Result<(), PagerError> {
        let regions: Vec<ImageRegion> = self.layout.regions().collect();
        for region in &regions {
            let mut images = region.image_pages();
            let goes = |states: &[PageState], image: u64| {
                let state = states[usize_of(image)];
                state.present && !state.device
            };
            while let Some(start) = images.find(|image| goes(&self.states, *image)) {
                let end = images.clone().find(|image| !goes(&self.states, *image));
                images.start = self.set_run_aside(region, start..end.unwrap_or(images.end))?;
            }
        }
        Ok(())
    }

    /// Sets the first of some adjacent present pages aside; returns the image page to continue at.
    fn set_run_aside(
        &mut self,
        region: &ImageRegion,
        images: Range<u64>,
    ) -> Result<u64, PagerError> {
        let Some(sampling) = &self.sampling else { return Ok(images.end) };
        let guest_addr = region.guest_addr + images.start * PAGE_SIZE - region.image_offset;
        let from = host_addr(&self.slots, guest_addr).unwrap_or_default();
        let range = from..from + (images.end - images.start) * PAGE_SIZE;
        let moved = self.uffd.move_pages(range.clone(), sampling.address(guest_addr / PAGE_SIZE));
        let stopped = match &moved {
            Ok(()) => range.end,
            Err(
                UffdError::Changing { address }
                | UffdError::Missing { address }
                | UffdError::Pinned { address },
            ) => *address,
            Err(_) => from,
        };
        let next = images.start + (stopped - from) / PAGE_SIZE;
        for state in &mut self.states[usize_of(images.start)..usize_of(next)] {
            (state.present, state.aside) = (false, true);
        }
        match moved {
            Ok(()) => Ok(next),
            Err(UffdError::Changing { .. }) => {
                self.take_events()?;
                std::thread::yield_now();
                Ok(next)
            }
            // It was being discarded when it was made present.
            Err(UffdError::Missing { .. }) => {
                self.states[usize_of(next)].present = false;
                Ok(next + 1)
            }
            // It stays present for a period: no access is lost, only not recorded.
            Err(UffdError::Pinned { .. }) => Ok(next + 1),
            Err(error) => Err(error.into()),
        }
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
        let now = PageState { touched: true, written: true, present: true, ..PageState::default() };
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

    /// `first` is whether it is the page's first access or first write.
    fn record(&mut self, (page, image): (u64, usize), access: Access, first: bool, thread: u32) {
        let touched = TouchedPages {
            view: &self.view,
            aside: self.sampling.as_ref().map(Sampling::view),
            layout: &self.layout,
            states: &self.states,
        };
        let origin = self.observer.observe(page, thread, &touched);
        self.states[image].device |=
            access != Access::LaterWrite && first && origin.by == Toucher::Device;
        if origin.leaf.is_none() && origin.by != Toucher::Device {
            self.recording.unknown_leaves += 1;
        }
        let touch = Touch {
            page,
            access,
            by: origin.by,
            leaf: origin.leaf.unwrap_or(Leaf::Size4K),
            gap: origin.gap,
        };
        match &mut self.sampling {
            Some(sampling) => sampling.record(touch, first, &mut self.recording),
            None => self.recording.touches.push(touch),
        }
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
