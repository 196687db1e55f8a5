//! UDP, DNS and ICMP echo.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketType, connect, ipproto, recv, send, socket, sockopt,
};

use crate::world::{HOST_V4, HOST_V6, Settings, World, dns_address, is_possible};

const LIMIT: Duration = Duration::from_secs(10);

/// A server that returns each datagram; its port.
fn serve_udp(world: &World, address: &'static str) -> u16 {
    let (send, receive) = channel();
    world.host.spawn(move || {
        let socket = UdpSocket::bind((address, 0)).unwrap();
        send.send(socket.local_addr().unwrap().port()).unwrap();
        let mut buffer = [0; 65_536];
        while let Ok((len, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(&buffer[..len], from);
        }
    });
    receive.recv().unwrap()
}

/// A socket of the guest; called in its namespace.
fn guest_socket(address: &str) -> UdpSocket {
    let socket = UdpSocket::bind(if address.contains(':') { "[::]:0" } else { "0.0.0.0:0" });
    let socket = socket.unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    socket
}

#[test]
fn datagrams_return_one_by_one() {
    if !is_possible() {
        return;
    }
    let world = World::new(Settings::default());
    for address in [HOST_V4, HOST_V6] {
        let port = serve_udp(&world, address);
        world.guest.run(move || {
            let socket = guest_socket(address);
            let to: SocketAddr = (address.parse::<std::net::IpAddr>().unwrap(), port).into();
            // The first ones wait for the host's socket.
            for len in [0, 1, 100, 1400] {
                socket.send_to(&vec![7; len], to).unwrap();
            }
            // The guest's kernel queues frames by processor, so they may pass each other.
            let mut lens = [(); 4].map(|()| {
                let mut buffer = [0; 2000];
                let (len, from) = socket.recv_from(&mut buffer).unwrap();
                assert!(from == to && buffer[..len].iter().all(|byte| *byte == 7));
                len
            });
            lens.sort_unstable();
            assert_eq!(lens, [0, 1, 100, 1400]);
        });
    }
    assert_eq!(world.counters().dropped_full, 0);
}

#[test]
fn a_port_without_a_server_is_unreachable() {
    if !is_possible() {
        return;
    }
    let world = World::new(Settings::default());
    world.guest.run(|| {
        for address in [HOST_V4, HOST_V6, "100.64.0.1"] {
            let socket = guest_socket(address);
            socket.connect((address, 9)).unwrap();
            socket.send(b"x").unwrap();
            let error = socket.recv(&mut [0]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{address}");
        }
    });
}

#[test]
fn datagrams_that_would_be_fragments_are_dropped() {
    if !is_possible() {
        return;
    }
    let world = World::new(Settings::default());
    let port = world.host.run(|| {
        let socket = UdpSocket::bind((HOST_V4, 0)).unwrap();
        let port = socket.local_addr().unwrap().port();
        thread::spawn(move || {
            let (_, from) = socket.recv_from(&mut [0; 100]).unwrap();
            socket.send_to(&[0; 1473], from).unwrap();
            socket.send_to(&[0; 1472], from).unwrap();
        });
        port
    });
    world.guest.run(move || {
        let socket = guest_socket(HOST_V4);
        socket.send_to(b"x", (HOST_V4, port)).unwrap();
        assert_eq!(socket.recv(&mut [0; 2000]).unwrap(), 1472);
        socket.send_to(&[0; 1473], (HOST_V4, port)).unwrap();
    });
    world.wait_for("dropped", |counters| {
        counters.dropped_full == 1 && counters.dropped_fragments == 2
    });
}

/// The host's first resolver does not exist: the second one answers the query that is repeated.
#[test]
fn queries_reach_a_resolver_of_the_host() {
    if !is_possible() {
        return;
    }
    let world = World::new(Settings::default());
    world.host.run(|| {
        let socket = UdpSocket::bind(dns_address()).unwrap();
        thread::spawn(move || {
            let mut buffer = [0; 512];
            while let Ok((len, from)) = socket.recv_from(&mut buffer) {
                buffer[..len].reverse();
                socket.send_to(&buffer[..len], from).unwrap();
            }
        });
        let listener = TcpListener::bind(dns_address()).unwrap();
        thread::spawn(move || {
            for stream in listener.incoming() {
                stream.unwrap().write_all(b"over TCP").unwrap();
            }
        });
    });
    world.guest.run(|| {
        for gateway in ["100.64.0.1", "fd00:6669:726e::1"] {
            let socket = guest_socket(gateway);
            socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
            let mut answer = [0; 16];
            let len = (0..10).find_map(|_| {
                socket.send_to(b"query", (gateway, 53)).unwrap();
                socket.recv(&mut answer).ok()
            });
            assert_eq!(&answer[..len.unwrap()], b"yreuq");
            let mut text = String::new();
            TcpStream::connect((gateway, 53)).unwrap().read_to_string(&mut text).unwrap();
            assert_eq!(text, "over TCP");
        }
    });
    world.wait_for("without flows of queries", |counters| counters.flows == 0);
}

/// Sends an echo request over a ping socket, and returns the reply's type, number and data.
fn ping(address: &str, data: &[u8]) -> (u8, u8, Vec<u8>) {
    let address: std::net::IpAddr = address.parse().unwrap();
    let (family, protocol, kind) = if address.is_ipv4() {
        (AddressFamily::INET, ipproto::ICMP, 8)
    } else {
        (AddressFamily::INET6, ipproto::ICMPV6, 128)
    };
    let socket = socket(family, SocketType::DGRAM, Some(protocol)).unwrap();
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(LIMIT)).unwrap();
    connect(&socket, &SocketAddr::new(address, 0)).unwrap();
    let mut message = vec![kind, 0, 0, 0, 0, 0, 0, 7];
    message.extend(data);
    send(&socket, &message, SendFlags::empty()).unwrap();
    let mut reply = [0; 1500];
    let (_, len) = recv(&socket, &mut reply, RecvFlags::empty()).unwrap();
    (reply[0], reply[7], reply[8..len].to_vec())
}

#[test]
fn echo_requests_are_answered_by_the_gateway_and_by_hosts() {
    if !is_possible() {
        return;
    }
    let world = World::new(Settings::default());
    world.guest.run(|| {
        std::fs::write("/proc/sys/net/ipv4/ping_group_range", "0 2147483647").unwrap();
        for address in ["100.64.0.1", HOST_V4] {
            assert_eq!(ping(address, b"data"), (0, 7, b"data".to_vec()), "{address}");
        }
        for address in ["fd00:6669:726e::1", HOST_V6] {
            assert_eq!(ping(address, b"data"), (129, 7, b"data".to_vec()), "{address}");
        }
    });
}
