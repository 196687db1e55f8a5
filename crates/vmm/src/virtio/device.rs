//! What a device is to its transport.

use std::os::fd::BorrowedFd;

use firn_memory::GuestView;
use thiserror::Error;

use super::chain::ChainFault;
use super::queue::VirtQueue;
use super::state::DeviceState;

/// A virtio device behind a [`VirtioMmio`](super::VirtioMmio), which calls it under its lock.
pub(crate) trait VirtioDevice: Send {
    /// The device's number in virtio 1.2, chapter 5.
    fn id(&self) -> u32;

    /// Feature bits of this kind of device; the transport adds its own.
    fn features(&self) -> u64;

    /// Largest size of each queue, in descriptors: powers of two.
    fn queue_sizes(&self) -> &[u16];

    /// The device's configuration space, from its beginning; what lies behind reads as zeros.
    fn config(&self) -> Vec<u8>;

    /// The driver writes `data` at byte `offset` of the configuration space. Most have nothing that a
    /// driver may write.
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    /// Serves the queue that the driver notified the device of.
    ///
    /// # Errors
    /// The guest broke the rules; the device is stopped until its driver resets it.
    fn process_queue(
        &mut self,
        queue: usize,
        context: &mut DeviceContext<'_>,
    ) -> Result<(), DeviceError>;

    /// A descriptor that becomes readable when the device has something to do of its own accord.
    fn event_source(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Serves [`VirtioDevice::event_source`]. The driver may not have started, so queues may be empty.
    ///
    /// # Errors
    /// The guest broke the rules; the device is stopped until its driver resets it.
    fn process_event(&mut self, _context: &mut DeviceContext<'_>) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Forgets everything that the driver told the device.
    fn reset(&mut self);

    /// The device's part of the machine state.
    fn save(&self) -> DeviceState;

    /// Takes over what an equal device saved; `running` says whether its driver had started.
    ///
    /// # Errors
    /// The state is not one of this device.
    fn restore(&mut self, state: &DeviceState, running: bool) -> Result<(), RestoreDeviceError>;
}

/// What a device works with during one turn.
#[derive(Debug)]
pub(crate) struct DeviceContext<'a> {
    /// The guest's memory.
    pub(crate) mem: &'a GuestView,
    /// The device's queues, by index.
    pub(crate) queues: &'a mut [VirtQueue],
    /// Feature bits that driver and device agreed on.
    pub(crate) features: u64,
}

/// Why a device stopped: it serves nothing more until its driver resets it.
#[derive(Debug, Error)]
pub(crate) enum DeviceError {
    /// A request breaks the rules.
    #[error("the guest's driver sent a bad request in queue {queue}")]
    Chain {
        /// Index of the queue.
        queue: u16,
        /// How it breaks them.
        #[source]
        fault: ChainFault,
    },
    /// A queue breaks the rules.
    #[error("the guest's driver broke queue {queue}")]
    Ring {
        /// Index of the queue.
        queue: u16,
        /// How.
        #[source]
        error: virtio_queue::Error,
    },
    /// A queue was set up over addresses that are not guest memory, misaligned, or of a bad size.
    #[error("the guest's driver set up queue {queue} with a bad size or address")]
    Setup {
        /// Index of the queue.
        queue: u16,
    },
    /// The host refuses random bytes.
    #[error("the host's kernel gave no random bytes")]
    Entropy(#[source] std::io::Error),
    /// A descriptor of the device could not be watched.
    #[error("the event loop does not take the device's descriptors")]
    Watch(#[source] event_manager::Error),
}

/// Why a device's saved state cannot be taken over.
#[derive(Debug, Error)]
pub enum RestoreDeviceError {
    /// It is another device's.
    #[error("the saved state belongs to another kind of device than the one with number {id}")]
    OtherDevice {
        /// Number of the device that is to be restored.
        id: u32,
    },
    /// Another number of devices.
    #[error("the microVM has {offered} devices, its saved state {saved}")]
    DeviceCount {
        /// Devices of the microVM.
        offered: usize,
        /// Devices in the state.
        saved: usize,
    },
    /// Another number of queues.
    #[error("the device has {offered} queues, its saved state {saved}")]
    QueueCount {
        /// Queues of the device.
        offered: usize,
        /// Queues in the state.
        saved: usize,
    },
    /// Another size of a queue.
    #[error("queue {queue} may have {offered} descriptors, and {saved} in the saved state")]
    QueueSize {
        /// Index of the queue.
        queue: u16,
        /// Largest size that the device offers.
        offered: u16,
        /// Largest size in the state.
        saved: u16,
    },
    /// A queue's saved registers hold what they cannot.
    #[error("queue {queue} of the saved state cannot be")]
    Queue {
        /// Index of the queue.
        queue: u16,
        /// What is wrong.
        source: virtio_queue::Error,
    },
    /// A queue's rings are not in guest memory.
    #[error("queue {queue} of the saved state lies outside of guest memory")]
    QueueOutside {
        /// Index of the queue.
        queue: u16,
    },
    /// The driver uses features that this device does not offer.
    #[error("the guest's driver uses the features {missing:#x}, which this device does not offer")]
    Features {
        /// The feature bits that are missing.
        missing: u64,
    },
    /// Status bits that no driver can have set.
    #[error("the saved device status {status:#x} cannot be")]
    Status {
        /// The status register.
        status: u32,
    },
    /// The disk is not the one that the guest had.
    #[error(
        "the guest had a disk of {saved} sectors (read-only: {saved_read_only}), now it is one of \
         {sectors} (read-only: {read_only}): give the disk that the snapshot was made with"
    )]
    OtherDisk {
        /// Sectors of 512 bytes in the state.
        saved: u64,
        /// Whether the guest could not write to it.
        saved_read_only: bool,
        /// Sectors of 512 bytes of the disk that was opened.
        sectors: u64,
        /// Whether the guest cannot write to that one.
        read_only: bool,
    },
}
