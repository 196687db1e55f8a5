//! Segments to the guest.

use std::time::Instant;

use rustix::io::Errno;
use smoltcp::wire::{IPV4_HEADER_LEN, TCP_HEADER_LEN, TcpControl, TcpRepr};

use super::stage::Payload;
use super::{Phase, Shared, TcpFlow, whole_segments};
use crate::flow::FlowKey;
use crate::frame::{Frame, Link, narrow};
use crate::network::link_headers;
use crate::seq::Seq;

/// The most payload of a segment: an IP packet has at most 65,535 bytes.
const MAX_PAYLOAD: usize = 65_535 - IPV4_HEADER_LEN - TCP_HEADER_LEN;
/// The part of the window that is free when a burst begins, or a segment if that is less.
const BURST: usize = 4;

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
            Phase::Open => self.next_data(frame, room, now, shared),
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
        frame.tcp(&shared.link, &self.key, &syn, (0, self.to_guest.mss));
        self.ack_due = false;
        self.deadline = Some(now + self.timeout());
        true
    }

    fn next_reset(&mut self, frame: &mut Frame, shared: &Shared) -> bool {
        let reset = TcpRepr { control: TcpControl::Rst, ..self.repr(self.to_guest.sent) };
        // A guest that has not answered ignores an acknowledgement of anything else.
        let ack_number = reset.ack_number.filter(|_| self.from_guest.is_known);
        let reset = TcpRepr { ack_number, ..reset };
        frame.tcp(&shared.link, &self.key, &reset, (0, self.to_guest.mss));
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
        let mss = usize::from(self.to_guest.mss).min(self.link_mss(&shared.link));
        let start = link_headers(self.key.guest.ip()) + TCP_HEADER_LEN;
        let room = room.saturating_sub(start);
        let most = whole_segments(self.most_payload(&shared.link).min(room), mss);
        let in_flight = self.to_guest.in_flight();
        let window = self.to_guest.window.min(self.to_guest.bytes.limit(shared));
        let usable = window.saturating_sub(in_flight);
        // A window that is nearly used up opens with what is in flight, so a burst waits until it
        // is worth waking the guest, and goes on to the end of the window.
        let least =
            if self.to_guest.bursts { mss } else { (window / BURST).clamp(mss, MAX_PAYLOAD) };
        self.to_guest.bursts = in_flight == 0 || usable >= least;
        let mut wanted = if self.to_guest.bursts { usable.min(most) } else { 0 };
        if self.probe_due {
            wanted = wanted.max(1);
        }
        let payload =
            Payload { start, filled: 0, len: wanted, more: usable.saturating_sub(wanted), most };
        let Some(len) = self.read_host(frame, payload, shared) else {
            self.reset_guest();
            return self.next_reset(frame, shared);
        };
        let to_guest = &self.to_guest;
        let fin = to_guest.fin == Some(to_guest.next + len) && !to_guest.fin_acked;
        if len == 0 && !fin && !self.ack_due && !self.keepalive_due {
            if to_guest.has_more_after(0) && in_flight == 0 && self.deadline.is_none() {
                // The window is closed.
                self.deadline = Some(now + self.timeout());
            }
            return false;
        }
        let control = match (fin, len > 0 && len < wanted) {
            (true, _) => TcpControl::Fin,
            (false, true) => TcpControl::Psh,
            (false, false) => TcpControl::None,
        };
        // A byte before what the guest expects makes it answer (RFC 9293, 3.8.4).
        let is_keepalive = self.keepalive_due && len == 0 && !fin;
        let seq = to_guest.next;
        let seq = if is_keepalive { Seq(seq.0.wrapping_sub(1)) } else { seq };
        let segment = TcpRepr { control, ..self.repr(seq) };
        frame.tcp(&shared.link, &self.key, &segment, (len, narrow(mss)));
        self.sent(len + usize::from(fin), now);
        true
    }

    /// Reads what the next segment has, at most `payload`, into `frame`, and returns how much;
    /// `None` after the last byte of a host that has failed.
    fn read_host(
        &mut self,
        frame: &mut Frame,
        mut payload: Payload,
        shared: &mut Shared,
    ) -> Option<usize> {
        let Some(end) = &mut self.end else { return Some(0) };
        let to_guest = &mut self.to_guest;
        to_guest.readable |= end.is_ready();
        let in_flight = to_guest.in_flight();
        while payload.filled < payload.len && to_guest.has_more_after(payload.filled) {
            let offset = in_flight + payload.filled;
            match to_guest.bytes.read(end, offset, (frame, &mut payload), shared) {
                // After an error has been read, an end is what is left of it.
                Ok(true) if self.has_failed => to_guest.readable = false,
                Ok(true) => to_guest.fin = Some(to_guest.next + payload.filled),
                // What is not full was emptied, and what arrives from now on is an event.
                Ok(false) => {
                    to_guest.readable = payload.filled == payload.len || to_guest.reads_on;
                }
                Err(Errno::AGAIN) => to_guest.readable = false,
                Err(_) => {
                    self.has_failed = true;
                    to_guest.readable = false;
                }
            }
        }
        if self.has_failed && payload.filled == 0 && !to_guest.has_more_after(0) {
            return None;
        }
        Some(payload.filled)
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

    /// Sends again from the first byte without an acknowledgement.
    pub(super) fn rewind(&mut self, shared: &mut Shared) {
        let to_guest = &mut self.to_guest;
        to_guest.next = to_guest.unacked;
        to_guest.recovery = to_guest.sent;
        to_guest.duplicate_acks = 0;
        to_guest.readable = true;
        shared.counters.retransmissions += 1;
        if to_guest.bytes.rewind(self.end.as_ref()).is_err() {
            self.reset_guest();
        }
    }

    /// The most payload of a segment on this link.
    pub(super) fn most_payload(&self, link: &Link) -> usize {
        if link.has_tso(self.key.guest.ip()) {
            MAX_PAYLOAD
        } else {
            self.link_mss(link).min(usize::from(self.to_guest.mss))
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
