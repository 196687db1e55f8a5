//! Datagrams of the guest, UDP and ICMP echo: a connected socket of the host for each pair of a
//! guest's port and a destination. Datagrams pass one to one.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use smoltcp::wire::UDP_HEADER_LEN;

use crate::broker::wire::SocketKind;
use crate::flow::{FlowKey, FlowProtocol};
use crate::frame::Frame;
use crate::icmp;
use crate::network::link_headers;
use crate::tcp::Shared;

/// How long a flow lives without a datagram.
const IDLE: Duration = Duration::from_secs(60);
/// The same for DNS, where a query has its own port and one answer.
const DNS_IDLE: Duration = Duration::from_secs(5);
const DNS_PORT: u16 = 53;
/// How long a resolver may take before a repeated query goes to the next one. Resolvers in guests
/// repeat after 5 seconds or sooner.
const RESOLVER_PATIENCE: Duration = Duration::from_millis(1500);
/// Datagrams of a flow, and their bytes, that wait for the socket.
const MAX_WAITING: usize = 8;
const MAX_WAITING_BYTES: usize = 16 << 10;
/// The same for all flows.
const ALL_WAITING_BYTES: usize = 1 << 20;

/// A flow of datagrams.
#[derive(Debug)]
pub(crate) struct DatagramFlow {
    key: FlowKey,
    kind: SocketKind,
    /// `None` until the broker has answered.
    socket: Option<OwnedFd>,
    waiting: VecDeque<Vec<u8>>,
    readable: bool,
    last_used: Instant,
    /// The first query that has no answer.
    unanswered: Option<Instant>,
    /// The resolver that is used, as [`Shared::resolver`].
    resolver: u16,
    over: bool,
}

/// What became of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// It was sent, or waits, or is lost.
    Done,
    /// The resolver does not answer: the flow needs another socket.
    NextResolver,
    /// The other side, or the host, refuses it, or one before it.
    Failed(Errno),
}

impl DatagramFlow {
    pub(crate) fn new(key: FlowKey, kind: SocketKind, resolver: u16, now: Instant) -> Self {
        Self {
            key,
            kind,
            socket: None,
            waiting: VecDeque::new(),
            readable: false,
            last_used: now,
            unanswered: None,
            resolver,
            over: false,
        }
    }

    pub(crate) const fn is_over(&self) -> bool {
        self.over
    }

    pub(crate) const fn is_connecting(&self) -> bool {
        self.socket.is_none()
    }

    /// What the broker is asked for.
    pub(crate) fn target(&self) -> (SocketKind, SocketAddr) {
        match self.kind {
            SocketKind::ResolverUdp => {
                (self.kind, SocketAddr::new(self.key.remote.ip(), self.resolver))
            }
            kind => (kind, self.key.remote),
        }
    }

    /// When the flow ends if no datagram passes.
    pub(crate) fn deadline(&self) -> Instant {
        let dns = self.key.remote.port() == DNS_PORT;
        self.last_used + if dns { DNS_IDLE } else { IDLE }
    }

    pub(crate) fn time_out(&mut self, now: Instant) {
        self.over = self.deadline() <= now;
    }

    pub(crate) fn set_readable(&mut self) {
        self.readable = true;
    }

    /// The broker's socket: what waits is sent.
    pub(crate) fn set_socket(&mut self, socket: OwnedFd, shared: &mut Shared) -> Sent {
        self.socket = Some(socket);
        let waiting = self.take_waiting(shared);
        let mut result = Sent::Done;
        for datagram in &waiting {
            if let failed @ Sent::Failed(_) = self.send_now(datagram) {
                result = failed;
            }
        }
        result
    }

    fn take_waiting(&mut self, shared: &mut Shared) -> VecDeque<Vec<u8>> {
        shared.waiting -= self.waiting.iter().map(Vec::len).sum::<usize>();
        std::mem::take(&mut self.waiting)
    }

    /// Ends the flow, and gives back what it holds.
    pub(crate) fn close(&mut self, shared: &mut Shared) {
        self.take_waiting(shared);
        self.socket = None;
    }

    /// A datagram of the guest.
    pub(crate) fn send(&mut self, datagram: &[u8], now: Instant, shared: &mut Shared) -> Sent {
        self.last_used = now;
        let since = *self.unanswered.get_or_insert(now);
        if self.socket.is_none() {
            self.queue(datagram, shared);
            return Sent::Done;
        }
        if self.kind != SocketKind::ResolverUdp {
            return self.send_now(datagram);
        }
        let is_silent = now.duration_since(since) > RESOLVER_PATIENCE;
        if is_silent || self.send_now(datagram) != Sent::Done {
            self.queue(datagram, shared);
            self.next_resolver(now, shared);
            return Sent::NextResolver;
        }
        Sent::Done
    }

    /// Gives up on the resolver, for the flows that follow too.
    fn next_resolver(&mut self, now: Instant, shared: &mut Shared) {
        if shared.resolver == self.resolver {
            shared.resolver = shared.resolver.wrapping_add(1);
        }
        self.resolver = shared.resolver;
        self.socket = None;
        self.unanswered = Some(now);
    }

    fn queue(&mut self, datagram: &[u8], shared: &mut Shared) {
        let own = self.waiting.iter().map(Vec::len).sum::<usize>() + datagram.len();
        let all = shared.waiting + datagram.len();
        let has_room = own <= MAX_WAITING_BYTES && all <= ALL_WAITING_BYTES;
        if self.waiting.len() < MAX_WAITING && has_room {
            shared.waiting = all;
            self.waiting.push_back(datagram.to_vec());
        } else {
            shared.counters.dropped_full += 1;
        }
    }

    /// A full socket drops the datagram, as a full queue of a router would.
    fn send_now(&self, datagram: &[u8]) -> Sent {
        let Some(socket) = &self.socket else { return Sent::Done };
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match retry_on_intr(|| send(socket, datagram, flags)) {
            Ok(_) | Err(Errno::AGAIN | Errno::NOBUFS) => Sent::Done,
            Err(errno) => Sent::Failed(errno),
        }
    }

    /// Reads the next datagram of the host into `frame`, which is at most `room` bytes. `None` if
    /// there is none. What failed is an earlier datagram.
    pub(crate) fn next_frame(
        &mut self,
        frame: &mut Frame,
        room: usize,
        now: Instant,
        shared: &mut Shared,
    ) -> Option<Sent> {
        let socket = self.socket.as_ref()?;
        let udp = self.key.protocol == FlowProtocol::Udp;
        let address = self.key.guest.ip();
        let header = if udp { UDP_HEADER_LEN } else { 0 };
        let most = shared.link.network.ip_payload(address) - header;
        let offset = link_headers(address) + header;
        while self.readable {
            let buffer = frame.payload_mut(offset, most);
            let len = match retry_on_intr(|| recv(socket, &mut *buffer, RecvFlags::TRUNC)) {
                Ok((_, len)) => len,
                Err(Errno::AGAIN) => {
                    self.readable = false;
                    return None;
                }
                Err(_) if self.kind == SocketKind::ResolverUdp => {
                    self.next_resolver(now, shared);
                    return Some(Sent::NextResolver);
                }
                Err(errno) => return Some(Sent::Failed(errno)),
            };
            self.last_used = now;
            self.unanswered = None;
            if len > most || offset + len > room {
                shared.counters.dropped_full += 1;
            } else if udp {
                frame.udp(&shared.link, &self.key, len);
                return Some(Sent::Done);
            } else if icmp::echo_reply(frame, &shared.link, &self.key, len) {
                return Some(Sent::Done);
            }
        }
        None
    }
}
