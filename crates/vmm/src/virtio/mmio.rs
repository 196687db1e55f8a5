//! The MMIO transport (virtio 1.2, 4.2) of one device.

use std::io;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use thiserror::Error;
use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_ACKNOWLEDGE, VIRTIO_CONFIG_S_DRIVER, VIRTIO_CONFIG_S_DRIVER_OK,
    VIRTIO_CONFIG_S_FAILED, VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET,
    VIRTIO_F_VERSION_1,
};
use virtio_bindings::virtio_mmio::{
    VIRTIO_MMIO_CONFIG, VIRTIO_MMIO_CONFIG_GENERATION, VIRTIO_MMIO_DEVICE_FEATURES,
    VIRTIO_MMIO_DEVICE_FEATURES_SEL, VIRTIO_MMIO_DEVICE_ID, VIRTIO_MMIO_DRIVER_FEATURES,
    VIRTIO_MMIO_DRIVER_FEATURES_SEL, VIRTIO_MMIO_INT_CONFIG, VIRTIO_MMIO_INT_VRING,
    VIRTIO_MMIO_INTERRUPT_ACK, VIRTIO_MMIO_INTERRUPT_STATUS, VIRTIO_MMIO_MAGIC_VALUE,
    VIRTIO_MMIO_QUEUE_AVAIL_HIGH, VIRTIO_MMIO_QUEUE_AVAIL_LOW, VIRTIO_MMIO_QUEUE_DESC_HIGH,
    VIRTIO_MMIO_QUEUE_DESC_LOW, VIRTIO_MMIO_QUEUE_NOTIFY, VIRTIO_MMIO_QUEUE_NUM,
    VIRTIO_MMIO_QUEUE_NUM_MAX, VIRTIO_MMIO_QUEUE_READY, VIRTIO_MMIO_QUEUE_SEL,
    VIRTIO_MMIO_QUEUE_USED_HIGH, VIRTIO_MMIO_QUEUE_USED_LOW, VIRTIO_MMIO_SHM_BASE_HIGH,
    VIRTIO_MMIO_SHM_BASE_LOW, VIRTIO_MMIO_SHM_LEN_HIGH, VIRTIO_MMIO_SHM_LEN_LOW,
    VIRTIO_MMIO_STATUS, VIRTIO_MMIO_VENDOR_ID, VIRTIO_MMIO_VERSION,
};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::QueueT;
use vm_memory::GuestAddress;

use firn_memory::GuestView;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::counters::TransportCounters;
use super::device::{DeviceContext, VirtioDevice};
use super::error::{DeviceError, RestoreDeviceError};
use super::queue::VirtQueue;
use super::state::TransportState;

/// "virt", little-endian.
const MAGIC: u32 = 0x7472_6976;
/// The version of modern devices.
const VERSION: u32 = 2;
/// "firn", little-endian. Drivers ignore it.
const VENDOR: u32 = 0x6e72_6966;
/// Identifies the event loop's events of [`VirtioDevice::event_source`]; queues use their indices.
const DEVICE_EVENT: u32 = u32::MAX;

const TRANSPORT_FEATURES: u64 = 1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_EVENT_IDX;

/// The steps of device initialisation (virtio 1.2, 3.1.1), in their order.
const STEPS: [u32; 4] = [
    VIRTIO_CONFIG_S_ACKNOWLEDGE,
    VIRTIO_CONFIG_S_DRIVER,
    VIRTIO_CONFIG_S_FEATURES_OK,
    VIRTIO_CONFIG_S_DRIVER_OK,
];
/// Every bit that a driver may set.
const DRIVER_STATUS: u32 = VIRTIO_CONFIG_S_ACKNOWLEDGE
    | VIRTIO_CONFIG_S_DRIVER
    | VIRTIO_CONFIG_S_FEATURES_OK
    | VIRTIO_CONFIG_S_DRIVER_OK
    | VIRTIO_CONFIG_S_FAILED;

/// Why a device cannot be created.
#[derive(Debug, Error)]
pub enum NewDeviceError {
    /// The size of a queue is invalid: a defect of firn.
    #[error("a queue of {size} descriptors is invalid")]
    Queue {
        /// The size.
        size: u16,
        /// Why it is invalid.
        source: virtio_queue::Error,
    },
    /// The event descriptor of a queue's notifications cannot be created.
    #[error("cannot create an event descriptor for a queue")]
    EventFd(#[source] io::Error),
}

/// A device and its MMIO transport.
///
/// The owner shares it as `Arc<Mutex<VirtioMmio<…>>>`: the event loop subscribes to it, and vCPU
/// threads call it for the guest's accesses to the register window. Each queue has an event
/// descriptor that KVM signals when the guest writes the queue's index to [`VirtioMmio::NOTIFY`].
///
/// A guest may access any register in any order and width, and may write anything to its queues.
/// Invalid accesses are ignored. An invalid queue or request stops the device: the status register
/// then reports that it needs a reset, a configuration interrupt notifies the guest, and the device
/// does nothing until the reset.
///
/// A restore calls [`VirtioMmio::restore`] before the vCPUs run, then [`VirtioMmio::kick_all`] once
/// the interrupt is connected.
#[derive(Debug)]
pub(crate) struct VirtioMmio<D: VirtioDevice + ?Sized = dyn VirtioDevice> {
    mem: GuestView,
    queues: Vec<VirtQueue>,
    notifications: Vec<EventFd>,
    interrupt: EventFd,
    status: u32,
    interrupt_status: u32,
    driver_features: u64,
    device_features_sel: u32,
    driver_features_sel: u32,
    queue_sel: u32,
    /// Counts the device's changes of its configuration space, modulo 2^32.
    config_generation: u32,
    error: Option<DeviceError>,
    counters: TransportCounters,
    device: D,
}

impl<D: VirtioDevice> VirtioMmio<D> {
    /// A transport for `device`, which signals `interrupt` to interrupt the guest.
    ///
    /// # Errors
    /// See [`NewDeviceError`].
    pub(crate) fn new(
        device: D,
        mem: GuestView,
        interrupt: EventFd,
    ) -> Result<Self, NewDeviceError> {
        let mut queues = Vec::new();
        let mut notifications = Vec::new();
        for (index, size) in (0..).zip(device.queue_sizes().iter().copied()) {
            queues.push(
                VirtQueue::new(index, size)
                    .map_err(|source| NewDeviceError::Queue { size, source })?,
            );
            notifications
                .push(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(NewDeviceError::EventFd)?);
        }
        Ok(Self {
            mem,
            queues,
            notifications,
            interrupt,
            status: 0,
            interrupt_status: 0,
            driver_features: 0,
            device_features_sel: 0,
            driver_features_sel: 0,
            queue_sel: 0,
            config_generation: 0,
            error: None,
            counters: TransportCounters::default(),
            device,
        })
    }
}

impl<D: VirtioDevice + ?Sized> VirtioMmio<D> {
    /// Offset of the notification register, to which the guest writes a queue's index, 4 bytes.
    pub(crate) const NOTIFY: u64 = 0x50;

    /// The event descriptors of the queues' notifications, by the queues' indices.
    #[must_use]
    pub(crate) fn notifications(&self) -> &[EventFd] {
        &self.notifications
    }

    /// The device itself.
    #[must_use]
    pub(crate) fn device(&self) -> &D {
        &self.device
    }

    /// Changes the device in a way that its configuration space does not show.
    pub(crate) fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// Changes the device and its configuration space, and interrupts its driver (4.2.3.4).
    pub(crate) fn configure(&mut self, change: impl FnOnce(&mut D)) {
        change(&mut self.device);
        self.config_generation = self.config_generation.wrapping_add(1);
        self.notify_of_configuration();
    }

    /// Why the device stopped, if it did. A reset by the driver clears it.
    #[must_use]
    pub(crate) fn error(&self) -> Option<&DeviceError> {
        self.error.as_ref()
    }

    /// What the transport has done.
    pub(crate) fn counters(&self) -> &TransportCounters {
        &self.counters
    }

    /// Handles a read of `data.len()` bytes at byte `offset` of the window.
    pub(crate) fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let Some(offset) = offset.checked_sub(u64::from(VIRTIO_MMIO_CONFIG)) {
            let config = self.device.config();
            let rest = usize::try_from(offset).ok().and_then(|offset| config.get(offset..));
            let rest = rest.unwrap_or_default();
            self.counters.config_failures += u64::from(rest.len() < data.len());
            for (to, from) in data.iter_mut().zip(rest) {
                *to = *from;
            }
        } else if data.len() == 4 {
            data.copy_from_slice(&self.register(offset).to_le_bytes());
        }
    }

    /// Handles a write of `data` at byte `offset` of the window.
    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) {
        if let Some(offset) = offset.checked_sub(u64::from(VIRTIO_MMIO_CONFIG)) {
            let end = usize::try_from(offset).ok().and_then(|at| at.checked_add(data.len()));
            let is_inside = end.is_some_and(|end| end <= self.device.config().len());
            self.counters.config_failures += u64::from(!is_inside);
            self.device.write_config(offset, data);
        } else if let Ok(value) = data.try_into().map(u32::from_le_bytes) {
            self.set_register(offset, value);
        }
    }

    /// Serves every queue as after a notification, and raises an interrupt again that the guest has
    /// not acknowledged: a snapshot contains no notifications and interrupts in flight.
    pub(crate) fn kick_all(&mut self) {
        for queue in 0..self.queues.len() {
            self.serve(queue);
        }
        if self.interrupt_status != 0 {
            self.signal();
        }
    }

    /// The device's part of the machine state. The vCPUs must be paused.
    #[must_use]
    pub(crate) fn save(&self) -> TransportState {
        TransportState {
            status: self.status,
            interrupt_status: self.interrupt_status,
            driver_features: self.driver_features,
            device_features_sel: self.device_features_sel,
            driver_features_sel: self.driver_features_sel,
            queue_sel: self.queue_sel,
            config_generation: self.config_generation,
            queues: self.queues.iter().map(VirtQueue::save).collect(),
            device: self.device.save(),
        }
    }

    /// Restores the state of an equal device. Guest memory must have the content of the save.
    ///
    /// # Errors
    /// See [`RestoreDeviceError`]. The device must not be used afterwards.
    pub(crate) fn restore(&mut self, state: &TransportState) -> Result<(), RestoreDeviceError> {
        // The device first, because its errors are the most specific.
        let works = works(state.status);
        self.device.restore(&state.device, works)?;
        if state.queues.len() != self.queues.len() {
            return Err(RestoreDeviceError::QueueCount {
                offered: self.queues.len(),
                saved: state.queues.len(),
            });
        }
        // Before the negotiation ends, a driver may have written any value.
        let agreed = state.status & VIRTIO_CONFIG_S_FEATURES_OK != 0;
        let missing = state.driver_features & !self.offered_features();
        if agreed && missing != 0 {
            return Err(RestoreDeviceError::Features { missing });
        }
        let running = state.status & VIRTIO_CONFIG_S_DRIVER_OK != 0;
        if state.status & !(DRIVER_STATUS | VIRTIO_CONFIG_S_NEEDS_RESET) != 0
            || (running && !agreed)
        {
            return Err(RestoreDeviceError::Status { status: state.status });
        }
        self.status = state.status;
        self.interrupt_status = state.interrupt_status;
        self.driver_features = state.driver_features;
        self.device_features_sel = state.device_features_sel;
        self.driver_features_sel = state.driver_features_sel;
        self.queue_sel = state.queue_sel;
        self.config_generation = state.config_generation;
        for (index, (queue, saved)) in (0..).zip(self.queues.iter_mut().zip(&state.queues)) {
            queue.restore(*saved)?;
            if works && !queue.enable(saved.event_idx, &self.mem) {
                return Err(RestoreDeviceError::QueueOutside { queue: index });
            }
        }
        Ok(())
    }

    fn offered_features(&self) -> u64 {
        self.device.features() | TRANSPORT_FEATURES
    }

    fn register(&self, offset: u64) -> u32 {
        let Ok(offset) = u32::try_from(offset) else { return 0 };
        match offset {
            VIRTIO_MMIO_MAGIC_VALUE => MAGIC,
            VIRTIO_MMIO_VERSION => VERSION,
            VIRTIO_MMIO_DEVICE_ID => self.device.id(),
            VIRTIO_MMIO_VENDOR_ID => VENDOR,
            VIRTIO_MMIO_DEVICE_FEATURES => half(self.offered_features(), self.device_features_sel),
            VIRTIO_MMIO_QUEUE_NUM_MAX => {
                self.selected().map_or(0, |queue| u32::from(queue.max_size()))
            }
            VIRTIO_MMIO_QUEUE_READY => self.selected().map_or(0, |queue| u32::from(queue.ready())),
            VIRTIO_MMIO_INTERRUPT_STATUS => self.interrupt_status,
            VIRTIO_MMIO_STATUS => self.status,
            // All ones: there is no shared memory region (4.2.2).
            VIRTIO_MMIO_SHM_LEN_LOW
            | VIRTIO_MMIO_SHM_LEN_HIGH
            | VIRTIO_MMIO_SHM_BASE_LOW
            | VIRTIO_MMIO_SHM_BASE_HIGH => u32::MAX,
            VIRTIO_MMIO_CONFIG_GENERATION => self.config_generation,
            // Write-only registers, and those of legacy devices.
            _ => 0,
        }
    }

    fn set_register(&mut self, offset: u64, value: u32) {
        let Ok(offset) = u32::try_from(offset) else { return };
        match offset {
            VIRTIO_MMIO_DEVICE_FEATURES_SEL => self.device_features_sel = value,
            VIRTIO_MMIO_DRIVER_FEATURES_SEL => self.driver_features_sel = value,
            VIRTIO_MMIO_DRIVER_FEATURES => self.accept_features(value),
            VIRTIO_MMIO_QUEUE_SEL => self.queue_sel = value,
            VIRTIO_MMIO_QUEUE_NOTIFY => {
                if let Some(event) = index(value).and_then(|index| self.notifications.get(index)) {
                    notify(event);
                }
            }
            VIRTIO_MMIO_INTERRUPT_ACK => self.interrupt_status &= !value,
            VIRTIO_MMIO_STATUS => self.set_status(value),
            _ => self.set_up_queue(offset, value),
        }
    }

    fn accept_features(&mut self, value: u32) {
        let negotiating = VIRTIO_CONFIG_S_DRIVER;
        if self.status & (negotiating | VIRTIO_CONFIG_S_FEATURES_OK) != negotiating {
            return;
        }
        let value = u64::from(value);
        match self.driver_features_sel {
            0 => self.driver_features = self.driver_features & !0xffff_ffff | value,
            1 => self.driver_features = self.driver_features & 0xffff_ffff | value << 32,
            _ => {}
        }
    }

    fn selected(&self) -> Option<&VirtQueue> {
        index(self.queue_sel).and_then(|index| self.queues.get(index))
    }

    /// Sets a register of the selected queue. The driver may do so between feature negotiation and
    /// start, while the queue is not ready (4.2.3.2).
    fn set_up_queue(&mut self, offset: u32, value: u32) {
        let phase = VIRTIO_CONFIG_S_FEATURES_OK | VIRTIO_CONFIG_S_DRIVER_OK;
        if self.status & (phase | VIRTIO_CONFIG_S_NEEDS_RESET) != VIRTIO_CONFIG_S_FEATURES_OK {
            return;
        }
        let Some(queue) = index(self.queue_sel).and_then(|index| self.queues.get_mut(index)) else {
            return;
        };
        let ring = queue.setup();
        if offset == VIRTIO_MMIO_QUEUE_READY {
            ring.set_ready(value == 1);
            return;
        }
        if ring.ready() {
            return;
        }
        let low = |address: u64| GuestAddress(address & !0xffff_ffff | u64::from(value));
        let high = |address: u64| GuestAddress(address & 0xffff_ffff | u64::from(value) << 32);
        let set = match offset {
            VIRTIO_MMIO_QUEUE_NUM => {
                // A size that does not fit becomes 0, which is refused like any other invalid size.
                ring.try_set_size(u16::try_from(value).unwrap_or(0))
            }
            VIRTIO_MMIO_QUEUE_DESC_LOW => ring.try_set_desc_table_address(low(ring.desc_table())),
            VIRTIO_MMIO_QUEUE_DESC_HIGH => ring.try_set_desc_table_address(high(ring.desc_table())),
            VIRTIO_MMIO_QUEUE_AVAIL_LOW => ring.try_set_avail_ring_address(low(ring.avail_ring())),
            VIRTIO_MMIO_QUEUE_AVAIL_HIGH => {
                ring.try_set_avail_ring_address(high(ring.avail_ring()))
            }
            VIRTIO_MMIO_QUEUE_USED_LOW => ring.try_set_used_ring_address(low(ring.used_ring())),
            VIRTIO_MMIO_QUEUE_USED_HIGH => ring.try_set_used_ring_address(high(ring.used_ring())),
            _ => Ok(()),
        };
        if set.is_err() {
            self.fail_setup();
        }
    }

    fn fail_setup(&mut self) {
        let queue = u16::try_from(self.queue_sel).unwrap_or(u16::MAX);
        self.fail(DeviceError::Setup { queue });
    }

    fn set_status(&mut self, value: u32) {
        if value == 0 {
            self.reset();
            return;
        }
        // Only a reset clears bits (2.1.1).
        if self.status & DRIVER_STATUS & !value != 0 {
            return;
        }
        if value & VIRTIO_CONFIG_S_FAILED != 0 {
            self.status |= VIRTIO_CONFIG_S_FAILED;
            self.queues.iter_mut().for_each(VirtQueue::disable);
        }
        for (step, bit) in STEPS.into_iter().enumerate() {
            let before: u32 = STEPS[..step].iter().sum();
            let refused = self.status & before != before
                || (bit == VIRTIO_CONFIG_S_FEATURES_OK && !self.features_fit());
            if value & bit == 0 || self.status & bit != 0 || refused {
                continue;
            }
            self.status |= bit;
            if bit == VIRTIO_CONFIG_S_DRIVER_OK {
                self.start();
            }
        }
    }

    /// Whether the driver is a modern one and accepted only offered features.
    fn features_fit(&self) -> bool {
        self.driver_features & !self.offered_features() == 0
            && self.driver_features & 1 << VIRTIO_F_VERSION_1 != 0
    }

    fn start(&mut self) {
        if !works(self.status) {
            return;
        }
        let event_idx = self.driver_features & 1 << VIRTIO_RING_F_EVENT_IDX != 0;
        for (index, queue) in (0..).zip(&mut self.queues) {
            if !queue.enable(event_idx, &self.mem) {
                self.fail(DeviceError::Setup { queue: index });
                return;
            }
        }
    }

    fn reset(&mut self) {
        self.queues.iter_mut().for_each(VirtQueue::reset);
        self.status = 0;
        self.interrupt_status = 0;
        self.driver_features = 0;
        self.device_features_sel = 0;
        self.driver_features_sel = 0;
        self.queue_sel = 0;
        self.error = None;
        self.device.reset();
    }

    /// Stops the device until the driver resets it (2.1.2).
    fn fail(&mut self, error: DeviceError) {
        self.queues.iter_mut().for_each(VirtQueue::disable);
        self.device.reset();
        if matches!(error, DeviceError::Setup { .. } | DeviceError::Watch(_)) {
            self.counters.setup_failures += 1;
        }
        self.error = Some(error);
        self.status |= VIRTIO_CONFIG_S_NEEDS_RESET;
        self.notify_of_configuration();
    }

    fn notify_of_configuration(&mut self) {
        if self.status & VIRTIO_CONFIG_S_DRIVER_OK != 0 {
            self.interrupt_status |= VIRTIO_MMIO_INT_CONFIG;
            self.signal();
        }
    }

    fn signal(&self) {
        notify(&self.interrupt);
    }

    fn count_notification(&mut self, index: usize) {
        let Some(queue) = self.queues.get_mut(index) else { return };
        let is_of_guest = !std::mem::take(&mut queue.is_self_notified);
        let Some(counters) = self.counters.queues.get_mut(index).filter(|_| is_of_guest) else {
            return;
        };
        counters.notifications += 1;
        let is_empty = queue.is_enabled() && matches!(queue.pending(&self.mem), Ok(0));
        counters.empty_notifications += u64::from(is_empty);
    }

    /// A turn of the device for a queue.
    fn serve(&mut self, queue: usize) {
        let succeeded = self.turn(|device, context| device.process_queue(queue, context));
        if let Some(counters) = self.counters.queues.get_mut(queue) {
            counters.failures += u64::from(!succeeded);
        }
    }

    /// One turn of the device: its work, then the interrupt for the guest. Returns false if the
    /// device stopped.
    fn turn(
        &mut self,
        work: impl FnOnce(&mut D, &mut DeviceContext<'_>) -> Result<(), DeviceError>,
    ) -> bool {
        self.queues.iter_mut().for_each(VirtQueue::begin);
        let mut context = DeviceContext {
            mem: &self.mem,
            queues: &mut self.queues,
            features: self.driver_features,
        };
        let mut interrupt = false;
        let done = work(&mut self.device, &mut context).and_then(|()| {
            for (queue, event) in self.queues.iter_mut().zip(&self.notifications) {
                interrupt |= queue.needs_interrupt(&self.mem)?;
                if queue.unfinished() {
                    queue.is_self_notified = true;
                    notify(event);
                }
            }
            Ok(())
        });
        if interrupt {
            self.interrupt_status |= VIRTIO_MMIO_INT_VRING;
            self.signal();
        }
        let succeeded = done.is_ok();
        if let Err(error) = done {
            self.fail(error);
        }
        succeeded
    }
}

impl<D: VirtioDevice + ?Sized> MutEventSubscriber for VirtioMmio<D> {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        let mut added = (0..)
            .zip(&self.notifications)
            .try_for_each(|(index, event)| ops.add(Events::with_data(event, index, EventSet::IN)));
        if let (Ok(()), Some(source)) = (&added, self.device.event_source()) {
            added = ops.add(Events::with_data(&source, DEVICE_EVENT, EventSet::IN));
        }
        if let Err(error) = added {
            self.fail(DeviceError::Watch(error));
        }
    }

    fn process(&mut self, events: Events, _: &mut EventOps<'_>) {
        if events.data() == DEVICE_EVENT {
            self.counters.events += 1;
            let succeeded = self.turn(D::process_event);
            self.counters.event_failures += u64::from(!succeeded);
        } else if let Some(queue) = index(events.data())
            && let Some(event) = self.notifications.get(queue)
        {
            // The value of the counter does not matter. It is empty if the event was already read.
            let _ = event.read();
            self.count_notification(queue);
            self.serve(queue);
        }
    }
}

/// Whether the driver has started and neither side has failed.
fn works(status: u32) -> bool {
    let failed = VIRTIO_CONFIG_S_FAILED | VIRTIO_CONFIG_S_NEEDS_RESET;
    status & (VIRTIO_CONFIG_S_DRIVER_OK | failed) == VIRTIO_CONFIG_S_DRIVER_OK
}

/// The 32 of 64 feature bits that a selector selects.
fn half(features: u64, selector: u32) -> u32 {
    let shifted = if selector < 2 { features >> (32 * selector) } else { 0 };
    u32::try_from(shifted & 0xffff_ffff).unwrap_or(0)
}

fn index(register: u32) -> Option<usize> {
    usize::try_from(register).ok()
}

fn notify(event: &EventFd) {
    // The write fails only when the counter is full; the other side has pending events then.
    let _ = event.write(1);
}

#[cfg(test)]
#[path = "mmio_tests.rs"]
mod tests;
