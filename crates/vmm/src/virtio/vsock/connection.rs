//! One stream between a program on the host and one in the guest.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};

use super::packet::{Op, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND};

/// Bytes from the guest that a connection keeps for a program on the host that does not read them yet. The
/// guest is never told of more room.
pub(super) const BUFFER: u32 = 128 << 10;

/// The two ends of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Ports {
    pub(super) host: u32,
    pub(super) guest: u32,
}

/// A packet to the guest, but for what all of a connection's packets have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Outgoing {
    pub(super) op: Op,
    pub(super) flags: u32,
}

/// How far a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// A program on the host wants it, the guest is not asked yet.
    Wanted,
    /// The guest is asked.
    Asked,
    /// The guest wants it and the host agreed; the guest is not told yet.
    Accepted,
    /// Both agreed.
    Open,
    /// The guest is to be told that it is over.
    Broken,
    /// The guest has forgotten it, and a program on the host has not read all that the guest sent.
    Lingering,
}

/// A connection. Its socket is not blocking; what the socket is ready for is learnt from edge-triggered
/// events and unlearnt when a call would block.
#[derive(Debug)]
pub(super) struct Connection {
    ports: Ports,
    stream: OwnedFd,
    phase: Phase,
    /// Whether it waits in the muxer's list of those that have something to send.
    pub(super) queued: bool,

    readable: bool,
    /// The program on the host sends no more, and all of it was read.
    host_ended: bool,
    /// Bytes sent to the guest, modulo 2^32.
    sent: u32,
    guest_room: u32,
    guest_forwarded: u32,
    /// The guest was asked for credit since its last credit.
    credit_asked: bool,

    writable: bool,
    /// The program on the host receives no more.
    host_gone: bool,
    buffer: VecDeque<u8>,
    /// Bytes taken from the guest, modulo 2^32.
    received: u32,
    /// Of them, those that have left `buffer`.
    forwarded: u32,
    /// What the guest was told of `forwarded`.
    forwarded_told: u32,
    credit_owed: bool,

    guest_shutdown: u32,
    shutdown_told: u32,
    /// The program on the host was told that the guest sends no more.
    end_passed_on: bool,
}

impl Connection {
    /// One that a program on the host asks for.
    pub(super) fn from_host(ports: Ports, stream: OwnedFd) -> Self {
        Self::new(ports, stream, Phase::Wanted)
    }

    /// One that the guest asks for and a program on the host has agreed to.
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
            credit_asked: false,
            writable: true,
            host_gone: false,
            buffer: VecDeque::new(),
            received: 0,
            forwarded: 0,
            forwarded_told: 0,
            credit_owed: false,
            guest_shutdown: 0,
            shutdown_told: 0,
            end_passed_on: false,
        }
    }

    pub(super) fn forwarded(&self) -> u32 {
        self.forwarded
    }

    /// Whether the guest knows nothing of it.
    pub(super) fn is_unknown_to_guest(&self) -> bool {
        self.phase == Phase::Wanted
    }

    /// Whether it is of no use to either side: the program that asked for it went away before the guest
    /// learnt of it, or the guest ended it and everything has arrived.
    pub(super) fn is_done(&self) -> bool {
        match self.phase {
            Phase::Wanted => self.host_gone,
            Phase::Lingering => self.buffer.is_empty(),
            _ => false,
        }
    }

    /// The guest ended it at once. What it sent before it said that it sends no more still arrives: Linux
    /// does not wait for a slow reader for longer than 8 seconds.
    pub(super) fn on_reset(&mut self) {
        if self.guest_shutdown & SHUTDOWN_SEND == 0 {
            self.buffer = VecDeque::new();
        }
        self.phase = Phase::Lingering;
    }

    /// The guest is to be told that it is over; nothing else happens any more.
    pub(super) fn break_off(&mut self) {
        self.phase = Phase::Broken;
        self.buffer = VecDeque::new();
    }

    /// Takes over what the guest says about its room.
    pub(super) fn set_credit(&mut self, buf_alloc: u32, fwd_cnt: u32) {
        if (buf_alloc, fwd_cnt) != (self.guest_room, self.guest_forwarded) {
            self.credit_asked = false;
        }
        self.guest_room = buf_alloc;
        self.guest_forwarded = fwd_cnt;
    }

    /// The guest agreed to a connection that it was asked for.
    pub(super) fn on_response(&mut self) {
        if self.phase != Phase::Asked {
            self.break_off();
            return;
        }
        self.phase = Phase::Open;
        self.readable = true;
        // As Firecracker: the program's next line is the answer to its `CONNECT`. A socket that is fresh has
        // room for it.
        let line = format!("OK {}\n", self.ports.host);
        if send(&self.stream, line.as_bytes(), SendFlags::NOSIGNAL) != Ok(line.len()) {
            self.break_off();
        }
    }

    /// Whether the guest may send `len` bytes now.
    pub(super) fn accepts(&self, len: u32) -> bool {
        self.phase == Phase::Open
            && self.guest_shutdown & SHUTDOWN_SEND == 0
            && len <= BUFFER - self.received.wrapping_sub(self.forwarded)
    }

    /// The guest sent `data`, which [`Connection::accepts`] allowed.
    pub(super) fn on_data(&mut self, data: &[u8]) {
        self.received = self.received.wrapping_add(length(data));
        self.buffer.extend(data);
        self.flush();
    }

    /// The guest will send no more, or receive no more, or both.
    pub(super) fn on_shutdown(&mut self, flags: u32) {
        if self.phase != Phase::Open {
            self.break_off();
            return;
        }
        if flags & !self.guest_shutdown & SHUTDOWN_RECEIVE != 0 {
            // Fails when the program is gone, and then nobody needs to know.
            let _ = shutdown(&self.stream, Shutdown::Read);
        }
        self.guest_shutdown |= flags & SHUTDOWN_BOTH;
        self.flush();
    }

    /// The guest asks how much room there is.
    pub(super) fn on_credit_request(&mut self) {
        self.credit_owed = true;
    }

    /// The socket became ready for something.
    pub(super) fn on_event(&mut self, events: EventFlags) {
        let ended = EventFlags::HUP | EventFlags::ERR;
        if events.intersects(EventFlags::IN | EventFlags::RDHUP | ended) {
            self.readable = true;
        }
        if events.intersects(ended) {
            self.host_gone = true;
            if self.phase == Phase::Asked {
                self.break_off();
            }
        }
        if events.intersects(EventFlags::OUT | ended) {
            self.writable = true;
            self.flush();
        }
    }

    /// Hands as much of the buffer to the program on the host as it takes, and then the end, if the guest
    /// has ended.
    fn flush(&mut self) {
        while self.writable && !self.host_gone && !self.buffer.is_empty() {
            let (front, _) = self.buffer.as_slices();
            match send(&self.stream, front, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(bytes) => self.forward(bytes),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.writable = false,
                Err(_) => self.host_gone = true,
            }
        }
        if self.host_gone {
            self.forward(self.buffer.len());
        }
        if !self.buffer.is_empty() {
            return;
        }
        if self.phase == Phase::Open && self.guest_shutdown == SHUTDOWN_BOTH {
            // The last of a clean end (5.10.6.6.1): everything has arrived.
            self.break_off();
        } else if self.guest_shutdown & SHUTDOWN_SEND != 0 && !self.end_passed_on {
            let _ = shutdown(&self.stream, Shutdown::Write);
            self.end_passed_on = true;
        }
    }

    fn forward(&mut self, bytes: usize) {
        self.buffer.drain(..bytes);
        // A buffer is at most 128 KiB.
        self.forwarded = self.forwarded.wrapping_add(u32::try_from(bytes).unwrap_or(BUFFER));
        // Told early enough that a guest that sends all the time never has to stop.
        if self.forwarded.wrapping_sub(self.forwarded_told) >= BUFFER / 2 {
            self.credit_owed = true;
        }
    }

    /// Bytes that the guest has room for.
    fn credit(&self) -> u32 {
        self.guest_room.saturating_sub(self.sent.wrapping_sub(self.guest_forwarded))
    }

    fn wants_to_read(&self) -> bool {
        self.phase == Phase::Open
            && self.readable
            && !self.host_ended
            && self.guest_shutdown & SHUTDOWN_RECEIVE == 0
    }

    /// What the guest is to know about the host's end.
    fn shutdown_due(&self) -> u32 {
        let send = if self.host_ended { SHUTDOWN_SEND } else { 0 };
        let receive = if self.host_gone { SHUTDOWN_RECEIVE } else { 0 };
        send | receive
    }

    /// Whether [`Connection::next_packet`] may have a packet. While `hold` is set, the guest is not asked
    /// for new connections.
    pub(super) fn has_work(&self, hold: bool) -> bool {
        match self.phase {
            Phase::Wanted => !hold,
            Phase::Asked | Phase::Lingering => false,
            Phase::Accepted | Phase::Broken => true,
            Phase::Open => {
                (self.wants_to_read() && (self.credit() > 0 || !self.credit_asked))
                    || self.credit_owed
                    || self.shutdown_due() != self.shutdown_told
            }
        }
    }

    /// The next packet for the guest. A data packet's data, at most `most` bytes, goes into `data`, which is
    /// empty before.
    pub(super) fn next_packet(
        &mut self,
        hold: bool,
        most: usize,
        data: &mut Vec<u8>,
    ) -> Option<Outgoing> {
        let packet = |op| Some(Outgoing { op, flags: 0 });
        match self.phase {
            Phase::Wanted if hold => return None,
            Phase::Wanted => {
                self.phase = Phase::Asked;
                return packet(Op::Request);
            }
            Phase::Accepted => {
                self.phase = Phase::Open;
                self.readable = true;
                return packet(Op::Response);
            }
            Phase::Broken => return packet(Op::Reset),
            Phase::Asked | Phase::Lingering => return None,
            Phase::Open => {}
        }
        if self.wants_to_read() && self.credit() > 0 {
            self.read(most, data);
        }
        // Every packet tells the guest how far its data has come.
        let answer = if !data.is_empty() {
            packet(Op::Data)
        } else if self.shutdown_due() != self.shutdown_told {
            self.shutdown_told = self.shutdown_due();
            Some(Outgoing { op: Op::Shutdown, flags: self.shutdown_told })
        } else if self.credit_owed {
            packet(Op::CreditUpdate)
        } else if self.wants_to_read() && !self.credit_asked {
            self.credit_asked = true;
            packet(Op::CreditRequest)
        } else {
            None
        };
        if answer.is_some() {
            self.credit_owed = false;
            self.forwarded_told = self.forwarded;
        }
        answer
    }

    fn read(&mut self, most: usize, data: &mut Vec<u8>) {
        let most = usize::try_from(self.credit()).unwrap_or(most).min(most);
        data.resize(most, 0);
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
                self.host_ended = true;
                self.host_gone = true;
                self.flush();
            }
        }
    }
}

/// The length of a packet's data, which fits.
fn length(data: &[u8]) -> u32 {
    u32::try_from(data.len()).unwrap_or(u32::MAX)
}
