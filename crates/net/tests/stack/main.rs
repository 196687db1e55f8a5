//! The proxy with smoltcp as its guest, and with frames that no guest sends. Requires nothing.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod guest;
mod hostile;
mod memory;
mod metadata;
mod published;
mod requests;
mod timeouts;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, UdpSocket};
use std::thread;
use std::time::Duration;

use firn_net::{NetworkState, Offloads};
use rustix::process::{Gid, Uid, geteuid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use smoltcp::socket::tcp::State;

use crate::guest::{Guest, Link};

const ALL: Offloads = Offloads { checksum: true, tso4: true, tso6: true };
const LOCALHOST: Ipv4Addr = Ipv4Addr::LOCALHOST;

/// A server that returns what one client sends; its port.
fn echo_server() -> u16 {
    let listener = TcpListener::bind((LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut copy = stream.try_clone().unwrap();
        let _ = std::io::copy(&mut stream, &mut copy);
        let _ = stream.shutdown(Shutdown::Write);
    });
    port
}

/// Sends bytes to an echo server and receives them.
fn transfer(link: Link, len: usize) -> Guest {
    let mut guest = Guest::new(link);
    let socket = guest.connect(LOCALHOST, echo_server());
    let data: Vec<u8> =
        (0_u64..).flat_map(|n| n.wrapping_mul(0x9e37_79b9).to_le_bytes()).take(len).collect();
    let (mut sent, mut received) = (0, Vec::new());
    guest.run(|guest| {
        let socket = guest.tcp(socket);
        if sent < len && socket.can_send() {
            sent += socket.send_slice(&data[sent..]).unwrap();
            if sent == len {
                socket.close();
            }
        }
        while socket.can_recv() {
            socket
                .recv(|bytes| {
                    received.extend_from_slice(bytes);
                    (bytes.len(), ())
                })
                .unwrap();
        }
        sent == len && !socket.may_recv()
    });
    assert_eq!(received.len(), len);
    assert!(received == data);
    guest.run(|guest| guest.proxy.counters().flows == 0);
    assert_eq!(guest.proxy.counters().buffered, 0);
    guest
}

#[test]
fn bytes_return_with_every_offload_and_with_none() {
    for offloads in [ALL, Offloads::default(), Offloads { checksum: true, ..Default::default() }] {
        let guest = transfer(Link { offloads, ..Link::default() }, 8 << 20);
        let counters = guest.proxy.counters();
        assert_eq!((counters.dropped_invalid, counters.retransmissions), (0, 0), "{counters:?}");
    }
}

/// The engine and its broker need no rights.
#[test]
fn bytes_return_for_an_ordinary_user() {
    const USER: u32 = 65534;
    let transfers = || {
        // Of this thread, and of those that it begins.
        if geteuid().is_root() {
            let (user, group) = (Uid::from_raw(USER), Gid::from_raw(USER));
            set_thread_groups(&[]).unwrap();
            set_thread_res_gid(group, group, group).unwrap();
            set_thread_res_uid(user, user, user).unwrap();
        }
        transfer(Link::default(), 1 << 20);
    };
    thread::spawn(transfers).join().unwrap();
}

/// A guest that is short of memory drops frames.
#[test]
fn lost_frames_are_sent_again() {
    let guest = transfer(Link { lose_every: 23, ..Link::default() }, 1 << 20);
    assert!(guest.proxy.counters().retransmissions > 0);
}

#[test]
fn a_refused_connect_is_reset() {
    let mut guest = Guest::new(Link::default());
    let port = TcpListener::bind((LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
    let socket = guest.connect(LOCALHOST, port);
    guest.run(|guest| guest.tcp(socket).state() == State::Closed);
    assert_eq!(guest.proxy.counters().flows_refused, 1);
}

#[test]
fn datagrams_return() {
    let server = UdpSocket::bind((LOCALHOST, 0)).unwrap();
    let port = server.local_addr().unwrap().port();
    thread::spawn(move || {
        let mut buffer = [0; 2000];
        let (len, from) = server.recv_from(&mut buffer).unwrap();
        server.send_to(&buffer[..len], from).unwrap();
    });
    let mut guest = Guest::new(Link::default());
    let socket = guest.bind(4000);
    guest.udp(socket).send_slice(b"datagram", (LOCALHOST, port)).unwrap();
    guest.run(|guest| guest.udp(socket).can_recv());
    assert_eq!(guest.udp(socket).recv().unwrap().0, b"datagram");
}

/// The snapshot has open connections, and one that is opening; each gets a reset that is accepted.
#[test]
fn a_thaw_resets_the_connections_of_the_snapshot() {
    let mut guest = Guest::new(Link::default());
    let open = guest.connect(LOCALHOST, echo_server());
    guest.run(|guest| guest.tcp(open).may_send());
    guest.tcp(open).send_slice(b"x").unwrap();
    guest.run(|guest| guest.tcp(open).can_recv());
    let opening = guest.connect(LOCALHOST, echo_server());
    guest.poll_guest();
    let state = guest.proxy.save();
    assert_eq!(state.connections(), 2);
    let state: NetworkState =
        serde_json::from_str(&serde_json::to_string(&state).unwrap()).unwrap();

    // Another monitor.
    guest.replace_proxy();
    guest.proxy.restore(&state);
    assert!(guest.proxy.has_frames());
    assert_eq!(guest.proxy.resets_left(), 2);
    assert_eq!(guest.proxy.save(), state, "a freeze before the guest has run loses nothing");
    guest.run(|guest| {
        [open, opening].iter().all(|socket| guest.tcp(*socket).state() == State::Closed)
    });
    assert_eq!((guest.proxy.save().connections(), guest.proxy.resets_left()), (0, 0));
}

/// One descriptor for each socket is the monitor's; the broker keeps none.
#[test]
fn a_broker_keeps_no_socket() {
    let listener = TcpListener::bind((LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut guest = Guest::new(Link::default());
    let socket = guest.connect(LOCALHOST, port);
    guest.run(|guest| guest.tcp(socket).may_send());
    let (mut stream, _) = listener.accept().unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream.write_all(b"x").unwrap();
    drop(guest.replace_proxy());
    // The last descriptor was closed.
    assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0);
}
