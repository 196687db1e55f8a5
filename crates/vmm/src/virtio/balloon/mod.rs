//! Balloon device (virtio 1.2, 5.5).
//!
//! The host sets a size, and the driver gives as many pages to the balloon, or takes them back. The
//! device discards what is in it, and what the driver reports as free in the reporting queue: these
//! pages read as zeros from then on. A page that the driver takes back needs no work of the device.
//! The driver may also tell how it uses its memory ([`statistics`]).
//!
//! Linux disables reporting if it fills free pages (`init_on_free`, page poisoning), unless the
//! device offers `VIRTIO_BALLOON_F_PAGE_POISON`; Linux then writes the fill value to the device.
//! With `init_on_free` the value is zero, which discarded pages contain. With any other value the
//! device acknowledges reports and discards nothing, as the specification permits (5.5.6.7).

mod statistics;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use firn_base::num::{u64_of, usize_of};
use firn_memory::GuestView;
use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;
use vm_memory::{GuestAddress, GuestMemory, Permissions};

use super::chain::{Buffers, ChainFault, Segment};
use super::device::{DeviceContext, VirtioDevice};
use super::error::{DeviceError, RestoreDeviceError};
use super::state::{BalloonState, DeviceState};
pub use statistics::BalloonStatistics;
use statistics::Statistics;

/// `VIRTIO_BALLOON_F_STATS_VQ`: the driver tells how it uses its memory.
const STATISTICS: u32 = 1;
/// `VIRTIO_BALLOON_F_DEFLATE_ON_OOM`: the driver takes pages back before it runs out of memory.
const DEFLATE_ON_OOM: u32 = 2;
/// `VIRTIO_BALLOON_F_PAGE_POISON`: the driver writes the fill value of free pages.
const PAGE_POISON: u32 = 4;
/// `VIRTIO_BALLOON_F_REPORTING`: the driver reports free pages.
const REPORTING: u32 = 5;

/// Linux disables reporting below 32, and uses no more. It inflates with one request at a time.
const QUEUE_SIZE: u16 = 128;
const INFLATE_QUEUE: usize = 0;
/// The first of the optional queues, which follow the ones for inflating and deflating without
/// gaps: Linux counts only those whose features it has.
const FIRST_OPTIONAL_QUEUE: usize = 2;

/// Bytes of a page.
const PAGE: u64 = 4096;
/// Bytes of a page's number in a request.
const NUMBER: usize = 4;
/// The most pages that one turn of the device inflates, so that a guest cannot block the event
/// loop. Linux passes 256 at a time.
const PAGES_PER_TURN: usize = 4096;

/// Offsets of the writable registers in `struct virtio_balloon_config` (5.5.4).
const ACTUAL: u64 = 4;
const POISON: u64 = 12;

/// Discards guest memory that the guest does not use.
pub(crate) trait PageDiscard: Send {
    /// Returns the `len` bytes at guest-physical `addr` to the host, so that they read as zeros and
    /// use no memory until they are written. Both are multiples of 4096, and the range is in guest
    /// memory.
    ///
    /// # Errors
    /// The range is not, or only partly, discarded, which does not harm the guest.
    fn discard(&self, addr: u64, len: u64) -> io::Result<()>;
}

/// A guest's balloon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BalloonConfig {
    /// The size that the host wants, in pages of 4096 bytes.
    pub target: u32,
    /// Whether the guest takes pages back before it runs out of memory.
    pub deflate_on_oom: bool,
    /// Whether the guest tells how it uses its memory.
    pub statistics: bool,
    /// Whether the guest reports free pages.
    pub reporting: bool,
}

impl BalloonConfig {
    /// An empty balloon of a guest that reports free pages.
    pub const REPORTING: Self =
        Self { target: 0, deflate_on_oom: false, statistics: false, reporting: true };
}

/// The work of a balloon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BalloonCounters {
    /// Bytes discarded.
    pub discarded: u64,
    /// Ranges that could not be discarded.
    pub failures: u64,
    /// Statistics that the guest reported.
    pub statistics: u64,
    /// Statistics that were not valid.
    pub statistics_failures: u64,
}

/// A balloon.
#[derive(Debug)]
pub(crate) struct Balloon<P> {
    config: BalloonConfig,
    pages: P,
    /// The number of pages in the balloon, as the driver reports it.
    actual: u32,
    poison: u32,
    statistics: Option<Statistics>,
    counters: BalloonCounters,
}

impl<P: PageDiscard> Balloon<P> {
    /// A device that passes what the guest does not use to `pages`, and asks for statistics, if it
    /// has them, in a [period](Self::set_period).
    ///
    /// # Errors
    /// There is no timer descriptor for the statistics.
    pub(crate) fn new(
        config: BalloonConfig,
        period: Option<Duration>,
        pages: P,
    ) -> io::Result<Self> {
        let statistics = config.statistics.then(|| Statistics::new(period)).transpose()?;
        let counters = BalloonCounters::default();
        Ok(Self { config, pages, actual: 0, poison: 0, statistics, counters })
    }

    /// Sets the size that the host wants, in pages of 4096 bytes.
    pub(crate) fn set_target(&mut self, target: u32) {
        self.config.target = target;
    }

    /// What the host wants and the guest has told; `None` if it tells nothing.
    pub(crate) fn statistics(&self) -> Option<BalloonStatistics> {
        let values = self.statistics.as_ref()?.latest();
        let (target_pages, actual_pages) = (self.config.target, self.actual);
        Some(BalloonStatistics { target_pages, actual_pages, values })
    }

    /// Sets the time after which the guest tells again; `None` for never. Returns false if it tells
    /// nothing.
    pub(crate) fn set_period(&self, period: Option<Duration>) -> bool {
        self.statistics.as_ref().map(|statistics| statistics.set_period(period)).is_some()
    }

    /// The work so far.
    pub(crate) fn counters(&self) -> BalloonCounters {
        self.counters
    }

    fn discard(&mut self, addr: u64, len: u64) {
        match self.pages.discard(addr, len) {
            Ok(()) => self.counters.discarded += len,
            Err(_) => self.counters.failures += 1,
        }
    }

    fn report(&mut self, segment: Segment) -> Result<(), ChainFault> {
        let (addr, len) = (segment.addr.0, u64::from(segment.len));
        if !addr.is_multiple_of(PAGE) || !len.is_multiple_of(PAGE) {
            return Err(ChainFault::Unsuitable { addr, len: segment.len });
        }
        self.discard(addr, len);
        Ok(())
    }

    /// Discards the pages that a request puts into the balloon, and returns their number.
    fn inflate(&mut self, request: &Buffers, mem: &GuestView) -> Result<usize, ChainFault> {
        let count = request.len() / NUMBER;
        if count > PAGES_PER_TURN {
            let first = request.segments().first();
            let (addr, len) = first.map_or((0, 0), |segment| (segment.addr.0, segment.len));
            return Err(ChainFault::Unsuitable { addr, len });
        }
        let mut numbers = vec![0; count * NUMBER];
        request.read_at(mem, 0, &mut numbers)?;
        let numbers = numbers.chunks_exact(NUMBER);
        let mut numbers: Vec<_> =
            numbers.map(|number| number.try_into().map_or(0, u32::from_le_bytes)).collect();
        numbers.sort_unstable();
        numbers.dedup();
        // Neighbours are discarded together.
        for run in numbers.chunk_by(|page, next| page.checked_add(1) == Some(*next)) {
            let (addr, len) = (u64::from(run[0]) * PAGE, u64_of(run.len()) * PAGE);
            if !mem.check_range(GuestAddress(addr), usize_of(len), Permissions::ReadWrite) {
                return Err(ChainFault::Outside {
                    addr,
                    len: u32::try_from(len).unwrap_or(u32::MAX),
                });
            }
            self.discard(addr, len);
        }
        Ok(count)
    }
}

/// Whether the driver accepted a feature.
fn has(context: &DeviceContext<'_>, feature: u32) -> bool {
    context.features & 1 << feature != 0
}

impl<P: PageDiscard> VirtioDevice for Balloon<P> {
    fn id(&self) -> u32 {
        VIRTIO_ID_BALLOON
    }

    fn features(&self) -> u64 {
        let BalloonConfig { deflate_on_oom, statistics, reporting, .. } = self.config;
        u64::from(statistics) << STATISTICS
            | u64::from(deflate_on_oom) << DEFLATE_ON_OOM
            | u64::from(reporting) << REPORTING
            | u64::from(reporting) << PAGE_POISON
    }

    fn queue_sizes(&self) -> &[u16] {
        let optional = usize::from(self.config.statistics) + usize::from(self.config.reporting);
        &[QUEUE_SIZE; FIRST_OPTIONAL_QUEUE + 2][..FIRST_OPTIONAL_QUEUE + optional]
    }

    fn config(&self) -> Vec<u8> {
        // The third belongs to a feature that is not offered.
        let registers = [self.config.target, self.actual, 0, self.poison];
        registers.into_iter().flat_map(u32::to_le_bytes).collect()
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        let Ok(data) = data.try_into().map(u32::from_le_bytes) else { return };
        match offset {
            ACTUAL => self.actual = data,
            POISON => self.poison = data,
            _ => {}
        }
    }

    fn process_queue(
        &mut self,
        index: usize,
        context: &mut DeviceContext<'_>,
    ) -> Result<(), DeviceError> {
        let (tells, reports) = (has(context, STATISTICS), has(context, REPORTING));
        let discards = !(has(context, PAGE_POISON) && self.poison != 0);
        let Some(queue) = context.queues.get_mut(index) else { return Ok(()) };
        if tells && index == FIRST_OPTIONAL_QUEUE {
            let Some(statistics) = &mut self.statistics else { return Ok(()) };
            let read = statistics.read(queue, context.mem);
            self.counters.statistics += u64::from(matches!(read, Ok(true)));
            self.counters.statistics_failures += u64::from(read.is_err());
            return read.map(drop);
        }
        let reporting = reports && index == FIRST_OPTIONAL_QUEUE + usize::from(tells);
        let mut pages = 0;
        while pages < PAGES_PER_TURN
            && let Some(chain) = queue.pop(context.mem)?
        {
            if reporting && discards {
                for segment in chain.writable.segments() {
                    self.report(*segment).map_err(|fault| queue.chain_error(fault))?;
                }
            } else if index == INFLATE_QUEUE {
                let inflated = self.inflate(&chain.readable, context.mem);
                pages += inflated.map_err(|fault| queue.chain_error(fault))?;
            }
            queue.push_used(context.mem, &chain, 0)?;
        }
        if pages >= PAGES_PER_TURN {
            queue.set_unfinished();
        }
        Ok(())
    }

    fn event_source(&self) -> Option<BorrowedFd<'_>> {
        self.statistics.as_ref().map(AsFd::as_fd)
    }

    fn process_event(&mut self, context: &mut DeviceContext<'_>) -> Result<(), DeviceError> {
        self.statistics.iter().for_each(Statistics::acknowledge);
        let tells = has(context, STATISTICS);
        let queue = context.queues.get_mut(FIRST_OPTIONAL_QUEUE).filter(|_| tells);
        queue.map_or(Ok(()), |queue| statistics::ask(queue, context.mem))
    }

    fn reset(&mut self) {
        self.actual = 0;
        self.poison = 0;
        self.statistics.iter_mut().for_each(Statistics::forget);
    }

    fn save(&self) -> DeviceState {
        let BalloonConfig { target, deflate_on_oom, statistics, reporting } = self.config;
        let (actual, poison) = (self.actual, self.poison);
        DeviceState::Balloon(BalloonState {
            actual,
            poison,
            target,
            deflate_on_oom,
            statistics,
            reporting,
        })
    }

    fn restore(&mut self, state: &DeviceState, _running: bool) -> Result<(), RestoreDeviceError> {
        let DeviceState::Balloon(saved) = state else {
            return Err(RestoreDeviceError::OtherDevice { id: self.id() });
        };
        self.actual = saved.actual;
        self.poison = saved.poison;
        Ok(())
    }
}

impl BalloonState {
    /// The guest's balloon.
    pub(crate) fn config(self) -> BalloonConfig {
        let Self { target, deflate_on_oom, statistics, reporting, .. } = self;
        BalloonConfig { target, deflate_on_oom, statistics, reporting }
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
