//! Balloon device (virtio 1.2, 5.5), for free page reporting only.
//!
//! The balloon itself stays empty: the device never requests a page. In the reporting queue the
//! guest reports ranges of memory that it does not use. The device discards them, and they read as
//! zeros from then on.
//!
//! Linux disables reporting if it fills free pages (`init_on_free`, page poisoning), unless the
//! device offers `VIRTIO_BALLOON_F_PAGE_POISON`; Linux then writes the fill value to the device.
//! With `init_on_free` the value is zero, which discarded pages contain. With any other value the
//! device acknowledges reports and discards nothing, as the specification permits (5.5.6.7).

use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;

use super::chain::{ChainFault, Segment};
use super::device::{DeviceContext, VirtioDevice};
use super::error::{DeviceError, RestoreDeviceError};
use super::state::{BalloonState, DeviceState};

/// `VIRTIO_BALLOON_F_PAGE_POISON`: the driver writes the fill value of free pages.
const PAGE_POISON: u32 = 4;
/// `VIRTIO_BALLOON_F_REPORTING`: the driver reports free pages.
const REPORTING: u32 = 5;

/// Linux disables reporting below 32, and uses no more.
const QUEUE_SIZE: u16 = 128;
/// The queues for inflating and deflating precede it. The specification has two more optional
/// queues before the reporting queue, which this device does not offer and drivers therefore do not
/// count.
const REPORTING_QUEUE: usize = 2;

/// Bytes of a page.
const PAGE: u64 = 4096;

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
    fn discard(&self, addr: u64, len: u64) -> std::io::Result<()>;
}

/// The work of free page reporting since the monitor started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BalloonCounters {
    /// Bytes discarded.
    pub(crate) discarded: u64,
    /// Ranges that could not be discarded.
    pub(crate) failures: u64,
}

/// A balloon that is never inflated.
#[derive(Debug)]
pub(crate) struct Balloon<P> {
    pages: P,
    /// Written by the driver, which may read it again. The device does not use it.
    actual: u32,
    poison: u32,
    counters: BalloonCounters,
}

impl<P: PageDiscard> Balloon<P> {
    /// A device that passes reported ranges to `pages`.
    pub(crate) fn new(pages: P) -> Self {
        Self { pages, actual: 0, poison: 0, counters: BalloonCounters::default() }
    }

    /// The work so far.
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
        // `num_pages`, the requested size, is always 0; the third belongs to a feature that is not
        // offered.
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
        let discards =
            index == REPORTING_QUEUE && context.features & 1 << REPORTING != 0 && !poisoned;
        let Some(queue) = context.queues.get_mut(index) else { return Ok(()) };
        while let Some(chain) = queue.pop(context.mem)? {
            if discards {
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
