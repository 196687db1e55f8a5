use std::io::{Read, Write};
use std::net::Shutdown;

use rustix::event::epoll::EventFlags;

use super::super::tests::{Bench, FIRST, GUEST_FIRST, Made, segment};
use crate::packet::Segment;
use crate::state::SavedFlow;

/// A guest's answer to the SYN.
fn syn_ack() -> Segment<'static> {
    Segment { syn: true, mss: Some(1024), window_shift: Some(2), ..segment(0, b"") }
}

/// A flow whose SYN was sent.
fn called() -> Bench {
    let mut bench = Bench::calling();
    // The socket is writable, which is no reason to call again.
    bench.event(EventFlags::OUT);
    let syn = bench.made().unwrap();
    assert_eq!((syn.flags, syn.seq, syn.window, syn.len), ("S", 0, 30 * 536, 0));
    bench.event(EventFlags::OUT);
    assert_eq!(bench.made(), None);
    bench
}

#[test]
fn a_guest_that_answers_is_connected() {
    let mut bench = called();
    assert_eq!(bench.flow.saved(), None);
    bench.guest_sends(&syn_ack());
    let answer = Made { flags: "A", seq: 1, ack: 1, window: 2048, len: 0 };
    assert_eq!(bench.made(), Some(answer));
    assert_eq!((bench.made(), bench.flow.deadline()), (None, None));
    let saved = bench.flow.saved().unwrap();
    let (to_guest, from_guest) = (Some(FIRST + 1), GUEST_FIRST + 1);
    assert_eq!((saved.next_to_guest, saved.next_from_guest), (to_guest, from_guest));

    bench.guest_sends(&segment(1, b"hello"));
    assert_eq!(bench.made().unwrap().ack, 6);
    let mut hello = [0; 5];
    bench.host.read_exact(&mut hello).unwrap();
    assert_eq!(&hello, b"hello");
    bench.host_sends(b"data");
    let data = bench.made().unwrap();
    assert_eq!((data.seq, data.len), (1, 4));
    assert_eq!(
        bench.flow.saved().map(|saved: SavedFlow| saved.next_to_guest),
        Some(Some(FIRST + 5))
    );
}

/// What the host has sent before the guest answered, and its end.
#[test]
fn a_host_that_does_not_wait_is_not_cut_off() {
    let mut bench = Bench::calling();
    bench.host.write_all(b"early").unwrap();
    bench.host.shutdown(Shutdown::Write).unwrap();
    bench.event(EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP);
    assert_eq!(bench.made().unwrap().flags, "S");
    assert_eq!(bench.made(), None);
    bench.guest_sends(&syn_ack());
    let early = bench.made().unwrap();
    assert_eq!((early.flags, early.seq, early.len), ("FA", 1, 5));
}

/// The window of a guest without the option is not scaled, and neither is this side's.
#[test]
fn windows_are_scaled_if_both_sides_do() {
    let mut bench = called();
    bench.guest_sends(&Segment { window: 3, window_shift: None, ..syn_ack() });
    assert_eq!(bench.made().unwrap().window, 16_384);
    bench.host_sends(b"12345");
    assert_eq!(bench.made().unwrap().len, 3);
    let mut bench = called();
    bench.guest_sends(&Segment { window: 2, ..syn_ack() });
    assert_eq!(bench.made().unwrap().window, 2048);
    // The window of the SYN itself is never scaled.
    bench.host_sends(b"12345");
    assert_eq!(bench.made().unwrap().len, 2);
    bench.ack(3, 1);
    assert_eq!(bench.made().unwrap().len, 3);
}

#[test]
fn a_guest_that_does_not_answer_is_given_up() {
    let mut bench = Bench::calling();
    let mut waited = Vec::new();
    while !bench.flow.is_over() {
        assert_eq!(bench.made().unwrap().flags, "S");
        waited.push(bench.time_out().unwrap().as_millis());
    }
    assert_eq!(waited, [500, 1000, 2000, 4000, 8000]);
    assert_eq!(bench.shared.counters.flows_refused, 1);
    assert_eq!(bench.host.read(&mut [0]).unwrap(), 0);
    // The same for one without buffers for the SYN.
    let mut bench = Bench::calling();
    while !bench.flow.is_over() {
        bench.time_out().unwrap();
    }
    assert_eq!(bench.shared.counters.flows_refused, 1);
}

#[test]
fn a_refusal_ends_the_hosts_connection() {
    let mut bench = called();
    let refusal = Segment { rst: true, ..segment(0, b"") };
    for ack in [None, Some(FIRST), Some(FIRST + 2)] {
        bench.guest_sends(&Segment { ack, ..refusal });
        assert!(!bench.flow.is_over(), "{ack:?}");
    }
    bench.guest_sends(&refusal);
    assert!(bench.flow.is_over());
    assert_eq!(bench.host.read(&mut [0]).unwrap(), 0);
}

#[test]
fn an_answer_to_another_syn_is_of_another_connection() {
    let bench = Bench::calling();
    // Nothing was sent, so nothing is answered.
    assert!(bench.flow.is_of_another(&syn_ack()));
    let mut bench = called();
    for ack in [None, Some(FIRST), Some(FIRST + 2)] {
        let other = Segment { ack, ..syn_ack() };
        assert!(bench.flow.is_of_another(&other), "{ack:?}");
        bench.guest_sends(&other);
        assert_eq!(bench.made(), None);
        assert!(!bench.flow.is_of_another(&Segment { rst: true, ..other }));
    }
    // An acknowledgement without a SYN opens nothing.
    bench.guest_sends(&segment(0, b"data"));
    assert_eq!((bench.made(), bench.flow.saved()), (None, None));
    assert!(!bench.flow.is_of_another(&syn_ack()));
    bench.guest_sends(&syn_ack());
    assert!(!bench.flow.is_of_another(&syn_ack()));
}

/// A guest accepts a reset of a connection that it has not completed only without an
/// acknowledgement, because the number that it expects is not known.
#[test]
fn a_host_that_resets_before_the_answer_resets_the_guest() {
    let mut bench = called();
    bench.flow.reset_guest();
    let reset = bench.made().unwrap();
    assert_eq!((reset.flags, reset.seq), ("R", 1));
    assert!(bench.flow.is_over());
    // A guest that has not been called has nothing to reset.
    let mut bench = Bench::calling();
    bench.flow.reset_guest();
    assert!(bench.flow.is_over());
}
