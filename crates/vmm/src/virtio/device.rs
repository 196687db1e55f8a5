//! The interface between a device and its transport.

use std::os::fd::BorrowedFd;

use firn_memory::GuestView;

use super::error::{DeviceError, RestoreDeviceError};
use super::queue::VirtQueue;
use super::state::DeviceState;

/// A virtio device behind a [`VirtioMmio`](super::VirtioMmio), which calls it under its lock.
pub(crate) trait VirtioDevice: Send {
    /// The device's number in virtio 1.2, chapter 5.
    fn id(&self) -> u32;

    /// Feature bits of this kind of device. The transport adds its own.
    fn features(&self) -> u64;

    /// The maximum size of each queue, in descriptors: powers of two.
    fn queue_sizes(&self) -> &[u16];

    /// The start of the device's configuration space. The bytes behind it read as zeros.
    fn config(&self) -> Vec<u8>;

    /// Handles a write of `data` at byte `offset` of the configuration space. Most devices have no
    /// writable fields.
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    /// Serves a queue after a notification.
    ///
    /// # Errors
    /// The guest violated the specification. The device stops until its driver resets it.
    fn process_queue(
        &mut self,
        queue: usize,
        context: &mut DeviceContext<'_>,
    ) -> Result<(), DeviceError>;

    /// A descriptor that becomes readable when the device has work without a notification.
    fn event_source(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Serves [`VirtioDevice::event_source`]. If the driver has not started, the queues are empty.
    ///
    /// # Errors
    /// The guest violated the specification. The device stops until its driver resets it.
    fn process_event(&mut self, _context: &mut DeviceContext<'_>) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Discards all state that the driver set.
    fn reset(&mut self);

    /// The device's part of the machine state.
    fn save(&self) -> DeviceState;

    /// Restores the state that an equal device saved. `running` is true if its driver had started.
    ///
    /// # Errors
    /// The state belongs to another device.
    fn restore(&mut self, state: &DeviceState, running: bool) -> Result<(), RestoreDeviceError>;
}

/// What a device uses during one turn.
#[derive(Debug)]
pub(crate) struct DeviceContext<'a> {
    /// The guest's memory.
    pub(crate) mem: &'a GuestView,
    /// The device's queues, by index.
    pub(crate) queues: &'a mut [VirtQueue],
    /// The negotiated feature bits.
    pub(crate) features: u64,
}
