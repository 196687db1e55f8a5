//! One stream between a program on the host and one in the guest.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};

use super::packet::{Op, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND};

/// Bytes from the guest that a connection buffers for a program on the host. The guest never gets
/// more credit.
pub(super) const BUFFER: u32 = 128 << 10;

/// The two ends of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Ports {
    pub(super) host: u32,
    pub(super) guest: u32,
}

/// The fields of a packet to the guest that differ between packets of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Outgoing {
    pub(super) op: Op,
    pub(super) flags: u32,
}

/// The phase of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// A program on the host requested it, and the request is not sent to the guest yet.
    Pending,
    /// The request is sent to the guest.
    Requested,
    /// The guest requested it and the host accepted; the response is not sent yet.
    Accepted,
    /// Both sides accepted.
    Open,
    /// A reset must be sent to the guest.
    Broken,
    /// The guest has dropped it, and the program on the host has not read all of the guest's data.
    Lingering,
}

/// A connection. Its socket is non-blocking. Edge-triggered events set `readable` and `writable`,
/// and a call that would block clears them.
#[derive(Debug)]
pub(super) struct Connection {
    ports: Ports,
    stream: OwnedFd,
    phase: Phase,
    /// Whether it is in the muxer's queue of connections with packets.
    pub(super) queued: bool,

    readable: bool,
    /// The program on the host sends no more, and all its data was read.
    host_ended: bool,
    /// Bytes sent to the guest, modulo 2^32.
    sent: u32,
    guest_room: u32,
    guest_forwarded: u32,
    /// A credit request was sent since the guest's last credit.
    credit_requested: bool,

    writable: bool,
    /// The program on the host receives no more.
    host_gone: bool,
    buffer: VecDeque<u8>,
    /// Bytes received from the guest, modulo 2^32.
    received: u32,
    /// Received bytes that have left `buffer`, modulo 2^32.
    forwarded: u32,
    /// The value of `forwarded` in the last packet to the guest.
    forwarded_sent: u32,
    credit_owed: bool,

    guest_shutdown: u32,
    shutdown_sent: u32,
    /// The socket's write side was shut down, because the guest sends no more.
    write_shut_down: bool,
    failures: Failures,
}

/// Calls for a connection's socket that failed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Failures {
    pub(super) reads: u64,
    pub(super) writes: u64,
}

impl Connection {
    /// A connection that a program on the host requests.
    pub(super) fn from_host(ports: Ports, stream: OwnedFd) -> Self {
        Self::new(ports, stream, Phase::Pending)
    }

    /// A connection that the guest requests and a program on the host accepted.
    pub(super) fn from_guest(ports: Ports, stream: OwnedFd) -> Self {
        Self::new(ports, stream, Phase::Accepted)
    }

    fn new(ports: Ports, stream: OwnedFd, phase: Phase) -> Self {
        Self {
            ports,
            stream,
            phase,
            queued: false,
            readable: false,
            host_ended: false,
            sent: 0,
            guest_room: 0,
            guest_forwarded: 0,
            credit_requested: false,
            writable: true,
            host_gone: false,
            buffer: VecDeque::new(),
            received: 0,
            forwarded: 0,
            forwarded_sent: 0,
            credit_owed: false,
            guest_shutdown: 0,
            shutdown_sent: 0,
            write_shut_down: false,
            failures: Failures::default(),
        }
    }

    pub(super) fn failures(&self) -> Failures {
        self.failures
    }

    pub(super) fn forwarded(&self) -> u32 {
        self.forwarded
    }

    /// Whether the guest has received no packet of it.
    pub(super) fn is_unknown_to_guest(&self) -> bool {
        self.phase == Phase::Pending
    }

    /// Whether it can be removed: the program that requested it disconnected before the request was
    /// sent, or the guest ended it and all data has arrived.
    pub(super) fn is_done(&self) -> bool {
        match self.phase {
            Phase::Pending => self.host_gone,
            Phase::Lingering => self.buffer.is_empty(),
            _ => false,
        }
    }

    /// Handles a reset from the guest. Data that the guest sent before a shutdown still arrives:
    /// Linux waits at most 8 seconds for a slow reader.
    pub(super) fn on_reset(&mut self) {
        if self.guest_shutdown & SHUTDOWN_SEND == 0 {
            self.buffer = VecDeque::new();
        }
        self.phase = Phase::Lingering;
    }

    /// Ends the connection with a reset to the guest.
    pub(super) fn reset(&mut self) {
        self.phase = Phase::Broken;
        self.buffer = VecDeque::new();
    }

    /// Sets the guest's credit.
    pub(super) fn set_credit(&mut self, buf_alloc: u32, fwd_cnt: u32) {
        if (buf_alloc, fwd_cnt) != (self.guest_room, self.guest_forwarded) {
            self.credit_requested = false;
        }
        self.guest_room = buf_alloc;
        self.guest_forwarded = fwd_cnt;
    }

    /// Handles the guest's acceptance of a requested connection.
    pub(super) fn on_response(&mut self) {
        if self.phase != Phase::Requested {
            self.reset();
            return;
        }
        self.phase = Phase::Open;
        self.readable = true;
        // As in Firecracker, the program's next line is the response to its `CONNECT`. A new socket
        // has room for it.
        let line = format!("OK {}\n", self.ports.host);
        if send(&self.stream, line.as_bytes(), SendFlags::NOSIGNAL) != Ok(line.len()) {
            self.reset();
        }
    }

    /// Whether the guest may send `len` bytes now.
    pub(super) fn accepts(&self, len: u32) -> bool {
        self.phase == Phase::Open
            && self.guest_shutdown & SHUTDOWN_SEND == 0
            && len <= BUFFER - self.received.wrapping_sub(self.forwarded)
    }

    /// Handles data from the guest, which [`Connection::accepts`] permitted.
    pub(super) fn on_data(&mut self, data: &[u8]) {
        self.received = self.received.wrapping_add(length(data));
        self.buffer.extend(data);
        self.flush();
    }

    /// Handles the guest's shutdown of one or both directions.
    pub(super) fn on_shutdown(&mut self, flags: u32) {
        if self.phase != Phase::Open {
            self.reset();
            return;
        }
        if flags & !self.guest_shutdown & SHUTDOWN_RECEIVE != 0 {
            // Fails if the program has disconnected.
            let _ = shutdown(&self.stream, Shutdown::Read);
        }
        self.guest_shutdown |= flags & SHUTDOWN_BOTH;
        self.flush();
    }

    /// Handles the guest's credit request.
    pub(super) fn on_credit_request(&mut self) {
        self.credit_owed = true;
    }

    /// Handles events of the socket.
    pub(super) fn on_event(&mut self, events: EventFlags) {
        let ended = EventFlags::HUP | EventFlags::ERR;
        if events.intersects(EventFlags::IN | EventFlags::RDHUP | ended) {
            self.readable = true;
        }
        if events.intersects(ended) {
            self.host_gone = true;
            if self.phase == Phase::Requested {
                self.reset();
            }
        }
        if events.intersects(EventFlags::OUT | ended) {
            self.writable = true;
            self.flush();
        }
    }

    /// Sends the buffer to the program on the host, as far as its socket has room, and then the end
    /// if the guest has ended.
    fn flush(&mut self) {
        while self.writable && !self.host_gone && !self.buffer.is_empty() {
            let (front, _) = self.buffer.as_slices();
            match send(&self.stream, front, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(bytes) => self.forward(bytes),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.writable = false,
                Err(_) => {
                    self.failures.writes += 1;
                    self.host_gone = true;
                }
            }
        }
        if self.host_gone {
            self.forward(self.buffer.len());
        }
        if !self.buffer.is_empty() {
            return;
        }
        if self.phase == Phase::Open && self.guest_shutdown == SHUTDOWN_BOTH {
            // The last step of a clean disconnect (5.10.6.6.1): all data has arrived.
            self.reset();
        } else if self.guest_shutdown & SHUTDOWN_SEND != 0 && !self.write_shut_down {
            let _ = shutdown(&self.stream, Shutdown::Write);
            self.write_shut_down = true;
        }
    }

    fn forward(&mut self, bytes: usize) {
        self.buffer.drain(..bytes);
        // A buffer is at most 128 KiB.
        self.forwarded = self.forwarded.wrapping_add(u32::try_from(bytes).unwrap_or(BUFFER));
        // Sent early enough that a guest that sends continuously never stalls.
        if self.forwarded.wrapping_sub(self.forwarded_sent) >= BUFFER / 2 {
            self.credit_owed = true;
        }
    }

    /// Bytes that the guest has room for.
    fn credit(&self) -> u32 {
        self.guest_room.saturating_sub(self.sent.wrapping_sub(self.guest_forwarded))
    }

    fn can_read(&self) -> bool {
        self.phase == Phase::Open
            && self.readable
            && !self.host_ended
            && self.guest_shutdown & SHUTDOWN_RECEIVE == 0
    }

    /// The shutdown flags of the host's side.
    fn shutdown_due(&self) -> u32 {
        let send = if self.host_ended { SHUTDOWN_SEND } else { 0 };
        let receive = if self.host_gone { SHUTDOWN_RECEIVE } else { 0 };
        send | receive
    }

    /// Whether [`Connection::next_packet`] may return a packet. While `hold` is set, requests for
    /// new connections are held back.
    pub(super) fn has_work(&self, hold: bool) -> bool {
        match self.phase {
            Phase::Pending => !hold,
            Phase::Requested | Phase::Lingering => false,
            Phase::Accepted | Phase::Broken => true,
            Phase::Open => {
                (self.can_read() && (self.credit() > 0 || !self.credit_requested))
                    || self.credit_owed
                    || self.shutdown_due() != self.shutdown_sent
            }
        }
    }

    /// The next packet for the guest. A data packet's data, at most `max` bytes, is stored in
    /// `data`, which must be empty.
    pub(super) fn next_packet(
        &mut self,
        hold: bool,
        max: usize,
        data: &mut Vec<u8>,
    ) -> Option<Outgoing> {
        let plain = |op| Some(Outgoing { op, flags: 0 });
        match self.phase {
            Phase::Pending if hold => return None,
            Phase::Pending => {
                self.phase = Phase::Requested;
                return plain(Op::Request);
            }
            Phase::Accepted => {
                self.phase = Phase::Open;
                self.readable = true;
                return plain(Op::Response);
            }
            Phase::Broken => return plain(Op::Reset),
            Phase::Requested | Phase::Lingering => return None,
            Phase::Open => {}
        }
        if self.can_read() && self.credit() > 0 {
            self.read(max, data);
        }
        // Every packet carries `forwarded`.
        let packet = if !data.is_empty() {
            plain(Op::Data)
        } else if self.shutdown_due() != self.shutdown_sent {
            self.shutdown_sent = self.shutdown_due();
            Some(Outgoing { op: Op::Shutdown, flags: self.shutdown_sent })
        } else if self.credit_owed {
            plain(Op::CreditUpdate)
        } else if self.can_read() && !self.credit_requested {
            self.credit_requested = true;
            plain(Op::CreditRequest)
        } else {
            None
        };
        if packet.is_some() {
            self.credit_owed = false;
            self.forwarded_sent = self.forwarded;
        }
        packet
    }

    fn read(&mut self, max: usize, data: &mut Vec<u8>) {
        let len = usize::try_from(self.credit()).unwrap_or(max).min(max);
        data.resize(len, 0);
        let read = loop {
            match recv(&self.stream, &mut data[..], RecvFlags::DONTWAIT) {
                Err(Errno::INTR) => {}
                Err(errno) => break Err(errno),
                Ok((bytes, _)) => break Ok(bytes),
            }
        };
        data.truncate(read.unwrap_or(0));
        match read {
            Ok(0) => self.host_ended = true,
            Ok(_) => self.sent = self.sent.wrapping_add(length(data)),
            Err(Errno::AGAIN) => self.readable = false,
            Err(_) => {
                self.failures.reads += 1;
                self.host_ended = true;
                self.host_gone = true;
                self.flush();
            }
        }
    }
}

/// The length of a packet's data, which is far below 2^32.
fn length(data: &[u8]) -> u32 {
    u32::try_from(data.len()).unwrap_or(u32::MAX)
}
