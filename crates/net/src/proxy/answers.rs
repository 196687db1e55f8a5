//! Answers to the guest that are not of a flow.

use smoltcp::wire::{TcpControl, TcpRepr};

use super::{MAX_ANSWER_BYTES, MAX_ANSWERS, Proxy};
use crate::flow::{FlowKey, FlowProtocol};
use crate::icmp::{self, Unreachable};
use crate::packet::{Dropped, Segment};
use crate::seq::Seq;
use crate::tcp::ack_repr;

impl Proxy {
    pub(super) fn refuse_datagram(&mut self, key: &FlowKey, reason: Unreachable) {
        let mut quoted = Vec::with_capacity(8);
        if key.protocol == FlowProtocol::Ping {
            quoted.extend([if key.guest.is_ipv4() { 8 } else { 128 }, 0, 0, 0]);
            quoted.extend(key.guest.port().to_be_bytes());
            quoted.extend([0; 2]);
        } else {
            quoted.extend(key.guest.port().to_be_bytes());
            quoted.extend(key.remote.port().to_be_bytes());
            quoted.extend([0, 8, 0, 0]);
        }
        self.unreachable(key, &quoted, reason);
    }

    pub(super) fn unreachable(&mut self, key: &FlowKey, quoted: &[u8], reason: Unreachable) {
        let original = (quoted, quoted.len());
        icmp::unreachable(&mut self.frame, &self.shared.link, key, original, reason);
        self.push_answer();
    }

    /// The answer to a segment of no connection (RFC 9293, 3.10.7.1).
    pub(super) fn reset_unknown(&mut self, key: &FlowKey, segment: &Segment<'_>) {
        match segment.ack {
            Some(ack) => self.reset(key, Some(ack), None),
            None => self.reset(key, None, Some(segment.seq + segment.len())),
        }
    }

    pub(super) fn reset(&mut self, key: &FlowKey, seq: Option<Seq>, ack: Option<Seq>) {
        self.make_reset(key, seq, ack);
        self.push_answer();
    }

    pub(super) fn make_reset(&mut self, key: &FlowKey, seq: Option<Seq>, ack: Option<Seq>) {
        let reset = TcpRepr {
            control: TcpControl::Rst,
            ack_number: ack.map(Into::into),
            ..ack_repr(key, seq.unwrap_or_default(), ack.unwrap_or_default())
        };
        self.frame.tcp(&self.shared.link, key, &reset, (0, u16::MAX));
    }

    pub(super) fn answer_if(&mut self, is_answered: bool) -> Result<(), Dropped> {
        if !is_answered {
            return Err(Dropped::Unsupported);
        }
        self.push_answer();
        Ok(())
    }

    /// Queues the frame that was just made.
    pub(super) fn push_answer(&mut self) {
        let (header, frame) = self.frame.parts();
        let bytes = self.answer_bytes + frame.len();
        if self.answers.len() < MAX_ANSWERS && bytes <= MAX_ANSWER_BYTES {
            self.answer_bytes = bytes;
            self.answers.push_back((header, frame.to_vec()));
        } else {
            self.shared.counters.dropped_full += 1;
        }
    }
}
