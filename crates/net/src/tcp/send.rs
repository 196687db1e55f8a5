//! Segments to the guest.

use std::time::Instant;

use rustix::io::Errno;
use smoltcp::wire::{IPV4_HEADER_LEN, TCP_HEADER_LEN, TcpControl, TcpRepr};

use super::{Phase, Shared, TcpFlow};
use crate::buffer::share;
use crate::flow::FlowKey;
use crate::frame::{Frame, Link, narrow};
use crate::network::link_headers;
use crate::seq::Seq;

/// The most that one read of the host's socket takes.
const READ: usize = 256 << 10;
/// The most payload of a segment: an IP packet has at most 65,535 bytes.
const MAX_PAYLOAD: usize = 65_535 - IPV4_HEADER_LEN - TCP_HEADER_LEN;

impl TcpFlow {
    /// Writes the next segment into `frame`, at most `room` bytes. Returns whether there is one.
    pub(crate) fn next_frame(
        &mut self,
        frame: &mut Frame,
        room: usize,
        now: Instant,
        shared: &mut Shared,
    ) -> bool {
        match self.phase {
            Phase::Connecting | Phase::Over => false,
            Phase::Handshake => self.next_syn(frame, now, shared),
            Phase::Calling => self.next_call(frame, shared),
            Phase::Open => {
                self.read_host(shared);
                if self.phase == Phase::Resetting {
                    return self.next_reset(frame, shared);
                }
                self.next_data(frame, room, now, shared)
            }
            Phase::Resetting => self.next_reset(frame, shared),
        }
    }

    fn next_syn(&mut self, frame: &mut Frame, now: Instant, shared: &Shared) -> bool {
        if !self.ack_due {
            return false;
        }
        let first = self.to_guest.unacked;
        self.to_guest.next = first + 1;
        self.to_guest.sent = first + 1;
        // The window of a SYN is not scaled.
        let window = narrow(self.window());
        let scaled = self.from_guest.shift > 0;
        let syn = TcpRepr {
            control: TcpControl::Syn,
            window_len: window,
            window_scale: scaled.then_some(self.from_guest.shift),
            max_seg_size: Some(narrow(self.link_mss(&shared.link))),
            ..self.repr(first)
        };
        self.from_guest.edge = self.from_guest.next + usize::from(window);
        frame.tcp(&shared.link, &self.key, &syn, (0, self.to_guest.mss), |_| {});
        self.ack_due = false;
        self.deadline = Some(now + self.timeout());
        true
    }

    fn next_reset(&mut self, frame: &mut Frame, shared: &Shared) -> bool {
        let reset = TcpRepr { control: TcpControl::Rst, ..self.repr(self.to_guest.sent) };
        // A guest that has not answered ignores an acknowledgement of anything else.
        let ack_number = reset.ack_number.filter(|_| self.from_guest.is_known);
        let reset = TcpRepr { ack_number, ..reset };
        frame.tcp(&shared.link, &self.key, &reset, (0, self.to_guest.mss), |_| {});
        self.phase = Phase::Over;
        true
    }

    fn next_data(
        &mut self,
        frame: &mut Frame,
        room: usize,
        now: Instant,
        shared: &mut Shared,
    ) -> bool {
        let to_guest = &self.to_guest;
        let (in_flight, unsent) = (to_guest.in_flight(), to_guest.unsent());
        let mss = usize::from(to_guest.mss).min(self.link_mss(&shared.link));
        let mut most = room.saturating_sub(link_headers(self.key.guest.ip()) + TCP_HEADER_LEN);
        if shared.link.has_tso(self.key.guest.ip()) && most >= mss {
            // Whole packets, so that no small one is between large ones.
            most = most.min(MAX_PAYLOAD) / mss * mss;
        } else {
            most = most.min(mss);
        }
        let usable = to_guest.window.saturating_sub(in_flight);
        let mut len = unsent.min(usable).min(most);
        if len < unsent && len < mss && in_flight > 0 {
            // The window allows only a small segment, and a larger one is coming.
            len = 0;
        }
        if self.probe_due && len == 0 {
            len = unsent.min(1);
        }
        let is_last = in_flight + len == to_guest.queue.len();
        let fin = to_guest.fin && is_last && !to_guest.fin_acked;
        if len == 0 && !fin && !self.ack_due && !self.keepalive_due {
            if unsent > 0 && in_flight == 0 && self.deadline.is_none() {
                // The window is closed.
                self.deadline = Some(now + self.timeout());
            }
            return false;
        }
        let control = match (fin, is_last && len > 0) {
            (true, _) => TcpControl::Fin,
            (false, true) => TcpControl::Psh,
            (false, false) => TcpControl::None,
        };
        // A byte before what the guest expects makes it answer (RFC 9293, 3.8.4).
        let is_keepalive = self.keepalive_due && len == 0 && !fin;
        let seq = to_guest.next;
        let seq = if is_keepalive { Seq(seq.0.wrapping_sub(1)) } else { seq };
        let segment = TcpRepr { control, ..self.repr(seq) };
        frame.tcp(&shared.link, &self.key, &segment, (len, narrow(mss)), |payload| {
            to_guest.queue.copy_to(in_flight, payload);
        });
        self.sent(len + usize::from(fin), now);
        true
    }

    /// A segment with `len` of the sequence space was made.
    fn sent(&mut self, len: usize, now: Instant) {
        let window = self.window() >> self.from_guest.shift << self.from_guest.shift;
        let edge = self.from_guest.next + window;
        self.from_guest.edge = self.from_guest.edge.latest(edge);
        let to_guest = &mut self.to_guest;
        // A deadline that is there was that of an idle flow.
        let was_idle = to_guest.sent == to_guest.unacked;
        to_guest.next += len;
        to_guest.sent = to_guest.sent.latest(to_guest.next);
        self.ack_due = false;
        self.probe_due = false;
        self.keepalive_due = false;
        let is_waiting = self.to_guest.sent != self.to_guest.unacked && len > 0;
        if is_waiting && (was_idle || self.deadline.is_none()) {
            self.deadline = Some(now + self.timeout());
        }
        self.end_if_complete();
    }

    /// Reads what the next segment can have.
    fn read_host(&mut self, shared: &mut Shared) {
        let Some(end) = &mut self.end else { return };
        let to_guest = &mut self.to_guest;
        to_guest.readable |= end.is_ready();
        while to_guest.readable && !to_guest.fin && to_guest.unsent() < MAX_PAYLOAD {
            let held = to_guest.queue.len();
            let (used, _) = shared.pool.usage();
            let room = share(used).saturating_sub(held).min(READ);
            if room == 0 {
                break;
            }
            match end.receive(&mut to_guest.queue, room, &mut shared.pool) {
                Ok(0) => to_guest.fin = true,
                // It is empty, and what arrives from now on is an event.
                Ok(count) if count < room && !to_guest.ends => to_guest.readable = false,
                Ok(_) => {}
                Err(Errno::AGAIN) => to_guest.readable = false,
                Err(_) => {
                    self.reset_guest();
                    return;
                }
            }
        }
    }

    /// The segment size of this link.
    pub(super) fn link_mss(&self, link: &Link) -> usize {
        link.network.ip_payload(self.key.guest.ip()) - TCP_HEADER_LEN
    }

    /// An acknowledgement.
    pub(super) fn repr(&self, seq: Seq) -> TcpRepr<'static> {
        let window = narrow(self.window() >> self.from_guest.shift);
        TcpRepr { window_len: window, ..ack_repr(&self.key, seq, self.from_guest.next) }
    }
}

/// A segment without a window, data or options.
pub(crate) fn ack_repr(key: &FlowKey, seq: Seq, ack: Seq) -> TcpRepr<'static> {
    TcpRepr {
        src_port: key.remote.port(),
        dst_port: key.guest.port(),
        control: TcpControl::None,
        seq_number: seq.into(),
        ack_number: Some(ack.into()),
        window_len: 0,
        window_scale: None,
        max_seg_size: None,
        sack_permitted: false,
        sack_ranges: [None; 3],
        timestamp: None,
        payload: &[],
    }
}
