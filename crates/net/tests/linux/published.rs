//! Servers of the guest that the host's programs reach.

use std::io::{ErrorKind, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use firn_net::{NetworkState, PublishedAddress};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::servers::{Pattern, echo};
use crate::world::{Settings, World, is_possible};

fn world() -> World {
    World::new(Settings { publish: &["192.0.2.1:0:7000"], ..Settings::default() })
}

/// A path of this process that leads to the guest's server, and how it is published.
fn path(name: &str) -> (PathBuf, &'static str) {
    let path = std::env::temp_dir().join(format!("firn-{name}-{}.sock", std::process::id()));
    let published = format!("unix:{}:7000", path.display()).leak();
    (path, published)
}

/// Starts a server of the guest, which serves each connection in a thread.
fn serve(world: &World, serve: fn(TcpStream)) {
    let listener = world.guest.run(|| TcpListener::bind("0.0.0.0:7000").unwrap());
    drop(world.guest.spawn(move || {
        for stream in listener.incoming() {
            let stream = stream.unwrap();
            thread::spawn(move || serve(stream));
        }
    }));
}

fn addresses(world: &World) -> Vec<SocketAddr> {
    let addresses = world.ports.ports().iter().filter_map(|port| match port.address {
        PublishedAddress::Tcp(address) => Some(address),
        PublishedAddress::Unix(_) => None,
    });
    addresses.collect()
}

fn echoes(mut stream: impl Read + Write) {
    stream.write_all(b"question").unwrap();
    let mut answer = [0; 8];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"question");
}

#[test]
fn each_kind_of_address_reaches_the_guest() {
    if !is_possible() {
        return;
    }
    let (path, unix) = path("published");
    let publish: &'static [_] = vec!["192.0.2.1:0:7000", "[2001:db8::1]:0:7000", unix].leak();
    let world = World::new(Settings { publish, ..Settings::default() });
    serve(&world, echo);
    let tcp = addresses(&world);
    assert_eq!(tcp.len(), 2);
    world.host.run(move || {
        tcp.into_iter().for_each(|address| echoes(TcpStream::connect(address).unwrap()));
        echoes(UnixStream::connect(&path).unwrap());
    });
    assert_eq!(world.counters().flows_published, 3);
    world.wait_for("ended", |counters| counters.flows == 0);
}

/// A read stops before a message with descriptors, and nothing tells of the rest.
#[test]
fn what_follows_descriptors_on_a_path_arrives() {
    if !is_possible() {
        return;
    }
    let (path, unix) = path("descriptors");
    let publish: &'static [_] = vec![unix].leak();
    let world = World::new(Settings { publish, ..Settings::default() });
    serve(&world, |mut stream| {
        stream.write_all(b"begin").unwrap();
        let mut all = [0; 6];
        stream.read_exact(&mut all).unwrap();
        stream.write_all(&all).unwrap();
    });
    let mut stream = UnixStream::connect(&path).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream.read_exact(&mut [0; 5]).unwrap();
    // Both are there before the first one is read.
    let mut stream = world.while_stopped(move || {
        for part in [b"one", b"two"] {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let rights = [stream.as_fd()];
            assert!(control.push(SendAncillaryMessage::ScmRights(&rights)));
            let flags = SendFlags::empty();
            sendmsg(&stream, &[IoSlice::new(part)], &mut control, flags).unwrap();
        }
        stream
    });
    let mut all = [0; 6];
    stream.read_exact(&mut all).unwrap();
    assert_eq!(&all, b"onetwo");
}

#[test]
fn large_transfers_and_half_ends_pass() {
    if !is_possible() {
        return;
    }
    let world = world();
    serve(&world, |stream| {
        Pattern::new(1).expect(&stream, 20 << 20);
        Pattern::new(2).send(&stream, 20 << 20);
    });
    let address = addresses(&world)[0];
    world.host.run(move || {
        let stream = TcpStream::connect(address).unwrap();
        Pattern::new(1).send(&stream, 20 << 20);
        stream.shutdown(Shutdown::Write).unwrap();
        Pattern::new(2).expect(&stream, 20 << 20);
    });
}

#[test]
fn a_refusal_and_a_reset_reach_the_other_side() {
    if !is_possible() {
        return;
    }
    let world = world();
    let address = addresses(&world)[0];
    let reset = move || TcpStream::connect(address).unwrap().read(&mut [0]).unwrap_err().kind();
    assert_eq!(world.host.run(reset), ErrorKind::ConnectionReset);
    serve(&world, |stream| {
        let linger = Some(Duration::ZERO);
        rustix::net::sockopt::set_socket_linger(&stream, linger).unwrap();
    });
    assert_eq!(world.host.run(reset), ErrorKind::ConnectionReset);
}

/// The guest's server sees a reset at once, in every state of a connection.
#[test]
fn connections_of_before_a_thaw_are_reset() {
    if !is_possible() {
        return;
    }
    let world = world();
    let (send, accepted) = std::sync::mpsc::channel();
    let listener = world.guest.run(|| TcpListener::bind("0.0.0.0:7000").unwrap());
    drop(world.guest.spawn(move || {
        for stream in listener.incoming() {
            let _ = send.send(stream.unwrap());
        }
    }));
    let address = addresses(&world)[0];
    let clients = world.host.run(move || {
        let connect = |_| TcpStream::connect(address).unwrap();
        (0..3).map(connect).collect::<Vec<TcpStream>>()
    });
    let mut servers: Vec<TcpStream> = (0..3).map(|_| accepted.recv().unwrap()).collect();
    // The first is idle, the second has data on its way, the third is half closed.
    { &clients[1] }.write_all(b"data").unwrap();
    clients[2].shutdown(Shutdown::Write).unwrap();
    assert_eq!(servers[2].read(&mut [0]).unwrap(), 0);
    let count = world.with_proxy(|proxy| {
        let state: NetworkState = proxy.save();
        proxy.restore(&state);
        state.connections()
    });
    assert_eq!(count, 3);
    for server in &mut servers {
        let end =
            std::iter::repeat_with(|| server.read(&mut [0])).find(|read| !matches!(read, Ok(1)));
        // After its end, a half-closed connection is reset when it is used.
        match end.unwrap() {
            Ok(_) => assert!((0..1000).any(|_| {
                thread::sleep(Duration::from_millis(5));
                server.write_all(b"x").is_err()
            })),
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
        }
    }
    for client in &clients {
        assert_eq!({ client }.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    }
    // The port is published still.
    let again = world.host.run(move || TcpStream::connect(address).unwrap());
    accepted.recv().unwrap().write_all(b"x").unwrap();
    { &again }.read_exact(&mut [0]).unwrap();
}
