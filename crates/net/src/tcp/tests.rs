use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use smoltcp::wire::TcpPacket;

use super::windows::LARGEST;
use super::{Shared, TcpFlow};
use crate::burst::Burst;
use crate::flow::{FlowKey, FlowProtocol};
use crate::frame::{Frame, Link};
use crate::header::Offloads;
use crate::network::GuestNetwork;
use crate::packet::Segment;
use crate::seq::Seq;

/// This side's first sequence number: the data wraps.
pub(super) const FIRST: Seq = Seq(u32::MAX - 2);
pub(super) const GUEST_FIRST: Seq = Seq(1000);

/// A host's program and the socket of a flow, which does not wait.
pub(super) fn tcp_pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let host = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    host.set_nodelay(true).unwrap();
    let socket = listener.accept().unwrap().0;
    socket.set_nonblocking(true).unwrap();
    (host, socket)
}

/// A segment that the flow has made.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Made {
    pub(super) flags: &'static str,
    /// Relative to the SYN's.
    pub(super) seq: i64,
    pub(super) ack: i64,
    pub(super) window: u16,
    pub(super) len: usize,
}

/// A flow whose host is a socket of this test and whose clock is the test's.
pub(super) struct Bench {
    pub(super) flow: TcpFlow,
    pub(super) shared: Shared,
    frame: Frame,
    pub(super) host: UnixStream,
    now: Instant,
}

impl Bench {
    /// A flow whose host has not answered.
    fn connecting() -> Self {
        Self::new(|key, now, shared| TcpFlow::new(key, &syn(), FIRST, now, shared))
    }

    /// A flow to a published port, before its SYN.
    pub(super) fn calling() -> Self {
        Self::new(|key, now, shared| TcpFlow::call(key, FIRST, now, shared))
    }

    fn new(flow: impl FnOnce(FlowKey, Instant, &mut Shared) -> TcpFlow) -> Self {
        let offloads = Offloads { checksum: true, tso4: true, tso6: true };
        let mut shared = Shared::new(Link { network: GuestNetwork::default(), offloads });
        let guest = (shared.link.network.ipv4.address.into(), 40_000);
        let key = FlowKey::new(FlowProtocol::Tcp, guest, ([192, 0, 2, 1].into(), 80));
        let now = Instant::now();
        let flow = flow(key, now, &mut shared);
        let (host, socket) = UnixStream::pair().unwrap();
        socket.set_nonblocking(true).unwrap();
        host.set_nonblocking(true).unwrap();
        let mut bench = Self { flow, shared, frame: Frame::default(), host, now };
        bench.flow.set_socket(socket.into());
        bench
    }

    fn open() -> Self {
        let mut bench = Self::connecting();
        bench.event(EventFlags::OUT);
        assert_eq!(bench.made().unwrap().flags, "SA");
        bench.ack(1, 60_000);
        assert_eq!(bench.made(), None);
        bench
    }

    pub(super) fn event(&mut self, events: EventFlags) {
        self.flow.socket_events(events, &mut self.shared).unwrap();
    }

    pub(super) fn made(&mut self) -> Option<Made> {
        if !self.flow.next_frame(&mut self.frame, 65_550, self.now, &mut self.shared) {
            return None;
        }
        let packet = TcpPacket::new_checked(&self.frame.parts().1[34..]).unwrap();
        let flags = match (packet.syn(), packet.fin(), packet.rst(), packet.ack()) {
            (true, false, false, true) => "SA",
            (false, true, false, true) => "FA",
            (false, false, true, true) => "RA",
            (true, false, false, false) => "S",
            (false, false, true, false) => "R",
            (false, false, false, true) => "A",
            _ => panic!("{packet:?}"),
        };
        Some(Made {
            flags,
            seq: Seq::from(packet.seq_number()).since(FIRST),
            ack: Seq::from(packet.ack_number()).since(GUEST_FIRST),
            window: packet.window_len(),
            len: packet.payload().len(),
        })
    }

    /// The guest's acknowledgement of what is before `ack`, relative to the SYN.
    pub(super) fn ack(&mut self, ack: usize, window: u16) {
        let segment = Segment { ack: Some(FIRST + ack), window, ..segment(1, b"") };
        self.guest_sends(&segment);
    }

    /// A burst of one segment.
    pub(super) fn guest_sends(&mut self, segment: &Segment<'_>) {
        let frames = [segment.payload];
        let burst = Burst::new(&frames, 0);
        self.flow.segment(segment, burst, self.now, &mut self.shared);
        if self.flow.is_in_burst() && !self.flow.is_over() {
            self.flow.end_burst(burst, &mut self.shared);
        }
        // As the table does.
        if self.flow.is_over() {
            self.flow.close(&mut self.shared);
        }
    }

    /// Lets time pass to the deadline, and returns how long it was.
    pub(super) fn time_out(&mut self) -> Result<Duration, Errno> {
        let deadline = self.flow.deadline().unwrap();
        let waited = deadline - self.now;
        self.now = deadline;
        self.flow.time_out(&mut self.shared).map(|()| waited)
    }

    pub(super) fn host_sends(&mut self, bytes: &[u8]) {
        self.host.write_all(bytes).unwrap();
        self.event(EventFlags::IN);
    }

    /// The host sends `bytes` and closes before it has read what the guest sends.
    fn host_answers_and_fails(&mut self, bytes: &[u8]) {
        self.guest_sends(&segment(1, b"question"));
        assert_eq!(self.made().unwrap().ack, 9);
        self.host.write_all(bytes).unwrap();
        self.host = UnixStream::pair().unwrap().0;
        let end = EventFlags::RDHUP | EventFlags::HUP;
        self.event(EventFlags::IN | EventFlags::OUT | EventFlags::ERR | end);
    }
}

pub(super) fn segment(seq: usize, payload: &[u8]) -> Segment<'_> {
    Segment {
        syn: false,
        fin: false,
        rst: false,
        ack: Some(FIRST + 1),
        seq: GUEST_FIRST + seq,
        window: 60_000,
        mss: None,
        window_shift: None,
        payload,
    }
}

fn syn() -> Segment<'static> {
    Segment { syn: true, ack: None, mss: Some(1024), window_shift: Some(0), ..segment(0, b"") }
}

#[test]
fn a_syn_is_answered_when_the_host_is_connected_and_again_without_an_ack() {
    let mut bench = Bench::connecting();
    bench.guest_sends(&syn());
    assert_eq!(bench.made(), None);
    bench.event(EventFlags::OUT);
    let answer = Made { flags: "SA", seq: 0, ack: 1, window: 16_384, len: 0 };
    assert_eq!(bench.made(), Some(answer));
    assert_eq!(bench.made(), None);
    bench.guest_sends(&syn());
    assert_eq!(bench.made().unwrap().flags, "SA");
    for milliseconds in [500, 1000, 2000] {
        assert_eq!(bench.time_out().unwrap().as_millis(), milliseconds);
        assert_eq!(bench.made().unwrap().flags, "SA");
    }
    // Not the number that was sent.
    bench.ack(7, 1);
    bench.host_sends(b"data");
    assert_eq!(bench.made(), None);
    bench.ack(1, 60_000);
    assert_eq!(bench.made().unwrap().len, 4);
}

#[test]
fn a_host_that_does_not_answer_is_given_up() {
    let mut bench = Bench::connecting();
    assert_eq!(bench.time_out().unwrap_err(), Errno::TIMEDOUT);
}

#[test]
fn a_guest_that_is_gone_is_given_up_and_both_sides_are_reset() {
    let mut bench = Bench::open();
    bench.host_sends(b"data");
    assert_eq!(bench.made(), Some(Made { flags: "A", seq: 1, ack: 1, window: 2048, len: 4 }));
    let mut waited = Vec::new();
    let last = loop {
        waited.push(bench.time_out().unwrap().as_millis());
        let made = bench.made().unwrap();
        if made.flags == "RA" {
            break made;
        }
        assert_eq!((made.seq, made.len), (1, 4));
    };
    let expected = [500, 1000, 2000, 4000, 8000, 16_000, 32_000, 60_000, 60_000, 60_000, 60_000];
    assert_eq!(waited, expected);
    assert_eq!(last.seq, 5);
    assert!(bench.flow.is_over());
    assert_eq!(bench.host.read(&mut [0]).unwrap_or(0), 0);
}

#[test]
fn three_duplicate_acks_bring_back_what_is_lost_once() {
    let mut bench = Bench::open();
    for _ in 0..5 {
        bench.host_sends(b"1234");
        assert_eq!(bench.made().unwrap().len, 4);
    }
    for _ in 0..2 {
        bench.ack(1, 60_000);
        assert_eq!(bench.made(), None);
    }
    for _ in 0..4 {
        bench.ack(1, 60_000);
    }
    let again = bench.made().unwrap();
    assert_eq!((again.seq, again.len), (1, 20));
    assert_eq!(bench.made(), None);
    assert_eq!(bench.shared.counters.retransmissions, 1);
    bench.ack(21, 60_000);
    assert_eq!(bench.flow.deadline(), None);
}

#[test]
fn a_host_whose_end_the_guest_acknowledges_is_not_reset() {
    let mut bench = Bench::open();
    bench.guest_sends(&Segment { fin: true, ..segment(1, b"") });
    assert_eq!(bench.made().unwrap().ack, 2);
    bench.host_sends(b"answer");
    bench.host.shutdown(Shutdown::Write).unwrap();
    bench.event(EventFlags::IN | EventFlags::RDHUP);
    while bench.made().is_some_and(|made| made.flags != "FA") {}
    let all = Segment { ack: Some(FIRST + 8), ..segment(2, b"") };
    bench.guest_sends(&all);
    assert!(bench.flow.is_over());
    assert_eq!(bench.host.read(&mut [0]).unwrap(), 0);
}

#[test]
fn what_a_host_sent_before_it_failed_arrives_before_the_reset() {
    let mut bench = Bench::open();
    bench.host_answers_and_fails(&[1; 80_000]);
    assert_eq!((bench.made().unwrap().len, bench.made()), (60_000, None));
    // The host takes no more, which is no reason to lose the rest.
    bench.guest_sends(&segment(9, b"more"));
    assert_eq!(bench.made().unwrap().ack, 9);
    bench.ack(60_001, 60_000);
    let rest = bench.made().unwrap();
    assert_eq!((rest.flags, rest.seq, rest.len), ("A", 60_001, 20_000));
    let reset = bench.made().unwrap();
    assert_eq!((reset.flags, reset.seq), ("RA", 80_001));
}

#[test]
fn a_guest_that_only_writes_to_a_host_that_failed_is_reset() {
    let mut bench = Bench::open();
    bench.host_answers_and_fails(&[1; 80_000]);
    assert_eq!(bench.made().unwrap().len, 60_000);
    let full = Segment { ack: Some(FIRST + 60_001), window: 0, ..segment(9, b"") };
    bench.guest_sends(&full);
    assert_eq!(bench.made(), None);
    bench.guest_sends(&Segment { payload: b"more", ..full });
    let reset = bench.made().unwrap();
    assert_eq!((reset.flags, reset.seq), ("RA", 60_001));
}

#[test]
fn a_write_that_fails_loses_nothing_of_the_host() {
    let mut bench = Bench::open();
    bench.host.write_all(b"answer").unwrap();
    bench.host = UnixStream::pair().unwrap().0;
    // Before the event.
    bench.guest_sends(&segment(1, b"question"));
    let answer = bench.made().unwrap();
    assert_eq!((answer.flags, answer.len), ("A", 6));
    assert_eq!(bench.made().unwrap().flags, "RA");
}

#[test]
fn what_a_guest_has_kept_after_a_lost_segment_is_not_sent_again() {
    let mut bench = Bench::open();
    bench.shared.link.offloads = Offloads::default();
    let bytes = [1, 2, 3, 4, 5].map(|number| [number; 1024]).concat();
    bench.host_sends(&bytes);
    for _ in 0..5 {
        assert_eq!(bench.made().unwrap().len, 1024);
    }
    for _ in 0..3 {
        bench.ack(1, 60_000);
    }
    assert_eq!(bench.made().unwrap().seq, 1);
    bench.ack(1 + 4 * 1024, 60_000);
    let last = bench.made().unwrap();
    assert_eq!((last.seq, last.len), (1 + 4 * 1024, 1024));
    let frame = bench.frame.parts().1;
    assert!(frame.ends_with(&[5; 1024]));
}

#[test]
fn a_burst_waits_until_a_quarter_of_the_window_is_free() {
    let mut bench = Bench::open();
    bench.host_sends(&[1; 80_000]);
    assert_eq!((bench.made().unwrap().len, bench.made()), (60_000, None));
    for acked in [1460, 14_999] {
        bench.ack(1 + acked, 60_000);
        assert_eq!(bench.made(), None, "{acked}");
    }
    bench.ack(1 + 15_000, 60_000);
    assert_eq!((bench.made().unwrap().len, bench.made()), (15_000, None));
    // Nothing is on its way that would open the window.
    bench.ack(1 + 75_000, 1000);
    assert_eq!(bench.made().unwrap().len, 1000);
}

#[test]
fn a_closed_window_is_probed_ever_more_slowly() {
    let mut bench = Bench::open();
    bench.ack(1, 0);
    bench.host_sends(b"1234");
    assert_eq!(bench.made(), None);
    for milliseconds in [500, 1000, 2000, 4000] {
        assert_eq!(bench.time_out().unwrap().as_millis(), milliseconds);
        let probe = bench.made().unwrap();
        assert_eq!((probe.seq, probe.len), (1, 1));
        // The guest is there, and takes nothing.
        bench.ack(1, 0);
        assert_eq!(bench.made(), None);
    }
    bench.ack(1, 100);
    let all = bench.made().unwrap();
    assert_eq!((all.seq, all.len), (1, 4));
}

/// A guest that has ended its half and whose program is gone answers a probe with a reset.
#[test]
fn a_half_closed_connection_is_probed() {
    let mut bench = Bench::open();
    bench.guest_sends(&Segment { fin: true, ..segment(1, b"end") });
    assert_eq!(bench.made().unwrap().ack, 5);
    for _ in 0..3 {
        assert_eq!(bench.time_out().unwrap(), Duration::from_secs(60));
        let probe = bench.made().unwrap();
        assert_eq!((probe.flags, probe.seq, probe.len), ("A", 0, 0));
        bench.guest_sends(&segment(5, b""));
        assert_eq!(bench.made(), None);
    }
    bench.time_out().unwrap();
    assert!(bench.made().is_some());
    bench.guest_sends(&Segment { rst: true, ..segment(5, b"") });
    assert!(bench.flow.is_over());
}

#[test]
fn only_new_bytes_in_order_reach_the_host() {
    let mut bench = Bench::open();
    bench.guest_sends(&segment(3, b"early"));
    assert_eq!(bench.made().unwrap().ack, 1);
    bench.guest_sends(&segment(1, b"abc"));
    bench.guest_sends(&segment(1, b"abcde"));
    bench.guest_sends(&segment(2, b"bc"));
    assert_eq!(bench.made().unwrap().ack, 6);
    bench.guest_sends(&Segment { fin: true, ..segment(4, b"def") });
    bench.guest_sends(&segment(7, b"after the end"));
    assert_eq!(bench.made().unwrap().ack, 8);
    let mut all = String::new();
    bench.host.read_to_string(&mut all).unwrap();
    assert_eq!(all, "abcdef");
}

#[test]
fn a_host_that_does_not_read_closes_the_window_and_opens_it() {
    let mut bench = Bench::open();
    let data = vec![1; 4096];
    let mut sent = 1;
    let mut buffer = vec![0; 1 << 20];
    let mut read = 0;
    let closed = (0..10_000).any(|number| {
        bench.guest_sends(&segment(sent, &data));
        if number < 1000 {
            // The window grows while the host reads.
            read += bench.host.read(&mut buffer).unwrap_or(0);
            bench.event(EventFlags::OUT);
        }
        let made = bench.made().unwrap();
        sent = usize::try_from(made.ack).unwrap();
        made.window == 0
    });
    assert!(closed);
    let held = bench.shared.pool.usage().0;
    assert!((LARGEST..=LARGEST + 4096).contains(&held), "{held}");
    // Beyond the window.
    bench.guest_sends(&segment(sent, b"x"));
    assert_eq!(bench.made().unwrap().ack, i64::try_from(sent).unwrap());
    while read < sent - 1 {
        read += bench.host.read(&mut buffer).unwrap_or(0);
        bench.event(EventFlags::OUT);
    }
    assert_eq!(bench.made().unwrap().window, u16::MAX);
    assert_eq!(bench.shared.pool.usage().0, 0);
}

#[test]
fn a_window_grows_while_there_is_memory() {
    let mut bench = Bench::open();
    let others: Vec<usize> = (0..5000).map(|_| bench.shared.windows.open()).collect();
    let data = vec![1; 16 << 10];
    for (index, window) in [2048, 4096].into_iter().enumerate() {
        bench.guest_sends(&segment(1 + index * data.len(), &data));
        assert_eq!(bench.made().unwrap().window, window);
        assert_eq!(bench.host.read(&mut vec![0; 32 << 10]).unwrap(), data.len());
        others.iter().filter(|_| index == 0).for_each(|other| bench.shared.windows.close(*other));
    }
}

#[test]
fn an_ack_of_what_was_never_sent_changes_nothing() {
    let mut bench = Bench::open();
    bench.host_sends(b"data");
    assert_eq!(bench.made().unwrap().len, 4);
    bench.ack(6, 60_000);
    // The guest learns where the flow is.
    assert_eq!(bench.made().unwrap().seq, 5);
    bench.time_out().unwrap();
    assert_eq!(bench.made().unwrap().len, 4);
}

#[test]
fn a_reset_outside_the_window_is_ignored() {
    let mut bench = Bench::open();
    for seq in [0, 1 + (16 << 10) + 1] {
        bench.guest_sends(&Segment { rst: true, ..segment(seq, b"") });
        assert!(!bench.flow.is_over(), "{seq}");
    }
    bench.guest_sends(&Segment { rst: true, ..segment(1, b"") });
    assert!(bench.flow.is_over());
}

#[test]
fn both_ends_complete_a_connection() {
    let mut bench = Bench::open();
    bench.host.shutdown(Shutdown::Write).unwrap();
    bench.event(EventFlags::IN);
    assert_eq!(bench.made().unwrap().flags, "FA");
    bench.ack(2, 60_000);
    assert_eq!((bench.made(), bench.flow.deadline()), (None, None));
    let end = Segment { fin: true, ack: Some(FIRST + 2), ..segment(1, b"") };
    bench.guest_sends(&end);
    assert!(!bench.flow.is_over(), "the guest's end is not acknowledged");
    assert_eq!(bench.made().unwrap().ack, 2);
    assert!(bench.flow.is_over());
    bench.flow.close(&mut bench.shared);
    assert_eq!(bench.shared.windows.promised(), 0);
}

/// The guest has ended its half before, and its last acknowledgement is lost.
#[test]
fn the_hosts_end_is_sent_again_soon() {
    let mut bench = Bench::open();
    bench.guest_sends(&Segment { fin: true, ..segment(1, b"") });
    assert_eq!(bench.made().unwrap().ack, 2);
    bench.host.shutdown(Shutdown::Write).unwrap();
    bench.event(EventFlags::IN);
    assert_eq!(bench.made().unwrap().flags, "FA");
    assert_eq!(bench.time_out().unwrap(), Duration::from_millis(500));
    assert_eq!(bench.made().unwrap().flags, "FA");
    bench.guest_sends(&Segment { ack: Some(FIRST + 2), ..segment(2, b"") });
    assert!(bench.flow.is_over());
}
