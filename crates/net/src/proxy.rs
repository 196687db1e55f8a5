//! The proxy: frames of the guest on one side, sockets of the host on the other.

mod answers;
mod metadata;
mod publish;
mod thaw;

use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use smoltcp::wire::IpProtocol;

use crate::broker::wire::{Message, Request, SocketKind};
use crate::burst::Burst;
use crate::counters::Counters;
use crate::datagram::{DatagramFlow, Sent};
use crate::flow::{FlowKey, FlowProtocol};
use crate::frame::{Frame, Link};
use crate::header::{FrameHeader, Offloads};
use crate::icmp::{self, Unreachable};
use crate::metadata::Service;
use crate::neighbour;
use crate::network::GuestNetwork;
use crate::packet::{Dropped, IpPacket, Parsed, Segment, parse};
use crate::requests::Requests;
use crate::seq::Seq;
use crate::table::{Flow, Table};
use crate::tcp::{Shared, TcpFlow, reset_socket};

pub use thaw::PendingResets;

/// The most flows of a microVM. Each has a descriptor.
pub const MAX_FLOWS: usize = 16_384;
/// The most of them that are of datagrams. They end by time alone, so connections find the others.
const MAX_DATAGRAM_FLOWS: usize = 1024;
/// Answers that are not of a flow and wait for the guest's buffers, and their bytes.
const MAX_ANSWERS: usize = 256;
const MAX_ANSWER_BYTES: usize = 256 << 10;
/// Flows of a burst for which something is due at its end.
const MAX_IN_BURST: usize = 256;
/// The smallest buffer of the guest that is used: it holds every segment without data.
const MIN_ROOM: usize = 128;
/// Events that are handled at once, and how often.
const EVENTS: usize = 64;
const ROUNDS: usize = 64;
const BROKER: u64 = 0;
const TIMER: u64 = 1;
const DNS_PORT: u16 = 53;

/// The network of one guest.
///
/// It makes no socket: a [`Broker`](crate::Broker) passes connected ones.
#[derive(Debug)]
pub struct Proxy {
    shared: Shared,
    table: Table,
    requests: Requests,
    epoll: OwnedFd,
    /// Connections of before a thaw, which are reset first.
    thaw: thaw::Thaw,
    /// The gateway's port of the next connection to a published port.
    next_port: u16,
    answers: VecDeque<(FrameHeader, Vec<u8>)>,
    answer_bytes: usize,
    /// Flows for which something is due at the end of the burst.
    in_burst: Vec<u64>,
    frame: Frame,
    /// For the sequence numbers of new connections (RFC 6528).
    secret: RandomState,
    started: Instant,
    /// The metadata service at the gateway's address, which is all of this network if it has one.
    metadata: Option<Arc<Service>>,
}

impl Proxy {
    /// A proxy whose sockets come from the broker at the other end of `broker`.
    ///
    /// # Errors
    /// The MTU is not valid, or the epoll instance or the timer cannot be made.
    pub fn new(network: GuestNetwork, broker: OwnedFd) -> io::Result<Self> {
        if !(GuestNetwork::MIN_MTU..=GuestNetwork::MAX_MTU).contains(&network.mtu) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("an MTU of {} bytes is not between 1280 and 65520", network.mtu),
            ));
        }
        Self::with(network, Some(broker))
    }

    fn with(network: GuestNetwork, broker: Option<OwnedFd>) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let table = Table::new()?;
        if let Some(broker) = &broker {
            add(&epoll, broker, BROKER)?;
        }
        add(&epoll, table.timer(), TIMER)?;
        let secret = RandomState::new();
        let shared = Shared::new(Link { network, offloads: Offloads::default() });
        Ok(Self {
            shared,
            table,
            requests: Requests::new(broker),
            epoll,
            thaw: thaw::Thaw::default(),
            next_port: publish::first_port(&secret),
            answers: VecDeque::new(),
            answer_bytes: 0,
            in_burst: Vec::new(),
            frame: Frame::default(),
            secret,
            started: Instant::now(),
            metadata: None,
        })
    }

    /// An epoll instance that is readable when [`Proxy::poll`] has something to do.
    #[must_use]
    pub fn event_source(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Handles sockets, the broker's answers and deadlines.
    pub fn poll(&mut self) {
        let now = Instant::now();
        let mut events = [MaybeUninit::<epoll::Event>::uninit(); EVENTS];
        for _ in 0..ROUNDS {
            let waited = epoll::wait(&self.epoll, &mut events, Some(&Timespec::default()));
            let Ok((events, _)) = waited else { return };
            let count = events.len();
            for event in events {
                match event.data.u64() {
                    BROKER => self.broker_answers(now),
                    TIMER => self.expire(now),
                    id => self.socket_events(id, event.flags, now),
                }
            }
            if count < EVENTS {
                return;
            }
        }
    }

    /// Sets what the guest's driver accepts, from now on.
    pub fn set_offloads(&mut self, offloads: Offloads) {
        self.shared.link.offloads = offloads;
    }

    /// Takes the frames that the guest has ready, with partial checksums or segments as large as a
    /// packet can be. It never waits; a frame that is not valid is dropped and counted.
    ///
    /// What the frames have for one socket is written with one call.
    pub fn transmit(&mut self, frames: &[&[u8]]) {
        for (current, frame) in frames.iter().enumerate() {
            self.frame(frame, Burst::new(frames, current));
        }
        self.end_burst(Burst::new(frames, frames.len()));
    }

    fn frame(&mut self, frame: &[u8], burst: Burst<'_>) {
        let counters = &mut self.shared.counters;
        counters.frames_from_guest += 1;
        counters.bytes_from_guest += u64::try_from(frame.len()).unwrap_or(u64::MAX);
        let gateway = self.shared.link.network.gateway_mac;
        let station = self.metadata.is_none().then_some(gateway);
        let result = match parse(station, frame) {
            Ok(Parsed::Arp(arp)) if neighbour::is_guests_answer(&self.shared.link, &arp) => {
                self.thaw.answered();
                Ok(())
            }
            Ok(Parsed::Arp(arp)) => {
                let is_answered = neighbour::answer_arp(&mut self.frame, &self.shared.link, &arp);
                self.answer_if(is_answered)
            }
            Ok(Parsed::Ip(packet)) => self.ip(&packet, burst),
            Err(dropped) => Err(dropped),
        };
        let counters = &mut self.shared.counters;
        match result {
            Ok(()) => {}
            Err(Dropped::Invalid) => counters.dropped_invalid += 1,
            Err(Dropped::Fragment) => counters.dropped_fragments += 1,
            Err(Dropped::Unsupported) => counters.dropped_unsupported += 1,
        }
    }

    /// Writes what the handled frames of a burst had to the host's sockets, and removes what they
    /// acknowledged.
    fn end_burst(&mut self, burst: Burst<'_>) {
        if self.in_burst.is_empty() {
            return;
        }
        let now = Instant::now();
        for id in std::mem::take(&mut self.in_burst) {
            let Some((_, Flow::Tcp(flow))) = self.table.get_mut(id) else { continue };
            flow.end_burst(burst, &mut self.shared);
            self.table.changed(id, now, &mut self.shared);
        }
    }

    /// Whether [`Proxy::receive`] may have a frame.
    #[must_use]
    pub fn has_frames(&self) -> bool {
        self.thaw.has_frames() || !self.answers.is_empty() || self.table.has_ready()
    }

    /// The next frame to the guest, at most `room` bytes, which are at least 128. A flow has its
    /// data cut to fit; anything else that does not fit is dropped and counted.
    pub fn receive(&mut self, room: usize) -> Option<(FrameHeader, &[u8])> {
        if room < MIN_ROOM || !self.next_frame(room) {
            return None;
        }
        self.shared.counters.frames_to_guest += 1;
        let (header, frame) = self.frame.parts();
        self.shared.counters.bytes_to_guest += u64::try_from(frame.len()).unwrap_or(u64::MAX);
        Some((header, frame))
    }

    /// As [`Proxy::receive`], but exchanges `packet` for memory with the next frame in it, after
    /// [`HEADROOM`](crate::HEADROOM) bytes. Returns the frame's header and its bytes.
    pub fn receive_into(
        &mut self,
        packet: &mut Vec<u8>,
        room: usize,
    ) -> Option<(FrameHeader, usize)> {
        let received = self.receive(room).map(|(header, frame)| (header, frame.len()));
        if received.is_some() {
            self.frame.swap_memory(packet);
        }
        received
    }

    /// What was counted so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let (buffered, peak) = self.shared.pool.usage();
        let number = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
        Counters {
            flows: number(self.table.len()),
            buffered: number(buffered + self.shared.waiting),
            buffered_peak: number(peak),
            ..self.shared.counters
        }
    }

    fn ip(&mut self, packet: &IpPacket<'_>, burst: Burst<'_>) -> Result<(), Dropped> {
        if packet.protocol == IpProtocol::Icmpv6
            && neighbour::answer_ndp(&mut self.frame, &self.shared.link, packet)
        {
            return self.answer_if(true);
        }
        let to = packet.destination;
        let is_group = to.is_multicast() || to == IpAddr::V4(std::net::Ipv4Addr::BROADCAST);
        let network = &self.shared.link.network;
        if !self.is_guest(packet.source) || network.is_guest(to) || is_group {
            return Err(Dropped::Unsupported);
        }
        match packet.protocol {
            IpProtocol::Tcp => {
                let ((from_port, to_port), segment) = packet.tcp()?;
                let from = (packet.source, from_port);
                let key = FlowKey::new(FlowProtocol::Tcp, from, (to, to_port));
                self.tcp(key, &segment, burst);
                Ok(())
            }
            IpProtocol::Udp => {
                let ((from_port, to_port), payload) = packet.udp()?;
                let from = (packet.source, from_port);
                let key = FlowKey::new(FlowProtocol::Udp, from, (to, to_port));
                let kind = match (network.is_gateway(to), to_port) {
                    (true, DNS_PORT) => SocketKind::ResolverUdp,
                    (true, _) => {
                        self.refuse_datagram(&key, Unreachable::Port);
                        return Ok(());
                    }
                    (false, _) => SocketKind::Udp,
                };
                self.datagram(key, kind, payload);
                Ok(())
            }
            IpProtocol::Icmp | IpProtocol::Icmpv6 => {
                let echo = icmp::echo_request(packet).ok_or(Dropped::Unsupported)?;
                if network.is_gateway(to) {
                    icmp::gateway_reply(&mut self.frame, &self.shared.link, packet);
                    return self.answer_if(true);
                }
                let from = (packet.source, echo.ident);
                let key = FlowKey::new(FlowProtocol::Ping, from, (to, 0));
                self.datagram(key, SocketKind::Ping, echo.message);
                Ok(())
            }
            _ => Err(Dropped::Unsupported),
        }
    }

    /// Whether `address` is one that the guest may have.
    fn is_guest(&self, address: IpAddr) -> bool {
        match self.metadata {
            Some(_) => metadata::is_host(address),
            None => self.shared.link.network.is_guest(address),
        }
    }

    fn tcp(&mut self, key: FlowKey, segment: &Segment<'_>, burst: Burst<'_>) {
        let now = Instant::now();
        let is_new = segment.syn && segment.ack.is_none() && !segment.rst;
        if let Some(id) = self.table.find(&key)
            && let Some((_, Flow::Tcp(flow))) = self.table.get_mut(id)
        {
            if !is_new && flow.is_of_another(segment) {
                self.reset_unknown(&key, segment);
                return;
            }
            if !is_new || flow.guest_first() == segment.seq {
                let was_in_burst = flow.is_in_burst();
                flow.segment(segment, burst, now, &mut self.shared);
                if flow.is_in_burst() && !was_in_burst {
                    self.in_burst.push(id);
                }
                self.table.changed(id, now, &mut self.shared);
                if self.in_burst.len() >= MAX_IN_BURST {
                    self.end_burst(burst);
                }
                return;
            }
            // The guest has forgotten the old connection, and uses its port again.
            flow.reset_host();
            self.table.remove(id, &mut self.shared);
        }
        if is_new {
            self.open(key, segment, now);
        } else if !segment.rst {
            self.reset_unknown(&key, segment);
        }
    }

    fn open(&mut self, key: FlowKey, syn: &Segment<'_>, now: Instant) {
        if self.open_metadata(&key, syn, now) {
            return;
        }
        let network = &self.shared.link.network;
        let (kind, to) = match (network.is_gateway(key.remote.ip()), key.remote.port()) {
            (true, DNS_PORT) => {
                let to = SocketAddr::new(key.remote.ip(), self.shared.resolver);
                (SocketKind::ResolverTcp, Some(to))
            }
            (true, _) => (SocketKind::Tcp, None),
            (false, _) => (SocketKind::Tcp, Some(key.remote)),
        };
        let has_room = self.table.len() < MAX_FLOWS && self.requests.has_room(&self.table);
        let Some(to) = to.filter(|_| has_room) else {
            self.shared.counters.flows_refused += 1;
            self.reset_unknown(&key, syn);
            return;
        };
        let flow = self.new_flow(key, syn, now);
        let id = self.table.insert(key, Flow::Tcp(Box::new(flow)), now);
        self.requests.ask(Request { id, kind, to }, &self.table);
    }

    fn new_flow(&mut self, key: FlowKey, syn: &Segment<'_>, now: Instant) -> TcpFlow {
        let first = self.first_number(&key, now);
        self.shared.counters.flows_opened += 1;
        TcpFlow::new(key, syn, first, now, &mut self.shared)
    }

    /// This side's first sequence number of a new connection.
    fn first_number(&self, key: &FlowKey, now: Instant) -> Seq {
        // A clock of 4 microseconds, and an offset that cannot be known outside.
        let ticks = now.duration_since(self.started).as_micros() / 4;
        let mixed = u128::from(self.secret.hash_one(key)).wrapping_add(ticks);
        Seq(u32::try_from(mixed & 0xffff_ffff).unwrap_or_default())
    }

    fn datagram(&mut self, key: FlowKey, kind: SocketKind, payload: &[u8]) {
        let now = Instant::now();
        let id = match self.table.find(&key) {
            Some(id) => id,
            None if self.table.len() < MAX_FLOWS && self.requests.has_room(&self.table) => {
                self.table.limit_datagram_flows(MAX_DATAGRAM_FLOWS, now, &mut self.shared);
                let flow = DatagramFlow::new(key, kind, self.shared.resolver, now);
                let (kind, to) = flow.target();
                let id = self.table.insert(key, Flow::Datagram(Box::new(flow)), now);
                self.shared.counters.flows_opened += 1;
                self.requests.ask(Request { id, kind, to }, &self.table);
                id
            }
            None => {
                self.shared.counters.flows_refused += 1;
                return;
            }
        };
        let Some((_, Flow::Datagram(flow))) = self.table.get_mut(id) else { return };
        let sent = flow.send(payload, now, &mut self.shared);
        self.sent(id, sent);
    }

    /// After a flow has sent datagrams.
    fn sent(&mut self, id: u64, sent: Sent) {
        let Some((key, Flow::Datagram(flow))) = self.table.get_mut(id) else { return };
        match sent {
            Sent::Done => {}
            Sent::NextResolver => {
                let (kind, to) = flow.target();
                self.requests.ask(Request { id, kind, to }, &self.table);
            }
            Sent::Failed(errno) => {
                self.refuse_datagram(&key, Unreachable::from_errno(errno));
            }
        }
    }

    fn broker_answers(&mut self, now: Instant) {
        while let Some(message) = self.requests.next_message() {
            let answer = match message {
                Message::Answer(answer) => answer,
                Message::Connection(connection) => {
                    self.connected(connection, now);
                    continue;
                }
            };
            self.requests.send(&self.table);
            let id = answer.id;
            match answer.socket {
                Ok(socket) => self.set_socket(id, socket, now),
                Err(errno) => self.refuse(id, errno),
            }
        }
        self.requests.send(&self.table);
        if self.requests.is_lost() {
            let is_asking = |flow: &Flow| match flow {
                Flow::Tcp(flow) => flow.is_connecting(),
                Flow::Datagram(flow) => flow.is_connecting(),
            };
            let keys: Vec<FlowKey> = self
                .table
                .iter()
                .filter(|(_, flow)| is_asking(flow))
                .map(|(key, _)| *key)
                .collect();
            for id in keys.iter().filter_map(|key| self.table.find(key)).collect::<Vec<_>>() {
                self.refuse(id, Errno::NETUNREACH);
            }
        }
    }

    fn set_socket(&mut self, id: u64, socket: OwnedFd, now: Instant) {
        let Some((_, flow)) = self.table.get_mut(id) else { return };
        if let Err(errno) = add(&self.epoll, &socket, id) {
            reset_socket(socket);
            self.refuse(id, errno);
            return;
        }
        match flow {
            Flow::Tcp(flow) => flow.set_socket(socket),
            Flow::Datagram(flow) => {
                let sent = flow.set_socket(socket, &mut self.shared);
                self.sent(id, sent);
            }
        }
        self.table.changed(id, now, &mut self.shared);
    }

    fn socket_events(&mut self, id: u64, events: epoll::EventFlags, now: Instant) {
        let Some((_, flow)) = self.table.get_mut(id) else { return };
        let result = match flow {
            Flow::Tcp(flow) => flow.socket_events(events, &mut self.shared),
            Flow::Datagram(flow) => {
                flow.set_readable();
                Ok(())
            }
        };
        match result {
            Ok(()) => self.table.changed(id, now, &mut self.shared),
            Err(errno) => self.refuse(id, errno),
        }
    }

    fn expire(&mut self, now: Instant) {
        while let Some(id) = self.table.next_expired(now) {
            let Some((_, flow)) = self.table.get_mut(id) else { continue };
            let result = match flow {
                Flow::Tcp(flow) => flow.time_out(&mut self.shared),
                Flow::Datagram(flow) => {
                    flow.time_out(now);
                    Ok(())
                }
            };
            match result {
                Ok(()) => self.table.changed(id, now, &mut self.shared),
                Err(errno) => self.refuse(id, errno),
            }
        }
        self.table.rearm(now);
    }

    /// Ends a flow that has no connection, and tells the guest why.
    fn refuse(&mut self, id: u64, errno: Errno) {
        let Some((key, flow)) = self.table.get_mut(id) else { return };
        let start = match flow {
            Flow::Datagram(_) => None,
            Flow::Tcp(flow) => Some(flow.guest_first()),
        };
        let is_published = matches!(flow, Flow::Tcp(flow) if flow.is_published());
        self.shared.counters.flows_refused += 1;
        self.table.remove(id, &mut self.shared);
        if is_published {
            // The guest has not been called.
            return;
        }
        let Some(first) = start else {
            self.refuse_datagram(&key, Unreachable::from_errno(errno));
            return;
        };
        if matches!(errno, Errno::CONNREFUSED | Errno::CONNRESET | Errno::MFILE) {
            self.reset(&key, None, Some(first + 1));
            return;
        }
        let mut quoted = Vec::with_capacity(8);
        quoted.extend(key.guest.port().to_be_bytes());
        quoted.extend(key.remote.port().to_be_bytes());
        quoted.extend(first.0.to_be_bytes());
        self.unreachable(&key, &quoted, Unreachable::from_errno(errno));
    }

    fn next_frame(&mut self, room: usize) -> bool {
        if self.next_of_thaw() {
            return true;
        }
        self.thaw.made(None);
        while let Some((header, answer)) = self.answers.pop_front() {
            self.answer_bytes -= answer.len();
            if answer.len() <= room {
                self.frame.copy_from(header, &answer);
                return true;
            }
            self.shared.counters.dropped_full += 1;
        }
        let now = Instant::now();
        while let Some(id) = self.table.next_ready() {
            let Some((key, flow)) = self.table.get_mut(id) else { continue };
            let is_made = match flow {
                Flow::Tcp(flow) => {
                    self.thaw.made(Some((key, flow.saved())));
                    flow.next_frame(&mut self.frame, room, now, &mut self.shared)
                }
                Flow::Datagram(flow) => {
                    self.thaw.made(None);
                    match flow.next_frame(&mut self.frame, room, now, &mut self.shared) {
                        Some(Sent::Done) => true,
                        None => false,
                        Some(failed) => {
                            self.sent(id, failed);
                            self.table.changed(id, now, &mut self.shared);
                            continue;
                        }
                    }
                }
            };
            if is_made {
                let len = self.frame.parts().1.len();
                self.table.made(id, len, now, &mut self.shared);
                return true;
            }
            self.table.idle(id, now, &mut self.shared);
        }
        // What failed on the way has made answers.
        !self.answers.is_empty() && self.next_frame(room)
    }
}

/// Watches a descriptor for every change of its state.
fn add(epoll: &OwnedFd, source: &OwnedFd, id: u64) -> Result<(), Errno> {
    let events = epoll::EventFlags::IN
        | epoll::EventFlags::OUT
        | epoll::EventFlags::PRI
        | epoll::EventFlags::RDHUP
        | epoll::EventFlags::ET;
    epoll::add(epoll, source, epoll::EventData::new_u64(id), events)
}
