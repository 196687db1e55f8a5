//! Virtio devices over MMIO: block, vsock, entropy, balloon.
//!
//! Virtio 1.2, modern devices only. [`VirtioMmio`] is one device behind its register window; it owns
//! the device's queues and is shared, in a mutex, between the vCPU threads (registers) and the event
//! loop (queues, sockets). Guests are hostile: see [`VirtioMmio`] for what becomes of one that breaks
//! the rules. `docs/reference/devices.md` says which features are offered, and why.

mod balloon;
mod block;
mod chain;
mod device;
#[cfg(test)]
mod hostile_tests;
mod mmio;
mod queue;
mod rng;
#[cfg(test)]
mod sealed_tests;
mod state;
#[cfg(test)]
mod testing;
mod vsock;

pub use balloon::{Balloon, BalloonCounters, PageDiscard};
pub use block::{
    Block, Disk, DiskCounters, OpenDiskError, OverlayContent, OverlayDisk, ReadOnlyDisk,
};
pub use chain::{Buffers, Chain, ChainFault};
pub use device::{DeviceContext, DeviceError, RestoreDeviceError, VirtioDevice};
pub use mmio::{NewDeviceError, VirtioMmio};
pub use queue::VirtQueue;
pub use rng::Rng;
pub use state::{
    BalloonState, BlockState, DeviceState, QueueRegisters, TransportState, VsockState,
};
pub use vsock::{BindVsockError, Vsock, VsockListener};
