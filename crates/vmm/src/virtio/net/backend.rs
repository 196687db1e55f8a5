//! The host's side of a network device.

use std::fmt::Debug;
use std::io;
use std::ops::AddAssign;
use std::os::fd::BorrowedFd;

use firn_net::NetworkState;
use rustix::event::epoll::EventFlags;

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

    /// What a snapshot keeps of it. The guest does not run.
    fn save(&self) -> NetworkState {
        NetworkState::default()
    }

    /// Goes on from what a snapshot has kept.
    fn restore(&mut self, _state: &NetworkState) {}
}

/// What a network device has done since the monitor started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NetworkCounters {
    /// Frames to the guest.
    pub(crate) to_guest: Traffic,
    /// Frames from the guest.
    pub(crate) from_guest: Traffic,
}

/// Frames in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Traffic {
    /// Frames that arrived.
    pub(crate) frames: u64,
    /// Their bytes.
    pub(crate) bytes: u64,
    /// Frames that did not: the guest's buffers were too small, the frame too large, or the host
    /// refused it.
    pub(crate) dropped: u64,
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
