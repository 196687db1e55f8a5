use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, send, socketpair};

use super::{Answer, Connection, Message, REQUEST, Request, SocketKind};

fn pair() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

fn answer(monitor: &OwnedFd) -> Answer {
    match Message::receive(monitor).unwrap() {
        Message::Answer(answer) => answer,
        Message::Connection(connection) => panic!("{connection:?}"),
    }
}

#[test]
fn requests_and_answers_arrive_as_they_were_sent() {
    let (monitor, broker) = pair();
    for kind in SocketKind::ALL {
        for to in ["1.2.3.4:80", "[2001:db8::1]:65535"] {
            let request = Request { id: u64::MAX - 1, kind, to: to.parse().unwrap() };
            request.send(&monitor).unwrap();
            assert_eq!(Request::receive(&broker).unwrap(), request);
        }
    }
    assert_eq!(Message::receive(&monitor).unwrap_err(), Errno::AGAIN);
    Answer { id: 7, socket: Err(Errno::CONNREFUSED) }.send(&broker).unwrap();
    let (near, _far) = UnixStream::pair().unwrap();
    Answer { id: 8, socket: Ok(near.as_fd().try_clone_to_owned().unwrap()) }.send(&broker).unwrap();
    let first = answer(&monitor);
    assert_eq!((first.id, first.socket.unwrap_err()), (7, Errno::CONNREFUSED));
    let second = answer(&monitor);
    assert_eq!(second.id, 8);
    let peer = UnixStream::from(second.socket.unwrap());
    assert!(peer.peer_addr().is_ok());
}

#[test]
fn a_connection_arrives_with_its_port_and_socket() {
    let (monitor, broker) = pair();
    let (near, mut far) = UnixStream::pair().unwrap();
    Connection { guest_port: 0x1234, socket: near.into() }.send(&broker).unwrap();
    let Message::Connection(connection) = Message::receive(&monitor).unwrap() else {
        panic!("an answer");
    };
    assert_eq!(connection.guest_port, 0x1234);
    UnixStream::from(connection.socket).write_all(b"x").unwrap();
    far.read_exact(&mut [0]).unwrap();
    // Without a socket there is no connection.
    send(&broker, &[0; 2], SendFlags::empty()).unwrap();
    assert_eq!(Message::receive(&monitor).unwrap_err(), Errno::MFILE);
    send(&broker, &[0; 3], SendFlags::empty()).unwrap();
    assert_eq!(Message::receive(&monitor).unwrap_err(), Errno::PROTO);
}

/// A mapped address would be checked as IPv6 and connected as IPv4.
#[test]
fn a_mapped_address_is_received_as_ipv4() {
    let (monitor, broker) = pair();
    let to = "[::ffff:10.0.0.1]:1".parse().unwrap();
    Request { id: 1, kind: SocketKind::Tcp, to }.send(&monitor).unwrap();
    assert_eq!(Request::receive(&broker).unwrap().to, "10.0.0.1:1".parse().unwrap());
}

#[test]
fn a_monitor_that_breaks_the_protocol_ends_its_broker() {
    let mut unknown_kind = [0; REQUEST];
    unknown_kind[8] = 5;
    for message in [&[0; REQUEST - 1][..], &[0; REQUEST + 1], &unknown_kind] {
        let (monitor, broker) = pair();
        send(&monitor, message, SendFlags::empty()).unwrap();
        assert_eq!(Request::receive(&broker).unwrap_err(), Errno::PROTO);
    }
    let (monitor, broker) = pair();
    drop(monitor);
    assert_eq!(Request::receive(&broker).unwrap_err(), Errno::CONNRESET);
}
