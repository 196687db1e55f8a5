//! One queue of a device, with limits on the work of one turn.

use std::sync::atomic::{Ordering, fence};

use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress};

use firn_base::num::u64_of;
use firn_memory::GuestView;

use super::chain::{Chain, ChainFault};
use super::error::{DeviceError, RestoreDeviceError};
use super::rate_limiter::RateLimiter;
use super::state::QueueRegisters;

/// Bytes of buffers after which a device yields the event loop.
const BYTES_PER_TURN: u64 = 32 << 20;

/// A split virtqueue (virtio 1.2, 2.7).
///
/// A turn of the device takes at most as many chains as the queue has descriptors, and stops soon
/// after 32 MiB of buffers, so that a guest that keeps refilling its queue cannot block the event
/// loop. A later turn takes the rest.
#[derive(Debug)]
pub(crate) struct VirtQueue {
    index: u16,
    queue: Queue,
    enabled: bool,
    chains_left: u16,
    bytes_left: u64,
    unfinished: bool,
    used: bool,
    /// Entries of the used ring when the turn began, modulo 2^16.
    used_before: u16,
    /// Whether the device has notified itself of the rest of a turn.
    pub(crate) is_self_notified: bool,
}

impl VirtQueue {
    pub(crate) fn new(index: u16, max_size: u16) -> Result<Self, virtio_queue::Error> {
        Ok(Self {
            index,
            queue: Queue::new(max_size)?,
            enabled: false,
            chains_left: 0,
            bytes_left: 0,
            unfinished: false,
            used: false,
            used_before: 0,
            is_self_notified: false,
        })
    }

    /// The registers that the transport sets up.
    pub(crate) fn setup(&mut self) -> &mut Queue {
        &mut self.queue
    }

    pub(crate) fn max_size(&self) -> u16 {
        self.queue.max_size()
    }

    pub(crate) fn ready(&self) -> bool {
        self.queue.ready()
    }

    /// Enables the queue if the driver set it up; returns false if the setup is invalid.
    pub(crate) fn enable(&mut self, event_idx: bool, mem: &GuestView) -> bool {
        self.queue.set_event_idx(event_idx);
        self.enabled = self.queue.ready() && self.queue.is_valid(mem);
        self.enabled || !self.queue.ready()
    }

    /// Whether the driver uses the queue.
    pub(crate) fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// The number of descriptors that the driver chose.
    pub(crate) fn size(&self) -> u16 {
        self.queue.size()
    }

    pub(crate) fn disable(&mut self) {
        self.enabled = false;
    }

    pub(crate) fn reset(&mut self) {
        self.queue.reset();
        self.enabled = false;
    }

    /// Starts a turn of the device.
    pub(crate) fn begin(&mut self) {
        self.chains_left = self.queue.size();
        self.bytes_left = BYTES_PER_TURN;
        self.unfinished = false;
        self.used = false;
        self.used_before = self.queue.next_used();
    }

    /// Whether the turn ended with requests left.
    pub(crate) fn unfinished(&self) -> bool {
        self.unfinished
    }

    /// Asks for another turn.
    pub(crate) fn set_unfinished(&mut self) {
        self.unfinished = true;
    }

    /// Whether the driver requires an interrupt for the used entries of this turn (virtio 1.2,
    /// 2.7.7.2). virtio_queue counts only entries that it wrote itself.
    pub(crate) fn needs_interrupt(&mut self, mem: &GuestView) -> Result<bool, DeviceError> {
        if !self.used || !self.queue.event_idx_enabled() {
            return Ok(self.used);
        }
        // The entries are visible before the driver's wish is read.
        fence(Ordering::SeqCst);
        let offset = 4 + 2 * u64::from(self.queue.size());
        let addr = GuestAddress(self.queue.avail_ring().saturating_add(offset));
        let wish: u16 = mem
            .load(addr, Ordering::Relaxed)
            .map_err(|error| self.ring_error(virtio_queue::Error::GuestMemory(error)))?;
        let (now, after) = (self.queue.next_used(), u16::from_le(wish));
        Ok(now.wrapping_sub(after).wrapping_sub(1) < now.wrapping_sub(self.used_before))
    }

    /// The driver's next request; `None` if there is none or the turn's limit is reached. If there
    /// is none, the driver will notify the device of the next one.
    ///
    /// # Errors
    /// The queue or the request is invalid.
    pub(crate) fn pop(&mut self, mem: &GuestView) -> Result<Option<Chain>, DeviceError> {
        if !self.enabled {
            return Ok(None);
        }
        // The second check finds a request that arrived while notifications were being enabled.
        // There is no third check, because the guest can change the ring's index at any time.
        for _ in 0..2 {
            if self.chains_left == 0 || self.bytes_left == 0 {
                break;
            }
            let next = match self.queue.iter(mem) {
                Ok(mut available) => available.next(),
                Err(error) => return Err(self.ring_error(error)),
            };
            if let Some(descriptors) = next {
                let chain = Chain::parse(mem, descriptors, self.queue.size())
                    .map_err(|fault| self.chain_error(fault))?;
                self.chains_left -= 1;
                let bytes = u64_of(chain.readable.len() + chain.writable.len());
                self.bytes_left = self.bytes_left.saturating_sub(bytes);
                return Ok(Some(chain));
            }
            match self.queue.enable_notification(mem) {
                Ok(true) => {}
                Ok(false) => return Ok(None),
                Err(error) => return Err(self.ring_error(error)),
            }
        }
        self.unfinished = true;
        Ok(None)
    }

    /// Undoes the last [`VirtQueue::pop`], which returned a chain.
    pub(crate) fn undo_pop(&mut self, chain: &Chain) {
        self.queue.go_to_previous_position();
        self.chains_left = self.chains_left.saturating_add(1);
        let bytes = u64_of(chain.readable.len() + chain.writable.len());
        self.bytes_left = self.bytes_left.saturating_add(bytes);
    }

    /// Returns a chain to the driver, with `written` bytes in its writable buffers.
    ///
    /// # Errors
    /// The queue is invalid.
    pub(crate) fn push_used(
        &mut self,
        mem: &GuestView,
        chain: &Chain,
        written: usize,
    ) -> Result<(), DeviceError> {
        self.push_used_together(mem, &[(chain.head(), written)])
    }

    /// Returns chains, by their heads and the bytes written to each, all of which the driver sees
    /// at the same moment.
    ///
    /// # Errors
    /// The queue is invalid.
    pub(crate) fn push_used_together(
        &mut self,
        mem: &GuestView,
        chains: &[(u16, usize)],
    ) -> Result<(), DeviceError> {
        let Some(((last, written), earlier)) = chains.split_last() else { return Ok(()) };
        let len = |written: usize| u32::try_from(written).unwrap_or(u32::MAX);
        for (head, written) in earlier {
            let next = self.queue.next_used();
            let slot = u64::from(next % self.queue.size().max(1));
            let addr = self.queue.used_ring().saturating_add(4 + 8 * slot);
            let entry = u64::from(*head) | u64::from(len(*written)) << 32;
            mem.write_obj(entry.to_le(), GuestAddress(addr))
                .map_err(|error| self.ring_error(virtio_queue::Error::GuestMemory(error)))?;
            self.queue.set_next_used(next.wrapping_add(1));
        }
        // Publishes the index of all.
        let added = self.queue.add_used(mem, *last, len(*written));
        added.map_err(|error| self.ring_error(error))?;
        self.used = true;
        Ok(())
    }

    /// The index up to which the driver has made requests available, modulo 2^16.
    ///
    /// # Errors
    /// The ring is outside guest memory.
    pub(crate) fn available(&self, mem: &GuestView) -> Result<u16, DeviceError> {
        let index = self.queue.avail_idx(mem, Ordering::Acquire);
        index.map(|index| index.0).map_err(|error| self.ring_error(error))
    }

    /// The number of requests that the driver has made available and the device has not taken. The
    /// driver may write any index; there are at most as many as the queue has descriptors.
    ///
    /// # Errors
    /// The ring is outside guest memory.
    pub(crate) fn pending(&self, mem: &GuestView) -> Result<u16, DeviceError> {
        if !self.enabled {
            return Ok(0);
        }
        let pending = self.available(mem)?.wrapping_sub(self.queue.next_avail());
        Ok(pending.min(self.queue.size()))
    }

    /// Whether the next request, if there is one, need not wait for a limiter.
    ///
    /// # Errors
    /// The ring is outside guest memory.
    pub(crate) fn is_allowed(
        &self,
        mem: &GuestView,
        limiter: Option<&mut RateLimiter>,
    ) -> Result<bool, DeviceError> {
        // Without a request, `pop` enables the driver's notifications.
        limiter.map_or(Ok(true), |limiter| Ok(self.pending(mem)? == 0 || limiter.allows()))
    }

    /// Requests a notification for the request with the index `after`, even while earlier ones are
    /// pending.
    ///
    /// # Errors
    /// The ring is outside guest memory.
    pub(crate) fn notify_after(&mut self, mem: &GuestView, after: u16) -> Result<(), DeviceError> {
        if !self.queue.event_idx_enabled() {
            return self
                .queue
                .enable_notification(mem)
                .map(|_| ())
                .map_err(|error| self.ring_error(error));
        }
        // virtio_queue supports this only for the request after the last one taken. `avail_event`
        // follows the used ring: virtio 1.2, 2.7.8.
        let offset = 4 + 8 * u64::from(self.queue.size());
        let addr = GuestAddress(self.queue.used_ring().saturating_add(offset));
        mem.store(after.to_le(), addr, Ordering::SeqCst)
            .map_err(|error| self.ring_error(virtio_queue::Error::GuestMemory(error)))
    }

    /// An error about a chain of this queue.
    pub(crate) fn chain_error(&self, fault: ChainFault) -> DeviceError {
        DeviceError::Chain { queue: self.index, fault }
    }

    fn ring_error(&self, error: virtio_queue::Error) -> DeviceError {
        DeviceError::Ring { queue: self.index, error }
    }

    pub(crate) fn save(&self) -> QueueRegisters {
        self.queue.state().into()
    }

    pub(crate) fn restore(&mut self, state: QueueRegisters) -> Result<(), RestoreDeviceError> {
        let state: virtio_queue::QueueState = state.into();
        if state.max_size != self.queue.max_size() {
            return Err(RestoreDeviceError::QueueSize {
                queue: self.index,
                offered: self.queue.max_size(),
                saved: state.max_size,
            });
        }
        self.queue = Queue::try_from(state)
            .map_err(|source| RestoreDeviceError::Queue { queue: self.index, source })?;
        Ok(())
    }
}
