//! Requests of the guest that wait for the broker, and what the broker accepts.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use rustix::net::listen;
use rustix::pipe::pipe;
use tempfile::TempDir;

use super::super::super::testing::STATUS;
use super::super::muxer::FIRST_PORT;
use super::super::packet::{Op, SHUTDOWN_BOTH};
use super::super::testing::{Ends, PORT, Peer, expect_end};
use super::*;

/// A port of the host that a program serves, in these tests.
const SERVED: u32 = 52;
const LIMIT: Duration = Duration::from_secs(60);

fn ends(guest: u32) -> Ends {
    Ends { host: SERVED, guest }
}

fn requests(peer: &Peer) -> usize {
    peer.guest.transport().device().requests()
}

fn accept(program: &UnixListener) -> UnixStream {
    let (stream, _) = program.accept().unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream
}

/// The program's stream that carries `byte` from the guest's port `guest`.
fn expect_byte(peer: &mut Peer, guest: u32, stream: &mut UnixStream) {
    let byte = u8::try_from(guest % 251).unwrap();
    peer.send(ends(guest), Op::Data, 0, &[byte]);
    let mut read = [0];
    stream.read_exact(&mut read).unwrap();
    assert_eq!(read, [byte]);
}

#[test]
fn requests_are_answered_in_their_order() {
    let mut peer = Peer::new();
    let program = peer.listen(SERVED);
    let unserved = Ends { host: 53, guest: 2 };
    peer.send(ends(1), Op::Request, 0, &[]);
    peer.send(unserved, Op::Request, 0, &[]);
    peer.send(ends(3), Op::Request, 0, &[]);
    peer.expect_nothing();
    assert_eq!((peer.connections(), requests(&peer)), (0, 3));
    peer.answer();
    // Resets go first.
    peer.expect(unserved, Op::Reset, 0);
    for guest in [1, 3] {
        peer.expect(ends(guest), Op::Response, 0);
        expect_byte(&mut peer, guest, &mut accept(&program));
    }
    assert_eq!(requests(&peer), 0);
}

#[test]
fn a_guest_that_gives_up_may_ask_again() {
    let mut peer = Peer::new();
    let program = peer.listen(SERVED);
    peer.send(ends(1), Op::Request, 0, &[]);
    peer.send(ends(1), Op::Reset, 0, &[]);
    peer.send(ends(1), Op::Request, 0, &[]);
    peer.answer();
    peer.expect(ends(1), Op::Response, 0);
    peer.expect_nothing();
    // The connection that the guest gave up is closed; its answer is not taken for the next one's.
    expect_end(&mut accept(&program));
    expect_byte(&mut peer, 1, &mut accept(&program));
}

#[test]
fn packets_out_of_turn_end_a_request() {
    let mut peer = Peer::new();
    let program = peer.listen(SERVED);
    let ops = [(Op::Request, 0), (Op::Response, 0), (Op::Data, 0), (Op::Shutdown, SHUTDOWN_BOTH)];
    for (op, flags) in ops {
        peer.send(ends(1), Op::Request, 0, &[]);
        peer.send(ends(1), op, flags, &[]);
        peer.expect(ends(1), Op::Reset, 0);
        peer.answer();
        peer.expect_nothing();
        expect_end(&mut accept(&program));
    }
    assert_eq!((peer.connections(), requests(&peer)), (0, 0));
}

#[test]
fn a_request_keeps_the_guest_s_latest_credit() {
    let mut peer = Peer::new();
    let program = peer.listen(SERVED);
    peer.buf_alloc = 0;
    peer.send(ends(1), Op::Request, 0, &[]);
    peer.send(ends(1), Op::CreditRequest, 0, &[]);
    peer.buf_alloc = 3;
    peer.send(ends(1), Op::CreditUpdate, 0, &[]);
    peer.answer();
    peer.expect(ends(1), Op::Response, 0);
    let mut stream = accept(&program);
    stream.write_all(b"words").unwrap();
    peer.guest.run();
    assert_eq!(peer.expect(ends(1), Op::Data, 0), b"wor");
}

#[test]
fn the_number_of_requests_is_limited() {
    let mut peer = Peer::new();
    peer.fill(128);
    let _program = peer.listen(SERVED);
    let limit = u32::try_from(MAX_WAITING).unwrap();
    for guest in 0..5 * limit {
        peer.send(ends(guest), Op::Request, 0, &[]);
        if guest < limit {
            peer.expect_nothing();
            // What the guest has dropped still waits.
            peer.send(ends(guest), Op::Reset, 0, &[]);
        } else {
            peer.expect(ends(guest), Op::Reset, 0);
        }
    }
    assert_eq!(requests(&peer), MAX_WAITING);
    peer.answer();
    peer.expect_nothing();
    assert_eq!((peer.connections(), requests(&peer)), (0, 0));
    peer.send(ends(1), Op::Request, 0, &[]);
    assert_eq!(requests(&peer), 1);
}

#[test]
fn a_reset_of_the_driver_drops_requests() {
    let mut peer = Peer::new();
    let program = peer.listen(SERVED);
    peer.send(ends(1), Op::Request, 0, &[]);
    peer.guest.set(STATUS, 0);
    peer.answer();
    assert_eq!((peer.connections(), requests(&peer)), (0, 0));
    expect_end(&mut accept(&program));
}

#[test]
fn a_connection_from_the_host_does_not_get_the_ports_of_a_request() {
    let mut peer = Peer::new();
    let requested = Ends { host: FIRST_PORT, guest: PORT };
    let _program = peer.listen(FIRST_PORT);
    peer.send(requested, Op::Request, 0, &[]);
    let (_client, other) = peer.connect();
    assert_eq!(other.host, FIRST_PORT + 1);
    peer.answer();
    peer.expect(requested, Op::Response, 0);
    assert_eq!(peer.connections(), 2);
}

#[test]
fn without_a_broker_requests_are_refused() {
    let mut peer = Peer::new();
    let _program = peer.listen(SERVED);
    peer.send(ends(1), Op::Request, 0, &[]);
    peer.send(ends(2), Op::Request, 0, &[]);
    let (other, _) = VsockBroker::pair(peer.path()).unwrap();
    drop(std::mem::replace(&mut peer.broker, other));
    peer.guest.run();
    for guest in 1..3 {
        peer.expect(ends(guest), Op::Reset, 0);
    }
    peer.send(ends(3), Op::Request, 0, &[]);
    peer.expect(ends(3), Op::Reset, 0);
    // Programs on the host still connect.
    peer.connect();
}

#[test]
fn a_program_that_does_not_accept_is_absent() {
    let mut peer = Peer::new();
    let program = peer.listen(SERVED);
    listen(&program, 0).unwrap();
    for guest in 0..3 {
        peer.send(ends(guest), Op::Request, 0, &[]);
    }
    peer.answer();
    peer.expect(ends(1), Op::Reset, 0);
    peer.expect(ends(2), Op::Reset, 0);
    peer.expect(ends(0), Op::Response, 0);
}

#[test]
fn a_broker_in_a_thread_serves_until_the_monitor_ends() {
    let dir = TempDir::new().unwrap();
    let program = UnixListener::bind(dir.path().join("v_4294967295")).unwrap();
    let monitor = VsockBroker::start(dir.path().join("v")).unwrap();
    let mut requests = Requests::new(Some(monitor));
    let ports = Ports { host: u32::MAX, guest: 1 };
    assert!(requests.ask(Request { ports, buf_alloc: 0, fwd_cnt: 0 }));
    let begin = Instant::now();
    let stream = loop {
        if let Some((_, stream)) = requests.next_answer() {
            break stream.unwrap();
        }
        assert!(begin.elapsed() < LIMIT);
        thread::yield_now();
    };
    drop(accept(&program));
    expect_end(&mut stream.into());
}

#[test]
fn the_broker_accepts_nothing_but_ports() {
    let dir = TempDir::new().unwrap();
    for message in [&[][..], &[1], &[1; 3], &[1; 5], &[1; 100_000]] {
        let (broker, monitor) = VsockBroker::pair(dir.path().join("v")).unwrap();
        send(&monitor, message, SendFlags::empty()).unwrap();
        assert_eq!(broker.answer_next(), Err(Errno::PROTO), "{}", message.len());
    }
    // A descriptor that comes with a request is closed.
    let (broker, monitor) = VsockBroker::pair(dir.path().join("v")).unwrap();
    let (reader, writer) = pipe().unwrap();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let rights = [writer.as_fd()];
    control.push(SendAncillaryMessage::ScmRights(&rights));
    let request = [IoSlice::new(&[1; MESSAGE])];
    sendmsg(&monitor, &request, &mut control, SendFlags::empty()).unwrap();
    drop(writer);
    broker.answer_next().unwrap();
    assert_eq!(File::from(reader).read(&mut [0]).unwrap(), 0);
    assert!(matches!(receive(&monitor, u32::from_ne_bytes([1; MESSAGE])), Ok(None)));
    // The monitor ends.
    drop(monitor);
    assert_eq!(broker.answer_next(), Err(Errno::PROTO));
}
