//! Requests to a broker that is slow or has ended.

use std::os::fd::OwnedFd;

use firn_net::{GuestNetwork, Proxy};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair,
};
use smoltcp::socket::tcp::State;
use smoltcp::wire::{IpProtocol, TcpPacket};

use crate::LOCALHOST;
use crate::guest::{Guest, Link};
use crate::hostile::{frame, udp};

/// Where a request has its kind (`broker/wire.rs`), and that of TCP.
const KIND: usize = 8;
const TCP: u8 = 0;

fn pair() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

#[test]
fn a_proxy_whose_broker_has_ended_refuses_connections() {
    let mut guest = Guest::new(Link::default());
    let (broker, other) = pair();
    guest.proxy = Proxy::new(GuestNetwork::default(), broker).unwrap();
    drop(other);
    for refused in 1..3 {
        guest.connect(LOCALHOST, 9);
        guest.run(|guest| guest.proxy.counters().flows_refused == refused);
    }
    assert_eq!(guest.proxy.counters().flows, 0);
}

/// The guest's SYN comes after the broker's end and before the proxy has handled it.
#[test]
fn a_connection_is_refused_whose_request_finds_no_broker() {
    let mut guest = Guest::new(Link::default());
    let (broker, other) = pair();
    guest.proxy = Proxy::new(GuestNetwork::default(), broker).unwrap();
    guest.proxy.poll();
    drop(other);
    let socket = guest.connect(LOCALHOST, 9);
    // The neighbour's address comes first.
    while guest.proxy.counters().flows == 0 {
        guest.poll_guest();
        guest.receive();
    }
    guest.run(|guest| guest.tcp(socket).state() == State::Closed);
    assert_eq!(guest.proxy.counters().flows, 0);
}

fn syn(port: u16) -> Vec<u8> {
    frame(IpProtocol::Tcp, 20, |bytes| {
        let mut packet = TcpPacket::new_unchecked(bytes);
        packet.set_src_port(port);
        packet.set_dst_port(9);
        packet.set_header_len(20);
        packet.set_syn(true);
    })
}

/// Answers a request of the proxy with an error. Returns its kind; `None` if there is none.
fn answer_one(broker: &OwnedFd) -> Option<u8> {
    let mut request = [0; 64];
    let received = recv(broker, &mut request, RecvFlags::DONTWAIT);
    if received == Err(Errno::AGAIN) {
        return None;
    }
    received.unwrap();
    let mut answer = request[..12].to_vec();
    answer[8..].copy_from_slice(&Errno::HOSTUNREACH.raw_os_error().to_ne_bytes());
    send(broker, &answer, SendFlags::empty()).unwrap();
    Some(request[KIND])
}

/// A program of the guest that sends to many addresses does not delay the others: its flows end
/// when they are too many, and their requests with them.
#[test]
fn requests_of_flows_that_have_ended_are_not_sent() {
    let (broker, other) = pair();
    let mut proxy = Proxy::new(GuestNetwork::default(), broker).unwrap();
    for port in 1..=40_000 {
        proxy.transmit(&[&udp(port, b"x")]);
        while proxy.receive(1514).is_some() {}
    }
    proxy.transmit(&[&syn(50_000)]);
    assert_eq!(proxy.counters().flows, 1024 + 1, "there is room for a connection");
    let mut before = 0;
    while answer_one(&other).unwrap() != TCP {
        before += 1;
        proxy.poll();
        while proxy.receive(1514).is_some() {}
    }
    // What the broker has, and what is still open.
    assert!((1024..=1024 + 32).contains(&before), "{before}");
    proxy.poll();
    assert_eq!((proxy.counters().flows, answer_one(&other)), (0, None));
}
