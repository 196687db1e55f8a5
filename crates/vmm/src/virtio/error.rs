//! Why a device stops, and why its saved state cannot be restored.

use thiserror::Error;

use super::chain::ChainFault;

/// Why a device stopped. It serves nothing until its driver resets it.
#[derive(Debug, Error)]
pub(crate) enum DeviceError {
    /// A request is invalid.
    #[error("the guest's driver sent an invalid request in queue {queue}")]
    Chain {
        /// Index of the queue.
        queue: u16,
        /// Why it is invalid.
        #[source]
        fault: ChainFault,
    },
    /// A queue is invalid.
    #[error("queue {queue} of the guest's driver is invalid")]
    Ring {
        /// Index of the queue.
        queue: u16,
        /// Why it is invalid.
        #[source]
        error: virtio_queue::Error,
    },
    /// A queue has an invalid size, or an address that is misaligned or outside guest memory.
    #[error("the guest's driver set up queue {queue} with an invalid size or address")]
    Setup {
        /// Index of the queue.
        queue: u16,
    },
    /// The host returns no random bytes.
    #[error("cannot read random bytes from the host's kernel")]
    Entropy(#[source] std::io::Error),
    /// The backend of a network device refuses what the driver negotiated.
    #[error("the host's side of the network cannot do what the guest's driver negotiated")]
    Network(#[source] std::io::Error),
    /// A descriptor of the device cannot be polled.
    #[error("cannot add the device's descriptors to the event loop")]
    Watch(#[source] event_manager::Error),
}

/// Why a device's saved state cannot be restored.
#[derive(Debug, Error)]
pub enum RestoreDeviceError {
    /// The state belongs to another kind of device.
    #[error("the saved state does not belong to a device with number {id}")]
    OtherDevice {
        /// Number of the device to restore.
        id: u32,
    },
    /// The number of devices differs.
    #[error("the microVM has {offered} devices, and its saved state has {saved}")]
    DeviceCount {
        /// Devices of the microVM.
        offered: usize,
        /// Devices in the state.
        saved: usize,
    },
    /// A device has another id.
    #[error("the microVM has device {offered} where its saved state has {saved}")]
    OtherId {
        /// Id of the microVM's device.
        offered: String,
        /// Id in the state.
        saved: String,
    },
    /// The number of queues differs.
    #[error("the device has {offered} queues, and its saved state has {saved}")]
    QueueCount {
        /// Queues of the device.
        offered: usize,
        /// Queues in the state.
        saved: usize,
    },
    /// The maximum size of a queue differs.
    #[error("queue {queue} has at most {offered} descriptors, and {saved} in the saved state")]
    QueueSize {
        /// Index of the queue.
        queue: u16,
        /// Maximum size that the device offers.
        offered: u16,
        /// Maximum size in the state.
        saved: u16,
    },
    /// A queue's saved registers are invalid.
    #[error("the saved state of queue {queue} is invalid")]
    Queue {
        /// Index of the queue.
        queue: u16,
        /// Why they are invalid.
        source: virtio_queue::Error,
    },
    /// A queue's rings are outside guest memory.
    #[error("queue {queue} of the saved state is outside guest memory")]
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
    /// The status bits are invalid.
    #[error("the saved device status {status:#x} is invalid")]
    Status {
        /// The status register.
        status: u32,
    },
    /// The disk is not the guest's disk.
    #[error(
        "the guest had a disk of {saved} sectors (read-only: {saved_read_only}), and this disk has \
         {sectors} (read-only: {read_only}): use the disk that the snapshot was made with"
    )]
    OtherDisk {
        /// Sectors of 512 bytes in the state.
        saved: u64,
        /// Whether the saved disk is read-only.
        saved_read_only: bool,
        /// Sectors of 512 bytes of the open disk.
        sectors: u64,
        /// Whether the open disk is read-only.
        read_only: bool,
    },
}
