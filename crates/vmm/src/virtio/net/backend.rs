//! The host's side of a network device.

use std::fmt::Debug;
use std::io;
use std::ops::AddAssign;
use std::os::fd::BorrowedFd;

use firn_net::NetworkState;
use rustix::event::epoll::EventFlags;

use super::super::rate_limiter::LimiterCounters;
use crate::counters::Timed;

/// Where a guest's frames go, and where frames for it come from.
///
/// A packet is a frame with `struct virtio_net_hdr_v1` before it (virtio 1.2, 5.1.6). The guest may
/// write anything in both. Nothing here blocks.
pub(crate) trait NetworkBackend: Send + Debug {
    /// The driver accepted these features. Packets for it may need no others.
    ///
    /// # Errors
    /// The host's interface does not support them.
    fn start(&mut self, features: u64) -> io::Result<()>;

    /// At most two descriptors that are readable when there is something to do, each with how to
    /// wait for it: `ET` where what was left undone is no event.
    fn event_sources(&self) -> Vec<(BorrowedFd<'_>, EventFlags)>;

    /// Does what the events are about.
    fn poll(&mut self) {}

    /// The next packet for the guest, the same until it is [`taken`](NetworkBackend::taken).
    fn packet(&mut self) -> Option<&mut [u8]>;

    /// Drops the packet.
    fn taken(&mut self);

    /// Takes packets that the guest has sent together, none of which is shorter than its header.
    /// Returns their frames.
    fn transmit(&mut self, packets: &[&[u8]]) -> Traffic;

    /// What it has done.
    fn counters(&self) -> BackendCounters {
        BackendCounters::default()
    }

    /// What a snapshot keeps of it. The guest does not run.
    fn save(&self) -> NetworkState {
        NetworkState::default()
    }

    /// Goes on from what a snapshot has kept.
    fn restore(&mut self, _state: &NetworkState) {}
}

/// What a network device has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NetworkCounters {
    /// Frames to the guest.
    pub to_guest: Traffic,
    /// Frames from the guest.
    pub from_guest: Traffic,
    /// Dropped frames from the guest that were larger than any frame is.
    pub oversized: u64,
    /// Frames from the guest with another source address than its own.
    pub spoofed: u64,
    /// Turns at which a frame waited and the guest had no buffer for it.
    pub buffer_waits: u64,
    /// Frames from the guest that waited when another one was taken, again at each.
    pub remaining: u64,
    /// The limiter of frames to the guest, if there is one.
    pub to_guest_limiter: LimiterCounters,
    /// The limiter of frames from the guest, if there is one.
    pub from_guest_limiter: LimiterCounters,
    /// Events of the host's side.
    pub events: u64,
    /// The host's side.
    pub backend: BackendCounters,
}

/// What the host's side of a network has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BackendCounters {
    /// Writes to a tap device.
    pub writes: Timed,
    /// Reads of a tap device that failed.
    pub read_failures: u64,
    /// The guest's metadata service.
    pub metadata: firn_net::Counters,
}

/// Frames in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Frames that arrived.
    pub frames: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Frames that did not: the guest's buffers were too small, the frame too large, or the host
    /// refused it.
    pub dropped: u64,
}

impl AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
        self.frames += other.frames;
        self.bytes += other.bytes;
        self.dropped += other.dropped;
    }
}

impl Traffic {
    /// Counts a frame of `bytes`.
    pub(super) fn count(&mut self, bytes: u64, arrived: bool) {
        if arrived {
            self.frames += 1;
            self.bytes += bytes;
        } else {
            self.dropped += 1;
        }
    }
}
