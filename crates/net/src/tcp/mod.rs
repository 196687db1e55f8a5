//! A TCP connection of the guest, split in two: this side answers the guest as the server, or calls
//! it as the client, and the host's kernel has the other half, a connected socket.
//!
//! The link to the guest is memory: it neither loses nor reorders frames, so there is no congestion
//! window and no estimate of the round trip, and a segment out of order is dropped. A guest still
//! drops segments when it is short of memory, so there are retransmissions.

mod call;
mod end;
mod receive;
mod send;
mod stage;
mod unacked;
mod windows;

pub(crate) use send::ack_repr;

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::sockopt::set_socket_linger;

use crate::buffer::{Pool, Queue};
use crate::burst::Part;
use crate::counters::Counters;
use crate::flow::FlowKey;
use crate::frame::Link;
use crate::metadata::Connection;
use crate::packet::Segment;
use crate::seq::Seq;
use crate::state::SavedFlow;
use end::End;
use stage::Stage;
use unacked::Unacked;
use windows::Windows;

/// The shift of this side's window, so that it reaches the largest one (RFC 7323).
const WINDOW_SHIFT: u8 = 3;
/// The segment size of a guest that does not name its own (RFC 9293, 3.7.1).
const DEFAULT_MSS: u16 = 536;
/// The smallest segment size that is used, so that a hostile one does not cost a frame per byte.
const MIN_MSS: u16 = 64;
/// The first time-out for an acknowledgement; each further one is twice as long.
const RTO: Duration = Duration::from_millis(500);
const RTO_LIMIT: Duration = Duration::from_secs(60);
/// Time-outs in a row after which the guest's side is treated as gone.
const MAX_ATTEMPTS: u32 = 10;
/// As long as Linux tries to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(130);
/// Events after which a socket has something to read that stops a read.
const STOPS: EventFlags =
    EventFlags::RDHUP.union(EventFlags::HUP).union(EventFlags::ERR).union(EventFlags::PRI);
/// How long a guest that has sent its FIN is silent before it is probed.
const HALF_CLOSED_IDLE: Duration = Duration::from_secs(60);

/// What flows share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) link: Link,
    pub(crate) pool: Pool,
    pub(crate) windows: Windows,
    /// Bytes of datagrams that wait for their sockets.
    pub(crate) waiting: usize,
    /// Which of the host's DNS resolvers is used: how many before it did not answer.
    pub(crate) resolver: u16,
    pub(crate) counters: Counters,
    /// Segments that were read together.
    pub(crate) stage: Stage,
    /// Where a read that removes bytes of a socket pretends to put them.
    pub(crate) discarded: Vec<u8>,
}

impl Shared {
    pub(crate) fn new(link: Link) -> Self {
        Self {
            link,
            pool: Pool::default(),
            windows: Windows::default(),
            waiting: 0,
            resolver: 0,
            counters: Counters::default(),
            stage: Stage::default(),
            discarded: Vec::new(),
        }
    }
}

/// Where a flow is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// There is no connected socket yet. The guest has its SYN sent.
    Connecting,
    /// The host is connected, and the guest has not acknowledged that.
    Handshake,
    /// The host has connected to a published port, and the guest has not answered the SYN.
    Calling,
    Open,
    /// The guest is to be reset, and then the flow ends.
    Resetting,
    /// Nothing is left to do.
    Over,
}

/// The guest's bytes, on their way to the host.
#[derive(Debug)]
struct FromGuest {
    /// The sequence number of the guest's SYN.
    first: Seq,
    /// The next byte.
    next: Seq,
    /// The end of the window that the guest knows.
    edge: Seq,
    /// The most bytes that the flow holds, which are promised to the guest.
    limit: usize,
    /// What the host's socket did not take.
    queue: Queue,
    /// What the flow has of the burst that is being handled.
    unwritten: Vec<Part>,
    unwritten_len: usize,
    /// The host's socket takes nothing until an event.
    blocked: bool,
    /// The shift of the window that the guest knows.
    shift: u8,
    /// The guest has sent its SYN, so the numbers above are known.
    is_known: bool,
    /// The guest's FIN has arrived; it is in `next`.
    fin: bool,
    /// The host has all of it, and knows of the FIN.
    shut: bool,
}

/// The host's bytes, on their way to the guest.
#[derive(Debug)]
struct ToGuest {
    /// The first byte without an acknowledgement.
    unacked: Seq,
    /// The next byte to send.
    next: Seq,
    /// The end of all that was ever sent.
    sent: Seq,
    /// The guest's window in bytes after `unacked`.
    window: usize,
    shift: u8,
    mss: u16,
    /// Bytes from `unacked` on.
    bytes: Unacked,
    /// The host's socket may have something after `next`.
    readable: bool,
    /// A read that returns less than there is room for is not the last one. The host's socket may
    /// have what stops a read and is no event afterwards: an end, an error, an urgent mark
    /// (tcp(7)), or, in a unix socket, descriptors.
    reads_on: bool,
    /// The number of the host's FIN, which follows its last byte, when that was read.
    fin: Option<Seq>,
    fin_acked: bool,
    /// The guest has acknowledged some in the burst that is being handled.
    is_consumed: bool,
    /// The window is being used up.
    bursts: bool,
    duplicate_acks: u8,
    /// Duplicate acknowledgements of bytes before this one are of an earlier loss.
    recovery: Seq,
}

/// A connection.
#[derive(Debug)]
pub(crate) struct TcpFlow {
    key: FlowKey,
    /// The host has opened it, to a published port.
    is_published: bool,
    phase: Phase,
    /// `None` before there is one and after the guest is reset.
    end: Option<End>,
    /// The host's connection has failed, so it takes nothing. As a kernel does, this side delivers
    /// what arrived before, and then resets the guest.
    has_failed: bool,
    from_guest: FromGuest,
    to_guest: ToGuest,
    /// A segment is due even if it has no data: an acknowledgement, a SYN.
    ack_due: bool,
    /// One byte is due even if the window is closed.
    probe_due: bool,
    /// A segment that makes the guest answer is due.
    keepalive_due: bool,
    deadline: Option<Instant>,
    /// Time-outs since the guest was last heard.
    attempts: u32,
    /// Time-outs since the guest last took something: each doubles the next one.
    backoff: u32,
}

impl TcpFlow {
    /// The flow of a guest's SYN. `first` is the sequence number of this side.
    pub(crate) fn new(
        key: FlowKey,
        syn: &Segment<'_>,
        first: Seq,
        now: Instant,
        shared: &mut Shared,
    ) -> Self {
        let limit = shared.windows.open();
        let window_shift = syn.window_shift.map(|shift| shift.min(14));
        Self {
            key,
            is_published: false,
            phase: Phase::Connecting,
            end: None,
            has_failed: false,
            from_guest: FromGuest {
                first: syn.seq,
                next: syn.seq + 1,
                edge: syn.seq + 1,
                shift: if window_shift.is_some() { WINDOW_SHIFT } else { 0 },
                is_known: true,
                ..FromGuest::unknown(limit)
            },
            to_guest: ToGuest {
                window: usize::from(syn.window),
                shift: window_shift.unwrap_or(0),
                mss: syn.mss.unwrap_or(DEFAULT_MSS).max(MIN_MSS),
                ..ToGuest::unknown(first)
            },
            ack_due: false,
            probe_due: false,
            keepalive_due: false,
            deadline: Some(now + CONNECT_TIMEOUT),
            attempts: 0,
            backoff: 0,
        }
    }

    pub(crate) const fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Over)
    }

    pub(crate) const fn is_published(&self) -> bool {
        self.is_published
    }

    pub(crate) const fn is_connecting(&self) -> bool {
        matches!(self.phase, Phase::Connecting)
    }

    pub(crate) const fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// The sequence number of the guest's SYN.
    pub(crate) const fn guest_first(&self) -> Seq {
        self.from_guest.first
    }

    /// What a snapshot keeps. A guest that has not answered a SYN has nothing to reset: an answer
    /// after a thaw is of no connection.
    pub(crate) fn saved(&self) -> Option<SavedFlow> {
        let next_to_guest = (!self.is_connecting()).then_some(self.to_guest.sent);
        let next_from_guest = self.from_guest.next;
        let saved = SavedFlow { key: self.key, next_to_guest, next_from_guest };
        self.from_guest.is_known.then_some(saved)
    }

    /// The broker's socket, which may not be connected yet.
    pub(crate) fn set_socket(&mut self, socket: OwnedFd) {
        self.to_guest.bytes = Unacked::of_socket(&socket);
        self.end = Some(End::Socket(socket));
    }

    /// Connects the flow to the metadata service.
    pub(crate) fn set_metadata(&mut self, connection: Connection) {
        self.end = Some(End::Metadata(Box::new(connection)));
        self.connected();
        // It has no events, so it is read until it has nothing.
        self.to_guest.reads_on = true;
    }

    /// When the guest last used its connection to the metadata service, if it is one.
    pub(crate) fn metadata_used(&self) -> Option<Instant> {
        match self.end.as_ref()? {
            End::Socket(_) => None,
            End::Metadata(connection) => Some(connection.last_used()),
        }
    }

    fn connected(&mut self) {
        self.phase = Phase::Handshake;
        self.to_guest.readable = true;
        self.ack_due = true;
        self.deadline = None;
    }

    /// Events of the socket. An error is that of the connect.
    pub(crate) fn socket_events(
        &mut self,
        events: EventFlags,
        shared: &mut Shared,
    ) -> Result<(), Errno> {
        let Some(end) = &self.end else { return Ok(()) };
        let failed = events.contains(EventFlags::ERR);
        if self.is_connecting() {
            if failed || events.contains(EventFlags::OUT) {
                end.error()?;
                self.connected();
                self.to_guest.reads_on |= events.intersects(STOPS);
            }
            return Ok(());
        }
        let failed = failed && end.error().is_err();
        self.to_guest.reads_on |= events.intersects(STOPS);
        if self.phase == Phase::Calling {
            if failed {
                self.reset_guest();
            }
            return Ok(());
        }
        if failed {
            self.host_failed(shared);
        }
        self.to_guest.readable = true;
        if events.intersects(EventFlags::OUT | EventFlags::HUP) {
            self.from_guest.blocked = false;
            self.write_queued(shared);
        }
        Ok(())
    }

    /// The deadline has passed. An error is that of the connect.
    pub(crate) fn time_out(&mut self, shared: &mut Shared) -> Result<(), Errno> {
        let passed = self.deadline.take();
        self.attempts += 1;
        self.backoff += 1;
        match self.phase {
            Phase::Connecting => return Err(Errno::TIMEDOUT),
            Phase::Calling => self.call_again(passed, shared),
            Phase::Handshake | Phase::Open if self.attempts > MAX_ATTEMPTS => {
                self.reset_host();
                self.reset_guest();
            }
            Phase::Handshake => self.ack_due = true,
            Phase::Open => {
                let to_guest = &self.to_guest;
                if to_guest.sent != to_guest.unacked {
                    self.rewind(shared);
                }
                self.probe_due = true;
                self.keepalive_due = true;
            }
            Phase::Resetting | Phase::Over => {}
        }
        Ok(())
    }

    /// Ends the flow without another word to the guest, and gives back what it holds.
    pub(crate) fn close(&mut self, shared: &mut Shared) {
        self.phase = Phase::Over;
        shared.windows.close(self.from_guest.limit);
        self.from_guest.queue.clear(&mut shared.pool);
        self.to_guest.bytes.clear(shared);
        self.end = None;
        self.deadline = None;
    }

    /// Makes the host's kernel reset the connection rather than close it.
    pub(crate) fn reset_host(&mut self) {
        if let Some(end) = self.end.take() {
            end.reset();
        }
    }

    /// The host takes nothing any more. What it has sent is still to be read.
    fn host_failed(&mut self, shared: &mut Shared) {
        self.has_failed = true;
        self.from_guest.queue.clear(&mut shared.pool);
        self.to_guest.readable = true;
    }

    fn reset_guest(&mut self) {
        // A guest that was sent nothing has nothing to reset.
        let is_called = self.from_guest.is_known || self.to_guest.sent != self.to_guest.unacked;
        self.phase = if is_called { Phase::Resetting } else { Phase::Over };
        self.end = None;
    }

    /// Tells the host that the guest has sent all, when it has all of it.
    fn shut_when_written(&mut self) {
        let from_guest = &mut self.from_guest;
        if let Some(end) = &mut self.end
            && from_guest.fin
            && !from_guest.shut
            && !self.has_failed
            && from_guest.held() == 0
        {
            end.shut();
            from_guest.shut = true;
        }
    }

    /// Ends the flow when both directions have ended and the guest knows.
    fn end_if_complete(&mut self) {
        // A socket that is closed with bytes in it resets the connection.
        let is_removed = !self.to_guest.is_consumed;
        if self.from_guest.shut && self.to_guest.fin_acked && is_removed && !self.ack_due {
            self.phase = Phase::Over;
        }
    }

    fn timeout(&self) -> Duration {
        RTO.saturating_mul(1 << self.backoff.min(MAX_ATTEMPTS)).min(RTO_LIMIT)
    }
}

/// As many of `bytes` as whole segments of `mss` bytes have, so that no small one is between large
/// ones; fewer than one has are all taken.
const fn whole_segments(bytes: usize, mss: usize) -> usize {
    if bytes > mss { bytes / mss * mss } else { bytes }
}

/// Closes a socket with a reset, if it is one of TCP.
pub(crate) fn reset_socket(socket: OwnedFd) {
    // Without the option it is closed, which the other side sees as an end of data.
    let _ = set_socket_linger(&socket, Some(Duration::ZERO));
    drop(socket);
}

impl FromGuest {
    /// Before the guest has sent anything.
    fn unknown(limit: usize) -> Self {
        Self {
            first: Seq::default(),
            next: Seq::default(),
            edge: Seq::default(),
            limit,
            queue: Queue::default(),
            unwritten: Vec::new(),
            unwritten_len: 0,
            blocked: false,
            shift: WINDOW_SHIFT,
            is_known: false,
            fin: false,
            shut: false,
        }
    }

    /// Bytes that the host does not have.
    const fn held(&self) -> usize {
        self.queue.len() + self.unwritten_len
    }
}

impl ToGuest {
    /// Before the guest has sent anything; `first` is this side's sequence number.
    fn unknown(first: Seq) -> Self {
        Self {
            unacked: first,
            next: first,
            sent: first,
            window: 0,
            shift: 0,
            mss: DEFAULT_MSS,
            bytes: Unacked::default(),
            readable: false,
            reads_on: false,
            fin: None,
            fin_acked: false,
            is_consumed: false,
            bursts: false,
            duplicate_acks: 0,
            recovery: first,
        }
    }

    /// Bytes that are sent and not acknowledged; a FIN counts.
    fn in_flight(&self) -> usize {
        self.next.bytes_since(self.unacked)
    }

    /// Whether the host may have sent something after the next `len` bytes.
    fn has_more_after(&self, len: usize) -> bool {
        self.readable && self.fin.is_none_or(|fin| (self.next + len).is_before(fin))
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
