use std::io::{Read, Seek};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use super::{Captured, Ending, Event, Limits, RelayError, SILENCES, Stop, relay, relay_ends, wait};
use crate::channel::{Kind, ReceiveError, Sender};

fn stream(frames: &[(Kind, &[u8])]) -> Vec<u8> {
    let mut stream = Vec::new();
    for (kind, content) in frames {
        Sender::new(&mut stream).send(*kind, content).unwrap();
    }
    stream
}

fn relayed(stream: &[u8]) -> (Result<Ending, RelayError>, Receiver<Event>) {
    let (events, received) = mpsc::channel();
    let results = tempfile::tempfile().unwrap();
    let (captured, writes) = (Captured::default(), AtomicBool::new(false));
    (relay(stream, Some(results), Some(captured), &events, &writes), received)
}

#[test]
fn a_relayed_run_has_its_output_results_and_code() {
    let frames = [
        (Kind::Ready, b"".as_slice()),
        (Kind::Stdout, b"out\xff"),
        (Kind::Stderr, b"err"),
        (Kind::Stdout, b"put"),
        (Kind::Results, b"tar"),
        (Kind::Exit, &[7]),
    ];
    let (ending, received) = relayed(&stream(&frames));
    let Ok(Ending { code: 7, results: Some(mut results), captured: Some(captured) }) = ending
    else {
        panic!("the run did not end with code 7, results and output");
    };
    assert!(matches!(received.recv(), Ok(Event::Ready)));
    assert_eq!(captured.stdout, b"out\xffput");
    assert_eq!(captured.stderr, b"err");
    let mut archive = Vec::new();
    results.rewind().unwrap();
    results.read_to_end(&mut archive).unwrap();
    assert_eq!(archive, b"tar");
}

#[test]
fn a_channel_that_ends_early_is_an_error() {
    let (ending, _) = relayed(&stream(&[(Kind::Ready, b""), (Kind::Stdout, b"so far")]));
    assert!(matches!(ending, Err(RelayError::Receive(ReceiveError::Ended))));
}

#[test]
fn a_failure_in_the_lab_is_returned() {
    let (ending, _) = relayed(&stream(&[(Kind::Failure, b"no room")]));
    assert!(matches!(ending, Err(RelayError::Refused(reason)) if reason == "no room"));
}

#[test]
fn the_wait_ends_at_the_nearer_limit() {
    let (events, received) = mpsc::channel();
    let now = Instant::now();
    let later = now + Duration::from_secs(3600);
    let limits = |boot, end| Limits { boot, end, silence: None, writes: Arc::default() };
    assert!(matches!(wait(&received, &limits(later, Some(now))), Stop::TimedOut));
    assert!(matches!(wait(&received, &limits(now, None)), Stop::NoBoot));
    // After the boot, only the command's own limit applies.
    events.send(Event::Ready).unwrap();
    assert!(matches!(wait(&received, &limits(now, Some(now))), Stop::TimedOut));
}

#[test]
fn a_machine_without_beats_stands_still() {
    let (events, received) = mpsc::channel();
    let now = Instant::now();
    let silence = Some(Duration::from_millis(1));
    let writes = Arc::new(AtomicBool::new(false));
    let boot = now + Duration::from_secs(3600);
    let limits = Limits { boot, end: None, silence, writes: Arc::clone(&writes) };
    events.send(Event::Ready).unwrap();
    events.send(Event::Beat).unwrap();
    assert!(matches!(wait(&received, &limits), Stop::Still));
    assert!(now.elapsed() >= SILENCES * Duration::from_millis(1));
    // While a reader of the output waits, no beat is received.
    writes.store(true, Ordering::Relaxed);
    events.send(Event::Ready).unwrap();
    let end = Some(Instant::now() + Duration::from_millis(10 * u64::from(SILENCES)));
    assert!(matches!(wait(&received, &Limits { end, ..limits }), Stop::TimedOut));
}

#[test]
fn the_wait_ends_on_a_signal_or_a_lost_relay() {
    let (events, received) = mpsc::channel();
    let boot = Instant::now() + Duration::from_secs(3600);
    let limits = Limits { boot, end: None, silence: None, writes: Arc::default() };
    events.send(Event::Signal(15)).unwrap();
    assert!(matches!(wait(&received, &limits), Stop::Signal(15)));
    drop(events);
    assert!(matches!(
        wait(&received, &limits),
        Stop::Ended(Err(RelayError::Receive(ReceiveError::Ended)))
    ));
}

#[test]
fn the_next_machine_starts_when_the_relay_of_the_last_has_ended() {
    let (events, received) = mpsc::channel();
    let ended = || Event::Ended(Err(RelayError::Receive(ReceiveError::Ended)));
    for event in [Event::Ready, Event::Beat, ended(), Event::Signal(15)] {
        events.send(event).unwrap();
    }
    assert_eq!(relay_ends(&received), None);
    assert_eq!(relay_ends(&received), Some(15));
}
