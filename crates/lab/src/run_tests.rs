use std::io::{Read, Seek};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use super::{BOOT_LIMIT, Captured, Ending, Event, RelayError, Stop, relay, wait};
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
    (relay(stream, Some(results), Some(Captured::default()), &events), received)
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
    assert!(matches!(wait(&received, now, Some(Duration::ZERO)), Stop::TimedOut));
    let Some(long_ago) = now.checked_sub(BOOT_LIMIT) else { return };
    assert!(matches!(wait(&received, long_ago, None), Stop::NoBoot));
    // After the boot, only the command's own limit applies.
    events.send(Event::Ready).unwrap();
    assert!(matches!(wait(&received, long_ago, Some(BOOT_LIMIT)), Stop::TimedOut));
}

#[test]
fn the_wait_ends_on_a_signal_or_a_lost_relay() {
    let (events, received) = mpsc::channel();
    events.send(Event::Signal(15)).unwrap();
    assert!(matches!(wait(&received, Instant::now(), None), Stop::Signal(15)));
    drop(events);
    assert!(matches!(
        wait(&received, Instant::now(), None),
        Stop::Ended(Err(RelayError::Receive(ReceiveError::Ended)))
    ));
}
