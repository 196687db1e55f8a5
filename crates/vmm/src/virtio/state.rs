//! The devices' part of a snapshot's machine state.
//!
//! Any change to a struct here changes the format of the machine state and requires a new version.

use firn_net::NetworkState;
use serde::{Deserialize, Serialize};
use virtio_queue::QueueState;

/// A device and its transport.
///
/// Any change here requires a new version of the machine state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TransportState {
    /// The device status register.
    pub(crate) status: u32,
    /// The interrupt status register.
    pub(crate) interrupt_status: u32,
    /// Feature bits that the driver accepted.
    pub(crate) driver_features: u64,
    /// Selects 32 bits of the device's features.
    pub(crate) device_features_sel: u32,
    /// Selects 32 bits of the driver's features.
    pub(crate) driver_features_sel: u32,
    /// The selected queue.
    pub(crate) queue_sel: u32,
    /// The generation of the configuration space.
    pub(crate) config_generation: u32,
    /// The queues, by index.
    pub(crate) queues: Vec<QueueRegisters>,
    /// State of this kind of device.
    pub(crate) device: DeviceState,
}

/// One queue: the addresses of its rings, and the device's positions in them.
///
/// Any change here requires a new version of the machine state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct QueueRegisters {
    /// The most descriptors that the device offers.
    pub(crate) max_size: u16,
    /// The number of descriptors that the driver chose.
    pub(crate) size: u16,
    /// Whether the driver finished the setup.
    pub(crate) ready: bool,
    /// Whether both sides use event indices.
    pub(crate) event_idx: bool,
    /// Next entry of the available ring.
    pub(crate) next_avail: u16,
    /// Next entry of the used ring.
    pub(crate) next_used: u16,
    /// Guest-physical address of the descriptor table.
    pub(crate) desc_table: u64,
    /// Guest-physical address of the available ring.
    pub(crate) avail_ring: u64,
    /// Guest-physical address of the used ring.
    pub(crate) used_ring: u64,
}

/// State of one kind of device.
///
/// Any change here requires a new version of the machine state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum DeviceState {
    /// Of a [`Block`](super::Block).
    Block(BlockState),
    /// Of a [`Rng`](super::Rng), which has no state.
    Rng,
    /// Of a [`Balloon`](super::Balloon).
    Balloon(BalloonState),
    /// Of a [`Vsock`](super::Vsock).
    Vsock(VsockState),
    /// Of a [`Net`](super::Net).
    Net(NetState),
    /// Of a [`Vsock`](super::Vsock) without connections; since version 4 of the machine state.
    QuietVsock(VsockState),
}

impl DeviceState {
    /// The kind of device, for messages, and as the id of a device of which a guest has one.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Block(_) => "drive",
            Self::Rng => "entropy",
            Self::Balloon(_) => "balloon",
            Self::Vsock(_) | Self::QuietVsock(_) => "vsock",
            Self::Net(_) => "network",
        }
    }
}

/// The network device.
///
/// Any change here requires a new version of the machine state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NetState {
    /// The guest's address.
    pub(crate) mac: [u8; 6],
    /// The largest packet that the guest sends and receives, bytes.
    pub(crate) mtu: u16,
    /// Its TCP connections, which are reset after a thaw.
    pub(crate) flows: NetworkState,
}

/// The socket device. A snapshot does not contain connections.
///
/// Any change here requires a new version of the machine state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct VsockState {
    /// The guest's context id.
    pub(crate) cid: u32,
    /// The host's port of the next connection from the host.
    pub(crate) next_port: u32,
}

/// The balloon.
///
/// Any change here requires a new version of the machine state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BalloonState {
    /// The driver's number of pages in the balloon.
    pub(crate) actual: u32,
    /// The byte that fills free pages, repeated four times.
    pub(crate) poison: u32,
    /// The number of pages that the host wants in it.
    pub(crate) target: u32,
    /// Whether the guest takes pages back before it runs out of memory.
    pub(crate) deflate_on_oom: bool,
    /// Whether the guest tells how it uses its memory.
    pub(crate) statistics: bool,
    /// Whether the guest reports free pages.
    pub(crate) reporting: bool,
}

/// The properties of a disk. The snapshot stores its content separately.
///
/// Any change here requires a new version of the machine state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BlockState {
    /// Sectors of 512 bytes.
    pub(crate) sectors: u64,
    /// Whether the guest cannot write.
    pub(crate) read_only: bool,
    /// The disk's name to the guest, padded with zeros.
    pub(crate) serial: [u8; 20],
}

impl From<QueueState> for QueueRegisters {
    fn from(state: QueueState) -> Self {
        Self {
            max_size: state.max_size,
            size: state.size,
            ready: state.ready,
            event_idx: state.event_idx_enabled,
            next_avail: state.next_avail,
            next_used: state.next_used,
            desc_table: state.desc_table,
            avail_ring: state.avail_ring,
            used_ring: state.used_ring,
        }
    }
}

impl From<QueueRegisters> for QueueState {
    fn from(registers: QueueRegisters) -> Self {
        Self {
            max_size: registers.max_size,
            next_avail: registers.next_avail,
            next_used: registers.next_used,
            event_idx_enabled: registers.event_idx,
            size: registers.size,
            ready: registers.ready,
            desc_table: registers.desc_table,
            avail_ring: registers.avail_ring,
            used_ring: registers.used_ring,
        }
    }
}
