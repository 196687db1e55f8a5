//! Balloon device (virtio 1.2, 5.5), for free page reporting alone.
//!
//! The balloon itself stays empty: the device never asks for a page. What it is for is the reporting
//! queue, in which the guest names ranges of memory that it does not use; their owner gives them back to
//! the host, and from then on they read as zeros.
//!
//! Linux turns reporting off when it wants freed pages to hold something (`init_on_free`, page poisoning)
//! unless the device also offers `VIRTIO_BALLOON_F_PAGE_POISON`; then it tells what they are to hold. With
//! `init_on_free` that is zero, just what reported pages hold afterwards. With anything else
//! the device acknowledges reports and gives nothing back, which the specification allows (5.5.6.7).

use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;

use super::chain::{ChainFault, Segment};
use super::device::{DeviceContext, DeviceError, RestoreDeviceError, VirtioDevice};
use super::state::{BalloonState, DeviceState};

/// `VIRTIO_BALLOON_F_PAGE_POISON`: the driver says what free pages hold.
const PAGE_POISON: u32 = 4;
/// `VIRTIO_BALLOON_F_REPORTING`: the driver reports free pages.
const REPORTING: u32 = 5;

/// Linux gives up on reporting below 32, and uses no more.
const QUEUE_SIZE: u16 = 128;
/// Queues for inflating and deflating come first. The specification puts two optional ones, which this device
/// does not offer, before the reporting queue; drivers count only those that are there.
const REPORTING_QUEUE: usize = 2;

/// Bytes of a page.
const PAGE: u64 = 4096;

/// Offsets in `struct virtio_balloon_config` (5.5.4), the registers that the driver writes.
const ACTUAL: u64 = 4;
const POISON: u64 = 12;

/// Takes guest memory back that the guest says it does not use.
pub(crate) trait PageDiscard: Send {
    /// Gives the `len` bytes at guest-physical `addr` back to the host, so that they read as zeros and cost
    /// nothing until they are written. Both are multiples of 4096, and the range lies in guest memory.
    ///
    /// # Errors
    /// Nothing, or only a part, was given back. The guest loses nothing by it.
    fn discard(&self, addr: u64, len: u64) -> std::io::Result<()>;
}

/// What free page reporting gave back, since the monitor started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BalloonCounters {
    /// Bytes given back.
    pub(crate) discarded: u64,
    /// Ranges that could not be given back.
    pub(crate) failures: u64,
}

/// A balloon that is never inflated; see the module.
#[derive(Debug)]
pub(crate) struct Balloon<P> {
    pages: P,
    /// Written by the driver and of no meaning here; it may read it again.
    actual: u32,
    poison: u32,
    counters: BalloonCounters,
}

impl<P: PageDiscard> Balloon<P> {
    /// A device that hands reported ranges to `pages`.
    pub(crate) fn new(pages: P) -> Self {
        Self { pages, actual: 0, poison: 0, counters: BalloonCounters::default() }
    }

    /// What was given back so far.
    #[cfg(test)]
    pub(crate) fn counters(&self) -> BalloonCounters {
        self.counters
    }

    fn report(&mut self, segment: Segment) -> Result<(), ChainFault> {
        let (addr, len) = (segment.addr.0, u64::from(segment.len));
        if !addr.is_multiple_of(PAGE) || !len.is_multiple_of(PAGE) {
            return Err(ChainFault::Unsuitable { addr, len: segment.len });
        }
        match self.pages.discard(addr, len) {
            Ok(()) => self.counters.discarded += len,
            Err(_) => self.counters.failures += 1,
        }
        Ok(())
    }
}

impl<P: PageDiscard> VirtioDevice for Balloon<P> {
    fn id(&self) -> u32 {
        VIRTIO_ID_BALLOON
    }

    fn features(&self) -> u64 {
        1 << REPORTING | 1 << PAGE_POISON
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE; 3]
    }

    fn config(&self) -> Vec<u8> {
        // `num_pages`, the size wished for, is none, ever; the third is for a feature that is not offered.
        [0, self.actual, 0, self.poison].into_iter().flat_map(u32::to_le_bytes).collect()
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
        let poisoned = context.features & 1 << PAGE_POISON != 0 && self.poison != 0;
        let gives_back =
            index == REPORTING_QUEUE && context.features & 1 << REPORTING != 0 && !poisoned;
        let Some(queue) = context.queues.get_mut(index) else { return Ok(()) };
        while let Some(chain) = queue.pop(context.mem)? {
            if gives_back {
                for segment in chain.writable.segments() {
                    self.report(*segment).map_err(|fault| queue.chain_error(fault))?;
                }
            }
            queue.push_used(context.mem, &chain, 0)?;
        }
        Ok(())
    }

    fn reset(&mut self) {
        self.actual = 0;
        self.poison = 0;
    }

    fn save(&self) -> DeviceState {
        DeviceState::Balloon(BalloonState { actual: self.actual, poison: self.poison })
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

#[cfg(test)]
#[path = "balloon_tests.rs"]
mod tests;
