//! How a guest uses its memory (virtio 1.2, 5.5.6.3).
//!
//! The driver makes one buffer with its statistics available. The device returns it when it wants
//! newer ones, and the driver makes it available again.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use firn_memory::GuestView;

use super::super::chain::{Buffers, ChainFault};
use super::super::error::DeviceError;
use super::super::queue::VirtQueue;
use super::super::timer::Timer;

/// Bytes of one value: its tag of 16 bits, and 64 bits, without padding.
const VALUE: usize = 10;
/// More values than the specification and Linux have.
const MOST_VALUES: usize = 64;

/// How a guest uses its memory, as its driver reports it. What it has not told is `None`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BalloonStatistics {
    /// The size of the balloon that the host wants, pages of 4096 bytes.
    pub target_pages: u32,
    /// The size of the balloon, pages of 4096 bytes.
    pub actual_pages: u32,
    /// The guest's values, by their numbers in `include/uapi/linux/virtio_balloon.h`; memory is in
    /// bytes.
    pub(super) values: Values,
}

/// By the numbers of [`BalloonStatistics::NAMES`].
pub(super) type Values = [Option<u64>; BalloonStatistics::NAMES.len()];

impl BalloonStatistics {
    /// The names of the values, by their numbers.
    pub const NAMES: [&str; 16] = [
        "swap_in",
        "swap_out",
        "major_faults",
        "minor_faults",
        "free_memory",
        "total_memory",
        "available_memory",
        "disk_caches",
        "hugetlb_allocations",
        "hugetlb_failures",
        "oom_kill",
        "alloc_stall",
        "async_scan",
        "direct_scan",
        "async_reclaim",
        "direct_reclaim",
    ];

    /// The values that the guest has told, by their names.
    pub fn values(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let named = Self::NAMES.into_iter().zip(self.values);
        named.filter_map(|(name, value)| Some((name, value?)))
    }
}

fn parse(request: &Buffers, mem: &GuestView) -> Result<Values, ChainFault> {
    let count = (request.len() / VALUE).min(MOST_VALUES);
    let mut bytes = vec![0; count * VALUE];
    request.read_at(mem, 0, &mut bytes)?;
    let mut values = Values::default();
    for value in bytes.chunks_exact(VALUE) {
        let (tag, value) = value.split_at(2);
        let tag = tag.try_into().map_or(usize::MAX, |tag| u16::from_le_bytes(tag).into());
        // A later driver may have more.
        if let Some(place) = values.get_mut(tag) {
            *place = value.try_into().map(u64::from_le_bytes).ok();
        }
    }
    Ok(values)
}

/// The device's side of the statistics.
#[derive(Debug)]
pub(super) struct Statistics {
    latest: Values,
    timer: Timer,
}

impl Statistics {
    /// Asks in a period; `None` for never.
    pub(super) fn new(period: Option<Duration>) -> io::Result<Self> {
        let statistics = Self { latest: Values::default(), timer: Timer::new()? };
        statistics.set_period(period);
        Ok(statistics)
    }

    /// What the guest told last.
    pub(super) fn latest(&self) -> Values {
        self.latest
    }

    /// Forgets what the guest told.
    pub(super) fn forget(&mut self) {
        self.latest = Values::default();
    }

    /// Sets the time between two events; `None` for none.
    pub(super) fn set_period(&self, period: Option<Duration>) {
        self.timer.set_periodic(period.unwrap_or_default());
    }

    /// Reads the driver's buffer, which stays available. Returns whether there is one.
    pub(super) fn read(
        &mut self,
        queue: &mut VirtQueue,
        mem: &GuestView,
    ) -> Result<bool, DeviceError> {
        let Some(chain) = queue.pop(mem)? else { return Ok(false) };
        let values = parse(&chain.readable, mem);
        self.latest = values.map_err(|fault| queue.chain_error(fault))?;
        queue.undo_pop(&chain);
        let available = queue.available(mem)?;
        queue.notify_after(mem, available).map(|()| true)
    }

    /// Empties the descriptor, after an event of it.
    pub(super) fn acknowledge(&self) {
        self.timer.acknowledge();
    }
}

/// Asks the driver for newer statistics.
pub(super) fn ask(queue: &mut VirtQueue, mem: &GuestView) -> Result<(), DeviceError> {
    // Without a buffer the driver has not answered the last time yet.
    let Some(chain) = queue.pop(mem)? else { return Ok(()) };
    queue.push_used(mem, &chain, 0)
}

impl AsFd for Statistics {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }
}
