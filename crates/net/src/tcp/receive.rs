//! Segments from the guest.

use std::time::Instant;

use rustix::io::Errno;

use super::end::End;
use super::{HALF_CLOSED_IDLE, Phase, Shared, TcpFlow, whole_segments};
use crate::burst::Burst;
use crate::packet::Segment;
use crate::seq::Seq;

/// The most slices that one call writes, of the 1,024 that the kernel takes.
const MAX_SLICES: usize = 256;

impl TcpFlow {
    /// A segment of the current frame of `burst`.
    pub(crate) fn segment(
        &mut self,
        segment: &Segment<'_>,
        burst: Burst<'_>,
        now: Instant,
        shared: &mut Shared,
    ) {
        if self.phase == Phase::Calling {
            self.answered(segment, shared);
            return;
        }
        if segment.rst {
            self.guest_reset(segment, burst, shared);
            return;
        }
        match self.phase {
            Phase::Connecting | Phase::Calling | Phase::Resetting | Phase::Over => return,
            Phase::Handshake => {
                if segment.syn {
                    self.ack_due = true;
                    return;
                }
                let to_guest = &self.to_guest;
                if to_guest.sent == to_guest.unacked || segment.ack != Some(to_guest.sent) {
                    return;
                }
                self.phase = Phase::Open;
                self.attempts = 0;
                self.backoff = 0;
                self.deadline = None;
                self.to_guest.unacked = self.to_guest.sent;
                self.to_guest.next = self.to_guest.sent;
            }
            Phase::Open => {}
        }
        let Some(ack) = segment.ack else { return };
        if segment.syn {
            // A repeated SYN, or an old one: the guest learns where the flow is (RFC 5961, 4.2).
            self.ack_due = true;
            return;
        }
        if self.to_guest.sent.is_before(ack) {
            self.ack_due = true;
            return;
        }
        self.acknowledged(ack, segment, now, shared);
        if segment.len() > 0 || segment.seq != self.from_guest.next {
            self.data(segment, burst, shared);
        }
        if self.from_guest.fin && self.to_guest.fin.is_none() && self.deadline.is_none() {
            self.deadline = Some(now + HALF_CLOSED_IDLE);
        }
        self.end_if_complete();
    }

    /// A guest has no reason to forge resets of its own flows, so one in the window counts.
    fn guest_reset(&mut self, segment: &Segment<'_>, burst: Burst<'_>, shared: &mut Shared) {
        let from_guest = &self.from_guest;
        let offset = segment.seq.since(from_guest.next);
        let window = from_guest.edge.bytes_since(from_guest.next);
        let is_in_window = usize::try_from(offset).is_ok_and(|offset| offset <= window);
        if self.phase == Phase::Connecting || is_in_window {
            // What came before the reset.
            self.write_burst(burst, shared);
            self.reset_host();
            self.phase = Phase::Over;
        }
    }

    fn acknowledged(&mut self, ack: Seq, segment: &Segment<'_>, now: Instant, shared: &mut Shared) {
        let to_guest = &mut self.to_guest;
        if ack.is_before(to_guest.unacked) {
            return;
        }
        self.attempts = 0;
        let window = usize::from(segment.window) << to_guest.shift;
        let acked = ack.bytes_since(to_guest.unacked);
        if acked > 0 || window > to_guest.window {
            self.backoff = 0;
        }
        if acked > 0 {
            let has_fin = to_guest.fin.is_some_and(|fin| fin.is_before(ack));
            let data = acked - usize::from(has_fin && !to_guest.fin_acked);
            to_guest.fin_acked = has_fin;
            to_guest.unacked = ack;
            to_guest.bytes.consume(data, shared);
            to_guest.is_consumed = true;
            if to_guest.next.is_before(ack) {
                // The guest has kept what was sent after a lost segment.
                to_guest.next = ack;
                if to_guest.bytes.rewind(self.end.as_ref()).is_err() {
                    self.reset_guest();
                    return;
                }
            }
            to_guest.duplicate_acks = 0;
            self.deadline = (to_guest.sent != ack).then(|| now + super::RTO);
        } else if window > to_guest.window && to_guest.in_flight() > to_guest.window {
            // The guest had closed its window on what was in flight, and has dropped that.
            self.rewind(shared);
        } else if segment.len() == 0 && window == to_guest.window && ack != to_guest.sent {
            to_guest.duplicate_acks = to_guest.duplicate_acks.saturating_add(1);
            if to_guest.duplicate_acks == 3 && !ack.is_before(to_guest.recovery) {
                self.rewind(shared);
            }
        }
        self.to_guest.window = window;
    }

    /// Takes what is next in order and in the window.
    fn data(&mut self, segment: &Segment<'_>, burst: Burst<'_>, shared: &mut Shared) {
        self.ack_due = true;
        let known = self.from_guest.next.since(segment.seq);
        let Ok(known) = usize::try_from(known) else { return };
        if known >= segment.len() || self.from_guest.fin {
            return;
        }
        if self.has_failed && self.to_guest.window == 0 && self.to_guest.in_flight() == 0 {
            // A guest that writes and does not read learns now that the host takes nothing.
            self.reset_guest();
            return;
        }
        let new = segment.payload.get(known..).unwrap_or_default();
        let room = self.from_guest.limit.saturating_sub(self.from_guest.held());
        let taken = &new[..new.len().min(room)];
        if !self.deliver(taken, burst, shared) {
            return;
        }
        self.from_guest.next += taken.len();
        self.from_guest.limit = shared.windows.grow(self.from_guest.limit, taken.len());
        if segment.fin && taken.len() == new.len() {
            self.from_guest.next += 1;
            self.from_guest.fin = true;
            self.shut_when_written();
        }
    }

    /// Takes bytes for the host. A socket gets those of a burst at its end. Returns whether the
    /// host is there.
    fn deliver(&mut self, bytes: &[u8], burst: Burst<'_>, shared: &mut Shared) -> bool {
        let from_guest = &mut self.from_guest;
        match &mut self.end {
            None => return false,
            Some(_) if self.has_failed => return false,
            Some(End::Metadata(connection)) => {
                if connection.write(bytes).is_err() {
                    self.reset_guest();
                    return false;
                }
            }
            // An end alone.
            Some(End::Socket(_)) if bytes.is_empty() => {}
            Some(End::Socket(_)) if from_guest.queue.len() > 0 => {
                from_guest.queue.push(bytes, &mut shared.pool);
            }
            Some(End::Socket(_)) => {
                from_guest.unwritten.push(burst.part(bytes));
                from_guest.unwritten_len += bytes.len();
            }
        }
        true
    }

    /// Whether [`TcpFlow::end_burst`] is due.
    pub(crate) const fn is_in_burst(&self) -> bool {
        self.from_guest.unwritten_len > 0 || self.to_guest.is_consumed
    }

    /// Does once what the segments of a burst have made due.
    pub(crate) fn end_burst(&mut self, burst: Burst<'_>, shared: &mut Shared) {
        if std::mem::take(&mut self.to_guest.is_consumed) {
            let rest = self.to_guest.in_flight();
            if self.to_guest.bytes.discard(self.end.as_ref(), rest, shared).is_err() {
                self.reset_guest();
                return;
            }
            self.end_if_complete();
        }
        if self.from_guest.unwritten_len > 0 {
            self.write_burst(burst, shared);
        }
    }

    /// Writes what the flow has of a burst, and queues what the host's socket does not take.
    fn write_burst(&mut self, burst: Burst<'_>, shared: &mut Shared) {
        let Some(end) = &mut self.end else { return };
        let from_guest = &mut self.from_guest;
        let parts = std::mem::take(&mut from_guest.unwritten);
        from_guest.unwritten_len = 0;
        let mut written = 0;
        for parts in parts.chunks(MAX_SLICES) {
            let slices: Vec<&[u8]> = parts.iter().map(|part| burst.bytes(*part)).collect();
            let len: usize = slices.iter().map(|slice| slice.len()).sum();
            if !from_guest.blocked {
                written = match end.send_all(&slices) {
                    Ok(written) => written,
                    Err(Errno::AGAIN) => 0,
                    Err(_) => {
                        self.host_failed(shared);
                        return;
                    }
                };
                from_guest.blocked = written < len;
            }
            for slice in slices {
                let rest = slice.get(written..).unwrap_or_default();
                written = written.saturating_sub(slice.len());
                from_guest.queue.push(rest, &mut shared.pool);
            }
        }
        self.has_written(shared);
    }

    /// Writes what is queued, as far as the host's socket takes it.
    pub(crate) fn write_queued(&mut self, shared: &mut Shared) {
        let Some(end) = &mut self.end else { return };
        while self.from_guest.queue.len() > 0 && !self.from_guest.blocked {
            match end.send_queued(&mut self.from_guest.queue, &mut shared.pool) {
                Ok(()) => {}
                Err(Errno::AGAIN) => self.from_guest.blocked = true,
                Err(_) => {
                    self.host_failed(shared);
                    return;
                }
            }
        }
        self.has_written(shared);
    }

    /// After the host has taken bytes.
    fn has_written(&mut self, shared: &mut Shared) {
        self.shut_when_written();
        let from_guest = &self.from_guest;
        let known = from_guest.edge.bytes_since(from_guest.next);
        let unknown = from_guest.limit.saturating_sub(from_guest.held() + known);
        self.from_guest.limit = shared.windows.shrink(from_guest.limit, unknown);
        // The guest learns of a larger window when it is worth a segment (RFC 9293, 3.8.6.2.2).
        let gained = self.window().saturating_sub(known);
        if gained > 0 && (gained >= self.from_guest.limit / 2 || known == 0) {
            self.ack_due = true;
        }
        self.end_if_complete();
    }

    /// Bytes that the guest may send.
    pub(super) fn window(&self) -> usize {
        let from_guest = &self.from_guest;
        let window = from_guest.limit.saturating_sub(from_guest.held());
        // Its segments are as large as those that it takes.
        let window = whole_segments(window, usize::from(self.to_guest.mss));
        if from_guest.shift == 0 { window.min(usize::from(u16::MAX)) } else { window }
    }
}
