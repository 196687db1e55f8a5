//! The pager's thread: waits for faults and fills pages.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use firn_base::PAGE_SIZE;
use firn_base::num::usize_of;
use firn_snapshot::PageSet;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::{PagerError, Shared, add};
use crate::uffd::{Event, Fill, Uffd, UffdError};

pub(super) struct Server {
    shared: Arc<Shared>,
    /// Image pages that were discarded, and are filled with zeros.
    zeros: PageSet,
    stop: Arc<OwnedFd>,
    events: VecDeque<Event>,
    /// A buffer for a granule, allocated on first use.
    bytes: Vec<u8>,
    /// The address of the fault that is being resolved.
    current: Option<u64>,
}

impl Server {
    pub(super) fn new(shared: Arc<Shared>, zeros: PageSet, stop: Arc<OwnedFd>) -> Self {
        let (events, bytes) = (VecDeque::new(), Vec::new());
        Self { shared, zeros, stop, events, bytes, current: None }
    }

    pub(super) fn shared(&self) -> &Shared {
        &self.shared
    }

    /// Resolves faults until a stop is requested, or the process that owns the memory ends.
    pub(super) fn serve(&mut self) -> Result<(), PagerError> {
        while self.wait()? {
            while let Some(event) = self.events.pop_front() {
                let Event::Fault(fault) = event else { continue };
                match self.answer(fault.address) {
                    Err(PagerError::Uffd(UffdError::ProcessEnded)) => return Ok(()),
                    result => result?,
                }
            }
        }
        Ok(())
    }

    /// After a failure: makes accesses to missing pages end in an error.
    pub(super) fn poison(&mut self) {
        poison(&self.shared.uffd, &self.stop, self.current, std::mem::take(&mut self.events));
    }

    /// Waits for events and takes them; returns `false` when a stop was requested and no event is
    /// pending.
    fn wait(&mut self) -> Result<bool, PagerError> {
        let stopped = wait(&self.shared.uffd, &self.stop, None)?;
        self.take_events()?;
        Ok(!stopped || !self.events.is_empty())
    }

    /// Takes the pending events. Pages that are being discarded count as zeros from here on: the
    /// thread that discards them continues as soon as the event is read.
    fn take_events(&mut self) -> Result<(), PagerError> {
        for event in self.shared.uffd.events()? {
            if let Event::Remove(range) = &event {
                for area in &self.shared.areas {
                    let here = area.addresses();
                    let part = range.start.max(here.start)..range.end.min(here.end);
                    if !part.is_empty() {
                        let first = area.image_offset + (part.start - here.start);
                        let end = first + (part.end - part.start);
                        self.zeros.insert_range(first / PAGE_SIZE..end.div_ceil(PAGE_SIZE));
                    }
                }
            }
            self.events.push_back(event);
        }
        Ok(())
    }

    /// Resolves a fault.
    fn answer(&mut self, address: u64) -> Result<(), PagerError> {
        self.current = Some(address);
        add(&self.shared.counters.faults, 1);
        loop {
            match self.fill(address) {
                // The thread that discards memory waits until its event is read; the page may
                // have to be zero afterwards.
                Err(PagerError::Uffd(UffdError::Changing { .. })) => {
                    self.take_events()?;
                    std::thread::yield_now();
                }
                result => {
                    result?;
                    self.current = None;
                    return Ok(());
                }
            }
        }
    }

    fn fill(&mut self, address: u64) -> Result<(), PagerError> {
        let area = self.shared.areas.iter().find(|area| area.addresses().contains(&address));
        let area = *area.ok_or(PagerError::OutsideMemory { address })?;
        let image_page = (area.image_offset + (address - area.address)) / PAGE_SIZE;
        let page = address..address + PAGE_SIZE;
        let zeros = self.zeros.get(image_page);
        let block = self.block(image_page, area.image_pages(), zeros);
        let first = address - (image_page - block.start) * PAGE_SIZE;
        let range = first..first + (block.end - block.start) * PAGE_SIZE;
        if !zeros {
            let len = usize_of(range.end - range.start);
            self.bytes.resize(self.bytes.len().max(len), 0);
            self.shared.store.read(block.start, &mut self.bytes[..len])?;
        }
        let content = (!zeros).then_some(&self.bytes[..]);
        match self.put(range.clone(), content, &page) {
            // A part of the block is mapped otherwise: fill only the page.
            Err(PagerError::Uffd(UffdError::Unregistered { .. })) if range != page => {
                let content = content.map(|bytes| &bytes[usize_of(page.start - first)..]);
                self.put(page.clone(), content, &page)
            }
            result => {
                result?;
                self.shared.filled().insert_range(block);
                Ok(())
            }
        }
    }

    /// The pages that a fault on one of them fills, within its area: either all zeros, or all from
    /// the image.
    fn block(&self, image_page: u64, area: Range<u64>, zeros: bool) -> Range<u64> {
        let granule = self.shared.granule.load(Ordering::Relaxed);
        let start = (image_page - image_page % granule).max(area.start);
        let end = (image_page - image_page % granule + granule).min(area.end);
        let filled = self.shared.filled();
        let wanted = |page: &u64| self.zeros.get(*page) == zeros && !filled.get(*page);
        let first = (start..image_page).rev().take_while(wanted).last().unwrap_or(image_page);
        let last = (image_page + 1..end).take_while(wanted).last().unwrap_or(image_page);
        first..last + 1
    }

    /// Fills a range with the first bytes of `content`, or with zeros. Present pages are not
    /// changed. Threads that wait for `page` are woken even where it is already present.
    fn put(
        &self,
        range: Range<u64>,
        content: Option<&[u8]>,
        page: &Range<u64>,
    ) -> Result<(), PagerError> {
        let Shared { uffd, counters, .. } = &*self.shared;
        let (counter, unit) = match content {
            Some(_) => (&counters.copied_bytes, 1),
            None => (&counters.zero_pages, PAGE_SIZE),
        };
        let mut at = range.start;
        while at < range.end {
            let rest = at..range.end;
            let inside = |address| usize_of(address - range.start);
            // Counted first: a waiting thread may continue before this thread does.
            add(counter, (rest.end - at) / unit);
            let filled = match content {
                Some(bytes) => uffd.copy(at, &bytes[inside(at)..inside(range.end)], Fill::empty()),
                None => uffd.zero(rest.clone()),
            };
            let stopped = match filled {
                Ok(()) => return Ok(()),
                Err(UffdError::Present { address }) => address,
                Err(UffdError::Unregistered { address })
                    if address == page.start && rest == *page =>
                {
                    address
                }
                Err(error) => {
                    let undone = match &error {
                        UffdError::Changing { address } | UffdError::Unregistered { address } => {
                            rest.end - address
                        }
                        _ => rest.end - at,
                    };
                    counter.fetch_sub(undone / unit, Ordering::Relaxed);
                    return Err(error.into());
                }
            };
            counter.fetch_sub((rest.end - stopped) / unit, Ordering::Relaxed);
            if stopped == page.start {
                uffd.wake(page.clone())?;
            }
            at = stopped + PAGE_SIZE;
        }
        Ok(())
    }
}

/// Waits for events of a userfaultfd, at most up to `limit`, and returns whether a stop was
/// requested.
pub(crate) fn wait(
    uffd: &Uffd,
    stop: &OwnedFd,
    limit: Option<Duration>,
) -> Result<bool, PagerError> {
    let mut wait = [
        PollFd::from_borrowed_fd(uffd.as_fd(), PollFlags::IN),
        PollFd::from_borrowed_fd(stop.as_fd(), PollFlags::IN),
    ];
    let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
    match poll(&mut wait, limit.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(!wait[1].revents().is_empty()),
        Err(errno) => Err(PagerError::Wait(errno.into())),
    }
}

/// After a failure, until a stop is requested: makes accesses to missing pages, including pending
/// ones, end in an error. Where the kernel cannot poison pages, the accessing threads sleep.
pub(crate) fn poison(
    uffd: &Uffd,
    stop: &OwnedFd,
    current: Option<u64>,
    mut events: VecDeque<Event>,
) {
    let mut address = current;
    loop {
        if let Some(address) = address.take() {
            let _ = uffd.poison(address..address + PAGE_SIZE);
        }
        match events.pop_front() {
            Some(Event::Fault(fault)) => address = Some(fault.address),
            Some(Event::Remove(_)) => {}
            None => {
                let Ok(stopped) = wait(uffd, stop, None) else { return };
                let Ok(taken) = uffd.events() else { return };
                events.extend(taken);
                if stopped && events.is_empty() {
                    return;
                }
            }
        }
    }
}
