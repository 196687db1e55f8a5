//! All connections of a guest, and the way from a packet to a connection and back.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use rustix::time::Timespec;

use super::super::chain::{ChainFault, to_usize};
use super::connection::{BUFFER, Connection, Outgoing, Ports};
use super::listener::VsockListener;
use super::packet::{HOST_CID, Header, Op, TYPE_STREAM};

/// Most connections at a time, those that programs on the host have begun to ask for included.
pub(super) const MAX_CONNECTIONS: usize = 1024;
/// Most resets that wait for packets without a connection. A guest that provokes more has to do without.
const MAX_RESETS: usize = 256;
/// Events taken at a time.
const EVENTS: usize = 64;
/// The host's ports for connections that begin on the host, as in Firecracker.
pub(super) const FIRST_PORT: u32 = 1 << 30;
const LAST_PORT: u32 = (1 << 31) - 1;
/// `VMADDR_PORT_ANY`, which no connection has. As the host's port it marks programs that have not said yet
/// which port of the guest they want, and the listener.
const ANY_PORT: u32 = u32::MAX;
/// The longest first line of a program is `CONNECT 4294967295\n`.
const LONGEST_LINE: usize = 32;

/// The connections of one guest.
#[derive(Debug)]
pub(super) struct Muxer {
    guest_cid: u64,
    listener: VsockListener,
    epoll: OwnedFd,
    /// Programs may be waiting to be accepted.
    accepting: bool,
    /// Programs that have connected but not said where to, by a number of their own.
    greeting: HashMap<u32, OwnedFd>,
    next_greeting: u32,
    connections: HashMap<Ports, Connection>,
    next_port: u32,
    /// Connections that may have a packet for the guest, each once, served in turn.
    ready: VecDeque<Ports>,
    /// Packets that belonged to no connection, by the context id that they were sent to.
    resets: VecDeque<(u64, Ports)>,
    /// Whether the guest is not to be asked for connections now.
    hold: bool,
    data: Vec<u8>,
}

impl Muxer {
    pub(super) fn new(guest_cid: u64, listener: VsockListener) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let token = token(Ports { host: ANY_PORT, guest: ANY_PORT });
        epoll::add(&epoll, &listener, token, EventFlags::IN | EventFlags::ET)?;
        Ok(Self {
            guest_cid,
            listener,
            epoll,
            accepting: false,
            greeting: HashMap::new(),
            next_greeting: 0,
            connections: HashMap::new(),
            next_port: FIRST_PORT,
            ready: VecDeque::new(),
            resets: VecDeque::new(),
            hold: false,
            data: Vec::new(),
        })
    }

    /// Readable when [`Muxer::poll`] has something to do.
    pub(super) fn event_source(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    #[cfg(test)]
    pub(super) fn connections(&self) -> usize {
        self.connections.len()
    }

    pub(super) fn next_port(&self) -> u32 {
        self.next_port
    }

    /// Makes the next connection from the host begin at `port`, so that a restored guest does not see a
    /// pair of ports again that it used before.
    pub(super) fn set_next_port(&mut self, port: u32) {
        self.next_port = port.clamp(FIRST_PORT, LAST_PORT);
    }

    /// Whether the guest is not to be asked for connections.
    pub(super) fn set_hold(&mut self, hold: bool) {
        self.hold = hold;
        let all: Vec<Ports> = self.connections.keys().copied().collect();
        all.into_iter().for_each(|ports| self.settle(ports));
    }

    /// The guest's driver knows of no connection any more. Those that it was not asked for yet remain.
    pub(super) fn reset(&mut self) {
        self.connections.retain(|_, connection| connection.is_unknown_to_guest());
        self.resets.clear();
        let connections = &self.connections;
        self.ready.retain(|ports| connections.contains_key(ports));
    }

    /// Takes events of the host's sockets.
    pub(super) fn poll(&mut self) {
        let mut events = Vec::with_capacity(EVENTS);
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        // Interrupted: whatever there is will be seen at the next call.
        let _ = epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&now));
        for event in events {
            let ports = from_token(event.data);
            let flags = event.flags;
            if ports.host != ANY_PORT {
                if let Some(connection) = self.connections.get_mut(&ports) {
                    connection.on_event(flags);
                    self.settle(ports);
                }
            } else if ports.guest != ANY_PORT {
                let ended = flags.intersects(EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR);
                self.greet(ports.guest, ended);
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
                Ok(Some(stream)) => self.welcome(stream),
                Ok(None) => {
                    self.accepting = false;
                    return;
                }
                // Out of file descriptors: tried again with the next event, which may have freed one.
                Err(_) => return,
            }
        }
    }

    fn is_full(&self) -> bool {
        self.connections.len() + self.greeting.len() >= MAX_CONNECTIONS
    }

    /// A program connected. One too many is turned away by closing its socket.
    fn welcome(&mut self, stream: OwnedFd) {
        if self.is_full() {
            return;
        }
        let number = self.next_greeting;
        self.next_greeting = (number + 1) % ANY_PORT;
        let token = token(Ports { host: ANY_PORT, guest: number });
        let interest = EventFlags::IN | EventFlags::RDHUP | EventFlags::ET;
        if epoll::add(&self.epoll, &stream, token, interest).is_ok() {
            self.greeting.insert(number, stream);
            self.greet(number, false);
        }
    }

    /// Reads where a program wants to go, once its first line is complete; `ended` when it writes no more.
    fn greet(&mut self, number: u32, ended: bool) {
        let Some(stream) = self.greeting.get(&number) else { return };
        // What follows the line is for the guest: it stays in the socket.
        let mut line = [0; LONGEST_LINE];
        let peeked = match recv(stream, &mut line[..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((bytes, _)) => bytes,
            Err(Errno::AGAIN | Errno::INTR) if !ended => return,
            Err(_) => 0,
        };
        let end = line[..peeked].iter().position(|byte| *byte == b'\n');
        if end.is_none() && (1..LONGEST_LINE).contains(&peeked) && !ended {
            return;
        }
        let Some(stream) = self.greeting.remove(&number) else { return };
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
            self.connections.insert(ports, Connection::from_host(ports, stream));
            self.settle(ports);
        }
    }

    fn free_ports(&mut self, guest: u32) -> Option<Ports> {
        // One more port than there can be connections: one is free.
        for _ in 0..=MAX_CONNECTIONS {
            let ports = Ports { host: self.next_port, guest };
            self.next_port = if ports.host >= LAST_PORT { FIRST_PORT } else { ports.host + 1 };
            if !self.connections.contains_key(&ports) {
                return Some(ports);
            }
        }
        None
    }

    /// Takes a packet from the guest; `read` copies its data.
    pub(super) fn on_packet(
        &mut self,
        header: &Header,
        read: impl FnOnce(&mut [u8]) -> Result<(), ChainFault>,
    ) -> Result<(), ChainFault> {
        // Nobody to answer: the driver does not know its own address.
        if header.src_cid != self.guest_cid {
            return Ok(());
        }
        let ports = Ports { host: header.dst_port, guest: header.src_port };
        let op = Op::from_number(header.op);
        if op == Some(Op::Reset) {
            if let Some(connection) = self.connections.get_mut(&ports) {
                connection.on_reset();
                self.settle(ports);
            }
        } else if header.dst_cid != HOST_CID || header.kind != TYPE_STREAM {
            self.refuse(header.dst_cid, ports);
        } else if op == Some(Op::Request) {
            self.connect_out(header, ports);
        } else if let Some(connection) = self.connections.get_mut(&ports) {
            connection.set_credit(header.buf_alloc, header.fwd_cnt);
            match op {
                Some(Op::Response) => connection.on_response(),
                Some(Op::Data) if connection.accepts(header.len) => {
                    self.data.clear();
                    self.data.resize(to_usize(header.len), 0);
                    read(&mut self.data)?;
                    connection.on_data(&self.data);
                }
                Some(Op::Shutdown) => connection.on_shutdown(header.flags),
                Some(Op::CreditUpdate) => {}
                Some(Op::CreditRequest) => connection.on_credit_request(),
                // More data than there is room for, or an operation that does not exist.
                _ => connection.break_off(),
            }
            self.settle(ports);
        } else {
            self.refuse(HOST_CID, ports);
        }
        Ok(())
    }

    /// The guest wants to connect to a program on the host.
    fn connect_out(&mut self, header: &Header, ports: Ports) {
        if let Some(connection) = self.connections.get_mut(&ports) {
            connection.break_off();
            self.settle(ports);
            return;
        }
        let refused = self.is_full() || ports.host == ANY_PORT;
        let stream = if refused { None } else { self.listener.connect_out(ports.host).ok() };
        let interest = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        match stream {
            Some(stream) if epoll::add(&self.epoll, &stream, token(ports), interest).is_ok() => {
                let mut connection = Connection::from_guest(ports, stream);
                connection.set_credit(header.buf_alloc, header.fwd_cnt);
                self.connections.insert(ports, connection);
                self.settle(ports);
            }
            _ => self.refuse(HOST_CID, ports),
        }
    }

    /// Answers a packet to `cid` that belongs to no connection.
    fn refuse(&mut self, cid: u64, ports: Ports) {
        if self.resets.len() < MAX_RESETS {
            self.resets.push_back((cid, ports));
        }
    }

    /// Looks after a connection to which something happened.
    fn settle(&mut self, ports: Ports) {
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
        if self.connections.remove(&ports).is_some() && self.accepting {
            self.accept();
        }
    }

    /// Whether [`Muxer::next_packet`] may have one.
    pub(super) fn has_packets(&self) -> bool {
        !(self.resets.is_empty() && self.ready.is_empty())
    }

    /// The next packet for the guest, with at most `most` bytes of data, which must be positive.
    pub(super) fn next_packet(&mut self, most: usize) -> Option<(Header, &[u8])> {
        self.data.clear();
        if let Some((cid, ports)) = self.resets.pop_front() {
            let packet = Outgoing { op: Op::Reset, flags: 0 };
            return Some((self.header(cid, ports, packet, 0), &[]));
        }
        while let Some(ports) = self.ready.pop_front() {
            let Some(connection) = self.connections.get_mut(&ports) else { continue };
            connection.queued = false;
            let Some(packet) = connection.next_packet(self.hold, most, &mut self.data) else {
                continue;
            };
            let forwarded = connection.forwarded();
            if packet.op == Op::Reset {
                self.remove(ports);
            } else {
                self.settle(ports);
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
            // As long as a buffer of the guest at most.
            len: u32::try_from(self.data.len()).unwrap_or(u32::MAX),
            kind: TYPE_STREAM,
            op: packet.op.number(),
            flags: packet.flags,
            buf_alloc: BUFFER,
            fwd_cnt: forwarded,
        }
    }
}

/// `CONNECT <port>`, without its newline; capitals do not matter, as in Firecracker.
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
