//! Virtio devices over MMIO: block, vsock, entropy, balloon, network.
//!
//! Virtio 1.2, modern devices only. [`VirtioMmio`] is one device behind its register window. It
//! owns the device's queues. A mutex shares it between the vCPU threads (registers) and the event
//! loop (queues, sockets). Guests are hostile: [`VirtioMmio`] describes what happens if one
//! violates the specification. `docs/reference/devices.md` lists the offered features with their
//! reasons.

mod balloon;
mod block;
mod chain;
mod counters;
#[cfg(test)]
mod cow_tests;
mod device;
mod error;
#[cfg(test)]
mod hostile_tests;
mod mmio;
mod net;
mod queue;
mod rate_limiter;
mod rng;
mod state;
#[cfg(test)]
mod testing;
mod timer;
mod vsock;

pub(crate) use balloon::{Balloon, PageDiscard};
pub use balloon::{BalloonConfig, BalloonCounters, BalloonStatistics};
pub(crate) use block::{Block, Disk, OverlayDisk, ReadOnlyDisk, WritableDisk};
pub use block::{DiskCache, DiskCounters, OpenDiskError, is_in_memory, scratch_file};
pub use counters::{QueueCounters, TransportCounters};
pub(crate) use device::VirtioDevice;
pub(crate) use error::RestoreDeviceError;
pub(crate) use mmio::{NewDeviceError, VirtioMmio};
pub(crate) use net::Net;
#[cfg(test)]
pub(crate) use net::NetworkBackend;
pub use net::{
    BackendCounters, Metadata, Network, NetworkConfig, NetworkCounters, NetworkEnd, OpenTapError,
    Traffic, open_tap,
};
pub use rate_limiter::{LimiterCounters, RateLimit, RateLimiter, TokenBucket};
pub use rng::EntropyCounters;
pub(crate) use rng::Rng;
pub(crate) use state::{
    BalloonState, BlockState, DeviceState, NetState, QueueRegisters, TransportState, VsockState,
};
pub(crate) use vsock::Vsock;
pub use vsock::{BindVsockError, VsockBroker, VsockConnector, VsockCounters, VsockListener};
