//! All connections of a guest, and the dispatch of packets to them.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use firn_base::num::{u64_of, usize_of};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use rustix::time::Timespec;

use super::super::chain::ChainFault;
use super::broker::{Request, Requests};
use super::connection::{BUFFER, Connection, Failures, Outgoing, Ports};
#[cfg(test)]
use super::listener::VsockConnector;
use super::listener::VsockListener;
use super::packet::{HOST_CID, Header, Op, TYPE_STREAM};

/// The most connections at a time, including programs on the host that have not named a port yet.
pub(super) const MAX_CONNECTIONS: usize = 1024;
/// The most pending resets for packets without a connection. Further ones are dropped.
const MAX_RESETS: usize = 256;
/// Events read at a time.
const EVENTS: usize = 64;
/// The host's ports of connections from the host, as in Firecracker.
pub(super) const FIRST_PORT: u32 = 1 << 30;
const LAST_PORT: u32 = (1 << 31) - 1;
/// `VMADDR_PORT_ANY`, which no connection has. As the host's port it marks the listener, and
/// programs that have not named a port of the guest yet.
const ANY_PORT: u32 = u32::MAX;
/// With [`ANY_PORT`] of the host, the guest's port that marks the broker.
const BROKER: u32 = ANY_PORT - 1;
/// Bytes for a program's first line, of which the longest is `CONNECT 4294967295\n`.
const LINE_CAPACITY: usize = 32;

/// The streams of a guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VsockCounters {
    /// Packets to the guest.
    pub packets_to_guest: u64,
    /// Bytes of data in them.
    pub bytes_to_guest: u64,
    /// Packets from the guest.
    pub packets_from_guest: u64,
    /// Bytes of data that was accepted in them.
    pub bytes_from_guest: u64,
    /// Connections that were made.
    pub opened: u64,
    /// Connections that have ended.
    pub closed: u64,
    /// Those of them that the device ended by a reset.
    pub resets: u64,
    /// Reads of the host's sockets that failed.
    pub read_failures: u64,
    /// Writes to the host's sockets that failed.
    pub write_failures: u64,
    /// Waits for events of the host's sockets that failed.
    pub poll_failures: u64,
}

/// The connections of one guest.
#[derive(Debug)]
pub(super) struct Muxer {
    guest_cid: u64,
    listener: VsockListener,
    epoll: OwnedFd,
    /// Whether programs may be waiting for an accept.
    accepting: bool,
    /// Programs that have connected but not named a port yet, by number.
    pending: HashMap<u32, OwnedFd>,
    next_pending: u32,
    connections: HashMap<Ports, Connection>,
    next_port: u32,
    /// Connections that may have a packet for the guest, each once, in the order of service. A
    /// connection that is removed leaves it, so it is not longer than `connections`.
    ready: VecDeque<Ports>,
    /// Requests of the guest that have no connection yet.
    requests: Requests,
    /// Packets without a connection, by the context id that they were sent to.
    resets: VecDeque<(u64, Ports)>,
    /// Whether requests for new connections are held back.
    hold: bool,
    data: Vec<u8>,
    counters: VsockCounters,
}

impl Muxer {
    pub(super) fn new(guest_cid: u64, mut listener: VsockListener) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let add = |source: BorrowedFd<'_>, guest| {
            let token = token(Ports { host: ANY_PORT, guest });
            epoll::add(&epoll, source, token, EventFlags::IN | EventFlags::ET)
        };
        listener.event_sources().into_iter().try_for_each(|source| add(source, ANY_PORT))?;
        let requests = Requests::new(listener.take_broker());
        requests.event_source().map_or(Ok(()), |source| add(source, BROKER))?;
        Ok(Self {
            guest_cid,
            listener,
            epoll,
            accepting: false,
            pending: HashMap::new(),
            next_pending: 0,
            connections: HashMap::new(),
            next_port: FIRST_PORT,
            ready: VecDeque::new(),
            requests,
            resets: VecDeque::new(),
            hold: false,
            data: Vec::new(),
            counters: VsockCounters::default(),
        })
    }

    /// Readable when [`Muxer::poll`] has work.
    pub(super) fn event_source(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    pub(super) fn counters(&self) -> VsockCounters {
        let of_connections = self.connections.values().map(Connection::failures);
        of_connections.fold(self.counters, VsockCounters::with)
    }

    #[cfg(test)]
    pub(super) fn connector(&self) -> VsockConnector {
        self.listener.connector()
    }

    #[cfg(test)]
    pub(super) fn connections(&self) -> usize {
        self.connections.len()
    }

    #[cfg(test)]
    pub(super) fn requests(&self) -> usize {
        self.requests.len()
    }

    #[cfg(test)]
    pub(super) fn ready(&self) -> usize {
        self.ready.len()
    }

    pub(super) fn next_port(&self) -> u32 {
        self.next_port
    }

    /// Sets the host's port of the next connection from the host, so that a restored guest does not
    /// see a pair of ports again.
    pub(super) fn set_next_port(&mut self, port: u32) {
        self.next_port = port.clamp(FIRST_PORT, LAST_PORT);
    }

    /// Sets whether requests for new connections are held back.
    pub(super) fn set_hold(&mut self, hold: bool) {
        self.hold = hold;
        let all: Vec<Ports> = self.connections.keys().copied().collect();
        all.into_iter().for_each(|ports| self.update(ports));
    }

    /// Drops all connections after a reset of the driver, except those whose request was not sent
    /// yet.
    pub(super) fn reset(&mut self) {
        let counters = &mut self.counters;
        self.connections.retain(|_, connection| {
            let stays = connection.is_unknown_to_guest();
            if !stays {
                *counters = counters.with(connection.failures());
                counters.closed += 1;
            }
            stays
        });
        self.requests.forget_all();
        self.resets.clear();
        let connections = &self.connections;
        self.ready.retain(|ports| connections.contains_key(ports));
    }

    /// Handles events of the host's sockets.
    pub(super) fn poll(&mut self) {
        let mut events = Vec::with_capacity(EVENTS);
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let room = rustix::buffer::spare_capacity(&mut events);
        // After an interruption, the next call returns the events.
        let waited = epoll::wait(&self.epoll, room, Some(&now));
        let failed = waited.is_err_and(|errno| errno != Errno::INTR);
        self.counters.poll_failures += u64::from(failed);
        for event in events {
            let ports = from_token(event.data);
            let flags = event.flags;
            if ports.host != ANY_PORT {
                if let Some(connection) = self.connections.get_mut(&ports) {
                    connection.on_event(flags);
                    self.update(ports);
                }
            } else if ports.guest == BROKER {
                self.take_answers();
            } else if ports.guest != ANY_PORT {
                let ended = flags.intersects(EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR);
                self.read_port(ports.guest, ended);
            } else {
                self.accepting = true;
            }
        }
        if self.accepting {
            self.accept();
        }
    }

    fn accept(&mut self) {
        loop {
            match self.listener.accept() {
                Ok(Some(stream)) => self.add_pending(stream),
                Ok(None) => {
                    self.accepting = false;
                    return;
                }
                // Out of file descriptors: the next event, after which one may be free, tries
                // again.
                Err(_) => return,
            }
        }
    }

    fn is_full(&self) -> bool {
        self.connections.len() + self.pending.len() + self.requests.len() >= MAX_CONNECTIONS
    }

    /// Adds a program that connected. Above the limit its socket is closed.
    fn add_pending(&mut self, stream: OwnedFd) {
        if self.is_full() {
            return;
        }
        let number = self.next_pending;
        self.next_pending = (number + 1) % BROKER;
        let token = token(Ports { host: ANY_PORT, guest: number });
        let interest = EventFlags::IN | EventFlags::RDHUP | EventFlags::ET;
        if epoll::add(&self.epoll, &stream, token, interest).is_ok() {
            self.pending.insert(number, stream);
            self.read_port(number, false);
        }
    }

    /// Reads a program's first line, which names a port of the guest, once the line is complete.
    /// `ended` is true if the program writes no more.
    fn read_port(&mut self, number: u32, ended: bool) {
        let Some(stream) = self.pending.get(&number) else { return };
        // Bytes after the line are for the guest and stay in the socket.
        let mut line = [0; LINE_CAPACITY];
        let peeked = match recv(stream, &mut line[..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((bytes, _)) => bytes,
            Err(Errno::AGAIN | Errno::INTR) if !ended => return,
            Err(_) => 0,
        };
        let end = line[..peeked].iter().position(|byte| *byte == b'\n');
        if end.is_none() && (1..LINE_CAPACITY).contains(&peeked) && !ended {
            return;
        }
        let Some(stream) = self.pending.remove(&number) else { return };
        let Some((end, port)) = end.and_then(|end| Some((end, parse_connect(&line[..end])?)))
        else {
            return;
        };
        if recv(&stream, &mut line[..=end], RecvFlags::DONTWAIT).is_ok() {
            self.connect_in(port, stream);
        }
    }

    fn connect_in(&mut self, guest_port: u32, stream: OwnedFd) {
        let Some(ports) = self.free_ports(guest_port) else { return };
        let interest = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        if epoll::modify(&self.epoll, &stream, token(ports), interest).is_ok() {
            self.add(ports, Connection::from_host(ports, stream));
        }
    }

    fn free_ports(&mut self, guest: u32) -> Option<Ports> {
        // One more port than connections, so one of them is free.
        for _ in 0..=MAX_CONNECTIONS {
            let ports = Ports { host: self.next_port, guest };
            self.next_port = if ports.host >= LAST_PORT { FIRST_PORT } else { ports.host + 1 };
            if !self.connections.contains_key(&ports) && !self.requests.contains(ports) {
                return Some(ports);
            }
        }
        None
    }

    /// Handles a packet from the guest; `read` copies its data.
    pub(super) fn on_packet(
        &mut self,
        header: &Header,
        read: impl FnOnce(&mut [u8]) -> Result<(), ChainFault>,
    ) -> Result<(), ChainFault> {
        self.counters.packets_from_guest += 1;
        // The packet has a wrong source address, so there is no address for a response.
        if header.src_cid != self.guest_cid {
            return Ok(());
        }
        let ports = Ports { host: header.dst_port, guest: header.src_port };
        let op = Op::from_number(header.op);
        if op == Some(Op::Reset) {
            if let Some(connection) = self.connections.get_mut(&ports) {
                connection.on_reset();
                self.update(ports);
            }
            self.requests.forget(ports);
        } else if header.dst_cid != HOST_CID || header.kind != TYPE_STREAM {
            self.refuse(header.dst_cid, ports);
        } else if let Some(request) = self.requests.get_mut(ports) {
            (request.buf_alloc, request.fwd_cnt) = (header.buf_alloc, header.fwd_cnt);
            if !matches!(op, Some(Op::CreditUpdate | Op::CreditRequest)) {
                self.requests.forget(ports);
                self.refuse(HOST_CID, ports);
            }
        } else if op == Some(Op::Request) {
            self.connect_out(header, ports);
        } else if let Some(connection) = self.connections.get_mut(&ports) {
            connection.set_credit(header.buf_alloc, header.fwd_cnt);
            match op {
                Some(Op::Response) => connection.on_response(),
                Some(Op::Data) if connection.accepts(header.len) => {
                    self.data.clear();
                    self.data.resize(usize_of(header.len.into()), 0);
                    read(&mut self.data)?;
                    self.counters.bytes_from_guest += u64::from(header.len);
                    connection.on_data(&self.data);
                }
                Some(Op::Shutdown) => connection.on_shutdown(header.flags),
                Some(Op::CreditUpdate) => {}
                Some(Op::CreditRequest) => connection.on_credit_request(),
                // More data than the buffer has room for, or an invalid operation.
                _ => connection.reset(),
            }
            self.update(ports);
        } else {
            self.refuse(HOST_CID, ports);
        }
        Ok(())
    }

    /// Handles the guest's request for a connection to a program on the host.
    fn connect_out(&mut self, header: &Header, ports: Ports) {
        if let Some(connection) = self.connections.get_mut(&ports) {
            connection.reset();
            self.update(ports);
            return;
        }
        let Header { buf_alloc, fwd_cnt, .. } = *header;
        let request = Request { ports, buf_alloc, fwd_cnt };
        if self.is_full() || ports.host == ANY_PORT || !self.requests.ask(request) {
            self.refuse(HOST_CID, ports);
        }
    }

    /// Takes what the broker has answered.
    fn take_answers(&mut self) {
        let interest = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        while let Some((request, stream)) = self.requests.next_answer() {
            let Request { ports, buf_alloc, fwd_cnt } = request;
            match stream {
                Some(stream)
                    if epoll::add(&self.epoll, &stream, token(ports), interest).is_ok() =>
                {
                    let mut connection = Connection::from_guest(ports, stream);
                    connection.set_credit(buf_alloc, fwd_cnt);
                    self.add(ports, connection);
                }
                _ => self.refuse(HOST_CID, ports),
            }
        }
    }

    /// Queues a reset for a packet to `cid` without a connection.
    fn refuse(&mut self, cid: u64, ports: Ports) {
        if self.resets.len() < MAX_RESETS {
            self.resets.push_back((cid, ports));
        }
    }

    fn add(&mut self, ports: Ports, connection: Connection) {
        self.connections.insert(ports, connection);
        self.counters.opened += 1;
        self.update(ports);
    }

    /// Removes or queues a connection after a change.
    fn update(&mut self, ports: Ports) {
        let Some(connection) = self.connections.get_mut(&ports) else { return };
        if connection.is_done() {
            self.remove(ports);
        } else if !connection.queued && connection.has_work(self.hold) {
            connection.queued = true;
            self.ready.push_back(ports);
        }
    }

    fn remove(&mut self, ports: Ports) {
        // Closing the socket also takes it out of the epoll set.
        let Some(connection) = self.connections.remove(&ports) else { return };
        self.counters = self.counters.with(connection.failures());
        self.counters.closed += 1;
        if connection.queued {
            self.ready.retain(|ready| *ready != ports);
        }
        if self.accepting {
            self.accept();
        }
    }

    /// Whether the guest has no connection, requests none and is sent nothing. One that it does not
    /// know of yet, or no more, counts as well.
    pub(super) fn is_quiet(&self) -> bool {
        self.connections.is_empty() && self.requests.is_empty() && self.resets.is_empty()
    }

    /// Whether [`Muxer::next_packet`] may return a packet.
    pub(super) fn has_packets(&self) -> bool {
        !(self.resets.is_empty() && self.ready.is_empty())
    }

    /// The next packet for the guest, with at most `max` bytes of data, which must be positive.
    pub(super) fn next_packet(&mut self, max: usize) -> Option<(Header, &[u8])> {
        self.data.clear();
        if let Some((cid, ports)) = self.resets.pop_front() {
            self.counters.packets_to_guest += 1;
            let packet = Outgoing { op: Op::Reset, flags: 0 };
            return Some((self.header(cid, ports, packet, 0), &[]));
        }
        while let Some(ports) = self.ready.pop_front() {
            let Some(connection) = self.connections.get_mut(&ports) else { continue };
            connection.queued = false;
            let Some(packet) = connection.next_packet(self.hold, max, &mut self.data) else {
                continue;
            };
            let forwarded = connection.forwarded();
            self.counters.packets_to_guest += 1;
            self.counters.bytes_to_guest += u64_of(self.data.len());
            if packet.op == Op::Reset {
                self.counters.resets += 1;
                self.remove(ports);
            } else {
                self.update(ports);
            }
            return Some((self.header(HOST_CID, ports, packet, forwarded), &self.data));
        }
        None
    }

    fn header(&self, cid: u64, ports: Ports, packet: Outgoing, forwarded: u32) -> Header {
        Header {
            src_cid: cid,
            dst_cid: self.guest_cid,
            src_port: ports.host,
            dst_port: ports.guest,
            // The data is not longer than a buffer of the guest.
            len: u32::try_from(self.data.len()).unwrap_or(u32::MAX),
            kind: TYPE_STREAM,
            op: packet.op.number(),
            flags: packet.flags,
            buf_alloc: BUFFER,
            fwd_cnt: forwarded,
        }
    }
}

impl VsockCounters {
    /// The same with what has failed for a connection.
    fn with(self, failures: Failures) -> Self {
        let Failures { reads, writes } = failures;
        Self {
            read_failures: self.read_failures + reads,
            write_failures: self.write_failures + writes,
            ..self
        }
    }
}

/// Parses `CONNECT <port>` without its newline, case-insensitively, as in Firecracker.
fn parse_connect(line: &[u8]) -> Option<u32> {
    let mut words = std::str::from_utf8(line).ok()?.split_ascii_whitespace();
    let connect = words.next()?.eq_ignore_ascii_case("connect");
    let port = words.next()?.parse().ok()?;
    (connect && words.next().is_none()).then_some(port)
}

fn token(ports: Ports) -> EventData {
    EventData::new_u64(u64::from(ports.host) << 32 | u64::from(ports.guest))
}

fn from_token(data: EventData) -> Ports {
    let half = |bits: u64| u32::try_from(bits & 0xffff_ffff).unwrap_or(0);
    Ports { host: half(data.u64() >> 32), guest: half(data.u64()) }
}
