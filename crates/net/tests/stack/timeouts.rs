//! A guest that is silent.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::guest::{Guest, Link};
use crate::{LOCALHOST, State};

fn connected() -> (Guest, smoltcp::iface::SocketHandle, TcpStream) {
    let listener = TcpListener::bind((LOCALHOST, 0)).unwrap();
    let mut guest = Guest::new(Link::default());
    let socket = guest.connect(LOCALHOST, listener.local_addr().unwrap().port());
    guest.run(|guest| guest.tcp(socket).may_send());
    (guest, socket, listener.accept().unwrap().0)
}

/// The only segment is lost, so no acknowledgement makes it come again: a time-out does.
#[test]
fn a_segment_without_an_answer_is_sent_again() {
    let (mut guest, socket, mut stream) = connected();
    stream.write_all(b"once").unwrap();
    let started = Instant::now();
    let mut lost = 0;
    while lost == 0 {
        guest.proxy.poll();
        lost += usize::from(guest.proxy.receive(1514).is_some());
    }
    guest.run(|guest| guest.tcp(socket).recv_queue() == 4);
    assert!(started.elapsed() >= Duration::from_millis(400), "{:?}", started.elapsed());
    assert_eq!(guest.proxy.counters().retransmissions, 1);
}

/// A window that closes and opens without a word is found by a probe.
#[test]
fn a_closed_window_is_probed() {
    let (mut guest, socket, mut stream) = connected();
    let writer = std::thread::spawn(move || {
        stream.write_all(&vec![1; 2 << 20]).unwrap();
        stream.read(&mut [0]).unwrap_or(0)
    });
    // The guest's buffer is full, and its window is closed.
    guest.run(|guest| guest.tcp(socket).recv_queue() > 254 << 10);
    let before = guest.proxy.counters().frames_to_guest;
    let started = Instant::now();
    guest.run(|_| started.elapsed() > Duration::from_millis(4000));
    // After 0.5, 1.5 and 3.5 seconds.
    let probes = guest.proxy.counters().frames_to_guest - before;
    assert!((2..=4).contains(&probes), "{probes}");
    let mut total = 0;
    guest.run(|guest| {
        let socket = guest.tcp(socket);
        total += socket.recv(|bytes| (bytes.len(), bytes.len())).unwrap_or(0);
        total == 2 << 20
    });
    guest.tcp(socket).close();
    guest.run(|guest| guest.tcp(socket).state() != State::Established);
    drop(guest);
    writer.join().unwrap();
}
