//! Network device (virtio 1.2, 5.1): Ethernet frames between the guest and a [`NetworkBackend`].

mod backend;
mod metadata;
mod proxy;
mod tap;

use std::io;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use firn_base::num::u64_of;
use firn_memory::GuestView;
use firn_net::{GuestNetwork, MAX_FLOWS, MetadataConfig, MetadataStore, PendingResets};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::time::Timespec;
use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6,
    VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_MAC, VIRTIO_NET_F_MRG_RXBUF,
    VIRTIO_NET_F_MTU, VIRTIO_NET_F_STATUS, VIRTIO_NET_S_LINK_UP,
};

use super::chain::{Chain, ChainFault};
use super::device::{DeviceContext, VirtioDevice};
use super::error::{DeviceError, RestoreDeviceError};
use super::queue::VirtQueue;
use super::rate_limiter::{LimiterCounters, RateLimit, RateLimiter};
use super::state::{DeviceState, NetState};

pub(crate) use backend::NetworkBackend;
pub use backend::{BackendCounters, NetworkCounters, Traffic};
use metadata::Intercepted;
use proxy::UserNetwork;
use tap::Tap;
pub use tap::{OpenTapError, open_tap};

/// Frames to the guest, frames from the guest.
const QUEUE_SIZES: [u16; 2] = [256, 256];

/// Bytes of `struct virtio_net_hdr_v1`, which precedes each frame (5.1.6).
pub(super) const HEADER_LEN: usize = 12;
/// Where the header has the number of chains, little-endian.
const NUM_BUFFERS: usize = 10;
/// Where a frame has its source address.
const SOURCE: Range<usize> = 6..12;
/// Bytes of the largest frame, which segmentation offload splits: an IP packet of 64 KiB, less one
/// byte, with an Ethernet header and a VLAN tag.
const MAX_FRAME: usize = 65_535 + 18;
/// Bytes of the largest packet: a frame and its header.
pub(super) const MAX_PACKET: usize = HEADER_LEN + MAX_FRAME;

/// Identify the events of the host's side, and of the timers of the limiters.
const HOST: u64 = 0;
const TO_GUEST: u64 = 1;
const FROM_GUEST: u64 = 2;

/// Bytes of packets from the guest after which a burst ends.
const BURST: usize = 256 << 10;

/// Frames for which the guest has no buffers that are dropped in one turn.
const MAX_DROPPED: u32 = 256;

/// Checksums and segmentation that one side leaves to the other, in both directions. Every backend
/// takes and makes such frames.
const OFFLOADS: u64 = 1 << VIRTIO_NET_F_CSUM
    | 1 << VIRTIO_NET_F_HOST_TSO4
    | 1 << VIRTIO_NET_F_HOST_TSO6
    | 1 << VIRTIO_NET_F_GUEST_CSUM
    | 1 << VIRTIO_NET_F_GUEST_TSO4
    | 1 << VIRTIO_NET_F_GUEST_TSO6;

/// The guest's side of a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkConfig {
    /// The guest's Ethernet address.
    pub mac: [u8; 6],
    /// The largest packet that the guest sends and receives, bytes.
    pub mtu: u16,
}

impl Default for NetworkConfig {
    /// The device of the user-mode network ([`GuestNetwork`]), which all clones can share.
    fn default() -> Self {
        let GuestNetwork { mac, mtu, .. } = GuestNetwork::default();
        Self { mac, mtu }
    }
}

/// The host's side of a network.
#[derive(Debug, Default)]
pub struct Network {
    /// Where frames go. Without it and without metadata the guest sees a device without a link.
    pub end: Option<NetworkEnd>,
    /// The guest's metadata service, before `end`.
    pub metadata: Option<Metadata>,
    /// Limits frames to the guest.
    pub to_guest: Option<RateLimiter>,
    /// Limits frames from the guest.
    pub from_guest: Option<RateLimiter>,
    /// Reports when a thawed guest has handled the resets of its connections.
    pub resets: PendingResets,
}

/// Where a guest's frames go.
#[derive(Debug)]
pub enum NetworkEnd {
    /// To a tap device: see [`open_tap`].
    Tap(OwnedFd),
    /// To the sockets of a [`Broker`](firn_net::Broker), of which this is the monitor's end.
    Proxy(OwnedFd),
}

impl NetworkEnd {
    /// The most sockets of the host that it has at once.
    pub(crate) const fn most_sockets(&self) -> usize {
        match self {
            Self::Tap(_) => 0,
            Self::Proxy(_) => MAX_FLOWS,
        }
    }
}

/// A metadata service.
#[derive(Clone, Debug)]
pub struct Metadata {
    /// How the guest reaches it.
    pub config: MetadataConfig,
    /// The document, which devices can share and its owner can change while they run.
    pub store: MetadataStore,
}

/// A network interface of the guest.
///
/// Frames that the backend has for the guest wait there while the guest has no buffers for them. A
/// freeze drops what the device holds, as any network may; what it saves of the connections is
/// without that.
#[derive(Debug)]
pub(crate) struct Net {
    config: NetworkConfig,
    backend: Option<Box<dyn NetworkBackend>>,
    to_guest: Option<RateLimiter>,
    from_guest: Option<RateLimiter>,
    /// The backend's events, and the limiters' timers.
    epoll: OwnedFd,
    /// The features of the driver that the backend knows.
    negotiated: Option<u64>,
    counters: NetworkCounters,
    /// Packets from the guest that were sent together.
    burst: Vec<u8>,
}

impl Net {
    /// A device.
    ///
    /// # Errors
    /// The MTU is too small for the backend, or a descriptor cannot be created.
    pub(crate) fn new(config: NetworkConfig, network: Network) -> io::Result<Self> {
        let Network { end, metadata, to_guest, from_guest, resets } = network;
        let mut backend: Option<Box<dyn NetworkBackend>> = match end {
            Some(NetworkEnd::Tap(tap)) => Some(Box::new(Tap::new(tap))),
            Some(NetworkEnd::Proxy(broker)) => {
                Some(Box::new(UserNetwork::new(config, broker, resets)?))
            }
            None => None,
        };
        if let Some(metadata) = metadata {
            let address = metadata.config.address;
            let service = UserNetwork::metadata(config, metadata)?;
            backend = Some(Box::new(Intercepted::new(address, service, backend)));
        }
        Self::with_backend(config, backend, to_guest, from_guest)
    }

    /// The same with any backend.
    pub(super) fn with_backend(
        config: NetworkConfig,
        backend: Option<Box<dyn NetworkBackend>>,
        to_guest: Option<RateLimiter>,
        from_guest: Option<RateLimiter>,
    ) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let add = |source: BorrowedFd<'_>, flags, number| {
            epoll::add(&epoll, source, EventData::new_u64(number), EventFlags::IN | flags)
        };
        if let Some(backend) = &backend {
            for (source, flags) in backend.event_sources() {
                add(source, flags, HOST)?;
            }
        }
        for (limiter, number) in [(&to_guest, TO_GUEST), (&from_guest, FROM_GUEST)] {
            if let Some(limiter) = limiter {
                add(limiter.as_fd(), EventFlags::ET, number)?;
            }
        }
        let (negotiated, counters, burst) = (None, NetworkCounters::default(), Vec::new());
        Ok(Self { config, backend, to_guest, from_guest, epoll, negotiated, counters, burst })
    }

    /// Changes the limits of frames to and from the guest, of a device that has limiters; returns
    /// whether it has those that are to be changed.
    pub(crate) fn set_limits(&mut self, to: Option<RateLimit>, from: Option<RateLimit>) -> bool {
        let mut pairs = [(&mut self.to_guest, to), (&mut self.from_guest, from)];
        if pairs.iter().any(|(limiter, limit)| limiter.is_none() && limit.is_some()) {
            return false;
        }
        for (limiter, limit) in &mut pairs {
            limiter.iter_mut().zip(*limit).for_each(|(limiter, limit)| limiter.set(limit));
        }
        true
    }

    /// What it has done.
    pub(crate) fn counters(&self) -> NetworkCounters {
        let backend = self.backend.as_ref().map(|backend| backend.counters()).unwrap_or_default();
        NetworkCounters {
            to_guest_limiter: LimiterCounters::of(self.to_guest.as_ref()),
            from_guest_limiter: LimiterCounters::of(self.from_guest.as_ref()),
            backend,
            ..self.counters
        }
    }

    /// Passes the guest's frames to the backend.
    fn transmit(&mut self, mem: &GuestView, queue: &mut VirtQueue) -> Result<(), DeviceError> {
        let Self { config, backend, from_guest, counters, burst, .. } = self;
        loop {
            let (mut lens, mut filled) = (Vec::new(), 0);
            while filled < BURST
                && queue.is_allowed(mem, from_guest.as_mut())?
                && let Some(chain) = queue.pop(mem)?
            {
                counters.remaining += u64::from(queue.pending(mem)?);
                let len = chain.readable.len();
                let Some(frame) = len.checked_sub(HEADER_LEN) else {
                    let fault = ChainFault::TooShort { needed: HEADER_LEN, found: len };
                    return Err(queue.chain_error(fault));
                };
                if len <= MAX_PACKET && backend.is_some() {
                    let start = filled;
                    filled += len;
                    burst.resize(filled.max(burst.len()), 0);
                    let read = chain.readable.read_at(mem, 0, &mut burst[start..filled]);
                    read.map_err(|fault| queue.chain_error(fault))?;
                    let source = burst[start + HEADER_LEN..filled].get(SOURCE);
                    let is_other = source.is_some_and(|source| source != config.mac.as_slice());
                    counters.spoofed += u64::from(is_other);
                    lens.push(len);
                } else {
                    counters.from_guest.count(u64_of(frame), false);
                    counters.oversized += u64::from(len > MAX_PACKET);
                }
                from_guest.iter_mut().for_each(|limiter| limiter.take(u64_of(frame)));
                queue.push_used(mem, &chain, 0)?;
            }
            if let Some(backend) = backend {
                let mut rest = burst.as_slice();
                let packets = lens.into_iter().map(|len| {
                    let (packet, after) = rest.split_at(len);
                    rest = after;
                    packet
                });
                counters.from_guest += backend.transmit(&packets.collect::<Vec<_>>());
            }
            if filled < BURST {
                return Ok(());
            }
        }
    }

    /// Passes the backend's frames to the guest while it has buffers. A `merges`ing driver takes a
    /// frame in several chains.
    fn receive(
        &mut self,
        mem: &GuestView,
        queue: &mut VirtQueue,
        merges: bool,
    ) -> Result<(), DeviceError> {
        let Self { backend, to_guest, counters, .. } = self;
        let Some(backend) = backend else { return Ok(()) };
        let mut dropped = 0;
        while let Some(packet) = backend.packet()
            && to_guest.as_mut().is_none_or(RateLimiter::allows)
        {
            let frame = u64_of(packet.len().saturating_sub(HEADER_LEN));
            let delivered = match Room::find(mem, queue, packet.len(), merges)? {
                Room::Chains(chains) => {
                    let filled = fill(mem, packet, &chains);
                    let used = filled.map_err(|fault| queue.chain_error(fault))?;
                    queue.push_used_together(mem, &used)?;
                    true
                }
                Room::Later => {
                    counters.buffer_waits += 1;
                    break;
                }
                Room::Never if dropped == MAX_DROPPED => {
                    // The others are dropped in later turns.
                    queue.set_unfinished();
                    break;
                }
                Room::Never => {
                    dropped += 1;
                    false
                }
            };
            counters.to_guest.count(frame, delivered);
            to_guest.iter_mut().for_each(|limiter| limiter.take(frame));
            backend.taken();
        }
        Ok(())
    }

    fn turn(&mut self, context: &mut DeviceContext<'_>) -> Result<(), DeviceError> {
        let [receive, transmit] = context.queues else { return Ok(()) };
        // A driver that has not started has agreed to nothing.
        if receive.is_enabled()
            && let Some(backend) = &mut self.backend
            && self.negotiated != Some(context.features)
        {
            backend.start(context.features).map_err(DeviceError::Network)?;
            self.negotiated = Some(context.features);
        }
        self.transmit(context.mem, transmit)?;
        let merges = context.features & 1 << VIRTIO_NET_F_MRG_RXBUF != 0;
        self.receive(context.mem, receive, merges)
    }
}

/// Buffers of the guest for a packet.
enum Room {
    /// Taken from the queue.
    Chains(Vec<Chain>),
    /// The guest will offer more.
    Later,
    /// The guest has no buffers as large as this.
    Never,
}

impl Room {
    /// Finds `len` bytes. Unless it does, the queue is as before.
    fn find(
        mem: &GuestView,
        queue: &mut VirtQueue,
        len: usize,
        merges: bool,
    ) -> Result<Self, DeviceError> {
        let (mut chains, mut room) = (Vec::new(), 0);
        let missing = loop {
            let Some(chain) = queue.pop(mem)? else { break Self::Later };
            room += chain.writable.len();
            chains.push(chain);
            if room >= len {
                return Ok(Self::Chains(chains));
            }
            if !merges || chains.len() == usize::from(queue.size()) {
                break Self::Never;
            }
        };
        chains.iter().rev().for_each(|chain| queue.undo_pop(chain));
        Ok(missing)
    }
}

/// Copies a packet to chains, and returns their heads and the bytes in each.
fn fill(
    mem: &GuestView,
    packet: &mut [u8],
    chains: &[Chain],
) -> Result<Vec<(u16, usize)>, ChainFault> {
    let count = u16::try_from(chains.len()).unwrap_or(u16::MAX);
    packet[NUM_BUFFERS..HEADER_LEN].copy_from_slice(&count.to_le_bytes());
    let mut rest = &*packet;
    let mut used = Vec::with_capacity(chains.len());
    for chain in chains {
        let (part, after) = rest.split_at(rest.len().min(chain.writable.len()));
        chain.writable.write_at(mem, 0, part)?;
        used.push((chain.head(), part.len()));
        rest = after;
    }
    Ok(used)
}

impl VirtioDevice for Net {
    fn id(&self) -> u32 {
        VIRTIO_ID_NET
    }

    fn features(&self) -> u64 {
        let own = [VIRTIO_NET_F_MAC, VIRTIO_NET_F_MTU, VIRTIO_NET_F_STATUS, VIRTIO_NET_F_MRG_RXBUF];
        own.iter().fold(OFFLOADS, |features, bit| features | 1 << bit)
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    /// `struct virtio_net_config` up to the MTU.
    fn config(&self) -> Vec<u8> {
        let link = self.backend.as_ref().map_or(0, |_| VIRTIO_NET_S_LINK_UP);
        let [up, down, ..] = link.to_le_bytes();
        let pairs = 1u16.to_le_bytes();
        let NetworkConfig { mac, mtu } = self.config;
        [mac.as_slice(), &[up, down], &pairs, &mtu.to_le_bytes()].concat()
    }

    fn process_queue(
        &mut self,
        _index: usize,
        context: &mut DeviceContext<'_>,
    ) -> Result<(), DeviceError> {
        self.turn(context)
    }

    fn event_source(&self) -> Option<BorrowedFd<'_>> {
        Some(self.epoll.as_fd())
    }

    fn process_event(&mut self, context: &mut DeviceContext<'_>) -> Result<(), DeviceError> {
        let mut events = [MaybeUninit::uninit(); 4];
        // Every source is looked at in any case.
        let events = epoll::wait(&self.epoll, &mut events, Some(&Timespec::default()));
        for event in events.iter().flat_map(|(events, _)| &**events) {
            match event.data.u64() {
                TO_GUEST => self.to_guest.iter_mut().for_each(RateLimiter::acknowledge),
                FROM_GUEST => self.from_guest.iter_mut().for_each(RateLimiter::acknowledge),
                _ => self.counters.events += 1,
            }
        }
        if let Some(backend) = &mut self.backend {
            backend.poll();
        }
        self.turn(context)
    }

    fn reset(&mut self) {
        self.negotiated = None;
    }

    fn save(&self) -> DeviceState {
        let NetworkConfig { mac, mtu } = self.config;
        let backend = self.backend.as_ref();
        let flows = backend.map(|backend| backend.save()).unwrap_or_default();
        DeviceState::Net(NetState { mac, mtu, flows })
    }

    fn restore(&mut self, state: &DeviceState, running: bool) -> Result<(), RestoreDeviceError> {
        match state {
            DeviceState::Net(state) if self.config == state.config() => {
                if let Some(backend) = self.backend.as_mut().filter(|_| running) {
                    backend.restore(&state.flows);
                }
                Ok(())
            }
            _ => Err(RestoreDeviceError::OtherDevice { id: self.id() }),
        }
    }
}

impl NetState {
    /// The device of this state.
    pub(crate) fn config(&self) -> NetworkConfig {
        NetworkConfig { mac: self.mac, mtu: self.mtu }
    }
}

#[cfg(test)]
mod tests;
