//! Connections to a published port, which this side opens.

use std::time::Instant;

use smoltcp::wire::{TcpControl, TcpRepr};

use super::{DEFAULT_MSS, FromGuest, MIN_MSS, Phase, RTO, Shared, TcpFlow, ToGuest, WINDOW_SHIFT};
use crate::flow::FlowKey;
use crate::frame::{Frame, narrow};
use crate::packet::Segment;
use crate::seq::Seq;

/// How often the SYN is sent again: the guest is given up after 15.5 seconds.
const MAX_CALLS: u32 = 4;

impl TcpFlow {
    /// The flow of a connection that the broker has accepted. `first` is this side's sequence
    /// number.
    pub(crate) fn call(key: FlowKey, first: Seq, now: Instant, shared: &mut Shared) -> Self {
        let limit = shared.windows.open();
        Self {
            key,
            is_published: true,
            phase: Phase::Calling,
            end: None,
            has_failed: false,
            from_guest: FromGuest::unknown(limit),
            // The port may be a unix socket.
            to_guest: ToGuest { readable: true, reads_on: true, ..ToGuest::unknown(first) },
            ack_due: true,
            probe_due: false,
            keepalive_due: false,
            deadline: Some(now + RTO),
            attempts: 0,
            backoff: 0,
        }
    }

    /// Whether a segment answers another SYN than this flow's: that of a connection that the guest
    /// has kept, which a reset ends (RFC 9293, 3.10.7.3).
    pub(crate) fn is_of_another(&self, segment: &Segment<'_>) -> bool {
        let expects = |ack| self.is_called() && ack == self.to_guest.sent;
        self.phase == Phase::Calling && !segment.rst && !segment.ack.is_some_and(expects)
    }

    /// Whether the SYN was sent.
    fn is_called(&self) -> bool {
        self.to_guest.sent != self.to_guest.unacked
    }

    pub(super) fn next_call(&mut self, frame: &mut Frame, shared: &Shared) -> bool {
        if !self.ack_due {
            return false;
        }
        let first = self.to_guest.unacked;
        self.to_guest.next = first + 1;
        self.to_guest.sent = first + 1;
        let syn = TcpRepr {
            control: TcpControl::Syn,
            ack_number: None,
            // The window of a SYN is not scaled.
            window_len: narrow(self.window()),
            window_scale: Some(WINDOW_SHIFT),
            max_seg_size: Some(narrow(self.link_mss(&shared.link))),
            ..self.repr(first)
        };
        frame.tcp(&shared.link, &self.key, &syn, (0, self.to_guest.mss));
        self.ack_due = false;
        true
    }

    /// A segment of a guest that was called. One that refuses resets the host's connection.
    pub(super) fn answered(&mut self, segment: &Segment<'_>, shared: &mut Shared) {
        if !self.is_called() || segment.ack != Some(self.to_guest.sent) {
            return;
        }
        if segment.rst {
            shared.counters.flows_refused += 1;
            self.reset_host();
            self.phase = Phase::Over;
            return;
        }
        if !segment.syn {
            return;
        }
        let window = self.window();
        let (from_guest, to_guest) = (&mut self.from_guest, &mut self.to_guest);
        from_guest.first = segment.seq;
        from_guest.next = segment.seq + 1;
        from_guest.edge = from_guest.next + window;
        from_guest.is_known = true;
        match segment.window_shift {
            Some(shift) => to_guest.shift = shift.min(14),
            None => from_guest.shift = 0,
        }
        to_guest.window = usize::from(segment.window);
        to_guest.mss = segment.mss.unwrap_or(DEFAULT_MSS).max(MIN_MSS);
        to_guest.unacked = to_guest.sent;
        to_guest.next = to_guest.sent;
        to_guest.recovery = to_guest.sent;
        self.phase = Phase::Open;
        self.ack_due = true;
        self.deadline = None;
        self.attempts = 0;
        self.backoff = 0;
    }

    /// The guest has not answered until `passed`.
    pub(super) fn call_again(&mut self, passed: Option<Instant>, shared: &mut Shared) {
        if self.attempts > MAX_CALLS {
            shared.counters.flows_refused += 1;
            self.reset_host();
            self.phase = Phase::Over;
        } else {
            self.ack_due = true;
            self.deadline = passed.map(|passed| passed + self.timeout());
        }
    }
}

#[cfg(test)]
#[path = "call_tests.rs"]
mod tests;
