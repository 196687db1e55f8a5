//! Connections of the guest to servers of the host.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use firn_net::Offloads;
use rustix::net::SendFlags;
use rustix::net::sockopt::set_socket_linger;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::servers::{Pattern, echo, serve};
use crate::world::{HOST_V4, HOST_V6, NOWHERE, Settings, World, is_possible};

#[test]
fn an_echo_returns_over_both_ip_versions() {
    if !is_possible() {
        return;
    }
    let world = World::new(Settings::default());
    for address in [HOST_V4, HOST_V6] {
        let port = serve(&world, address, echo);
        let answer = world.guest.run(move || {
            let mut stream = TcpStream::connect((address, port)).unwrap();
            stream.write_all(b"hello").unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            answer
        });
        assert_eq!(answer, "hello");
    }
    world.wait_for("without flows", |counters| counters.flows == 0);
    let counters = world.counters();
    assert_eq!((counters.flows_opened, counters.buffered), (2, 0), "{counters:?}");
}

/// Sends bytes both ways at once, over each IP version.
fn transfer(settings: Settings) {
    const LEN: usize = 24 << 20;
    if !is_possible() {
        return;
    }
    let world = World::new(settings);
    for address in [HOST_V4, HOST_V6] {
        let (done, is_done) = channel();
        let port = serve(&world, address, move |stream| {
            thread::scope(|scope| {
                scope.spawn(|| Pattern::new(1).expect(&stream, LEN));
                Pattern::new(2).send(&stream, LEN);
                stream.shutdown(Shutdown::Write).unwrap();
            });
            done.send(()).unwrap();
        });
        world.guest.run(move || {
            let stream = TcpStream::connect((address, port)).unwrap();
            thread::scope(|scope| {
                scope.spawn(|| Pattern::new(2).expect(&stream, LEN));
                Pattern::new(1).send(&stream, LEN);
                stream.shutdown(Shutdown::Write).unwrap();
            });
        });
        is_done.recv_timeout(Duration::from_secs(10)).unwrap();
    }
    world.wait_for("without flows", |counters| counters.flows == 0);
    let counters = world.counters();
    assert_eq!(counters.dropped_invalid, 0, "{counters:?}");
    assert_eq!(counters.buffered, 0, "{counters:?}");
    assert!(counters.buffered_peak <= (1 << 20) + 8192, "{counters:?}");
}

#[test]
fn bytes_arrive_in_large_segments() {
    transfer(Settings::default());
}

#[test]
fn bytes_arrive_in_small_segments_without_offloads() {
    transfer(Settings { offloads: Offloads::default(), ..Settings::default() });
}

#[test]
fn bytes_arrive_with_partial_checksums_and_the_largest_mtu() {
    let offloads = Offloads { checksum: true, ..Offloads::default() };
    transfer(Settings { offloads, mtu: 65_520, ..Settings::default() });
}

#[test]
fn either_side_ends_its_half_alone() {
    if !is_possible() {
        return;
    }
    let world = World::new(Settings::default());
    let (send, receive) = channel();
    // The server answers after the client's end, then the other way round.
    let port = serve(&world, HOST_V4, move |mut stream| {
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        stream.write_all(&all).unwrap();
    });
    let reverse = serve(&world, HOST_V4, move |mut stream| {
        stream.shutdown(Shutdown::Write).unwrap();
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        send.send(all).unwrap();
    });
    world.guest.run(move || {
        let mut stream = TcpStream::connect((HOST_V4, port)).unwrap();
        stream.write_all(b"question").unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        assert_eq!(all, b"question");

        let mut stream = TcpStream::connect((HOST_V4, reverse)).unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
        stream.write_all(b"still").unwrap();
        thread::sleep(Duration::from_millis(50));
        stream.write_all(b" here").unwrap();
    });
    assert_eq!(receive.recv().unwrap(), b"still here");
    world.wait_for("without flows", |counters| counters.flows == 0);
}

/// A read of the host's socket stops before the urgent byte, and nothing tells of the rest.
#[test]
fn an_urgent_byte_and_what_follows_it_arrive() {
    if !is_possible() {
        return;
    }
    let world = World::new(Settings::default());
    let (send, accepted) = channel();
    let port = serve(&world, HOST_V4, move |stream| send.send(stream).unwrap());
    let stream = world.guest.run(move || TcpStream::connect((HOST_V4, port)).unwrap());
    let mut server = accepted.recv().unwrap();
    // All is there before the first part is read.
    let _server = world.while_stopped(move || {
        server.write_all(b"before").unwrap();
        rustix::net::send(&server, b"!", SendFlags::OOB).unwrap();
        server.write_all(b"after").unwrap();
        server
    });
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let mut all = [0; 12];
    (&stream).read_exact(&mut all).unwrap();
    assert_eq!(&all, b"before!after");
}

#[test]
fn a_reset_of_one_side_reaches_the_other() {
    if !is_possible() {
        return;
    }
    let world = World::new(Settings::default());
    let port = serve(&world, HOST_V4, |mut stream| {
        stream.read_exact(&mut [0]).unwrap();
        set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
    });
    let (send, receive) = channel();
    let victim = serve(&world, HOST_V4, move |mut stream| {
        stream.read_exact(&mut [0]).unwrap();
        send.send(stream.read(&mut [0]).map_err(|error| error.kind())).unwrap();
    });
    world.guest.run(move || {
        let mut stream = TcpStream::connect((HOST_V4, port)).unwrap();
        stream.write_all(b"x").unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);

        let mut stream = TcpStream::connect((HOST_V4, victim)).unwrap();
        stream.write_all(b"x").unwrap();
        set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
    });
    assert_eq!(receive.recv().unwrap(), Err(ErrorKind::ConnectionReset));
    world.wait_for("without flows", |counters| counters.flows == 0);
}

/// As servers do that answer before they have all of a request.
#[test]
fn an_answer_before_a_reset_arrives_whole() {
    const LEN: usize = 32 << 10;
    if !is_possible() {
        return;
    }
    let world = World::new(Settings::default());
    let (send, accepted) = channel();
    let port = serve(&world, HOST_V4, move |mut stream| {
        stream.read_exact(&mut [0]).unwrap();
        send.send(stream).unwrap();
    });
    let stream = world.guest.run(move || {
        let mut stream = TcpStream::connect((HOST_V4, port)).unwrap();
        stream.write_all(b"xy").unwrap();
        stream
    });
    let server = accepted.recv().unwrap();
    world.while_stopped(move || {
        (&server).write_all(&[1; LEN]).unwrap();
        // With a byte in it that was not read.
        drop(server);
    });
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let mut answer = Vec::new();
    let error = (&stream).read_to_end(&mut answer).unwrap_err();
    assert_eq!((answer.len(), error.kind()), (LEN, ErrorKind::ConnectionReset));
    world.wait_for("without flows", |counters| counters.flows == 0);
}

#[test]
fn a_connect_that_fails_tells_why_at_once() {
    if !is_possible() {
        return;
    }
    let world = World::new(Settings::default());
    let started = Instant::now();
    world.guest.run(|| {
        for address in [HOST_V4, HOST_V6] {
            let error = TcpStream::connect((address, 1)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{address}");
        }
        let error = TcpStream::connect((NOWHERE, 1)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NetworkUnreachable);
        let error = TcpStream::connect(("100.64.0.1", 80)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    });
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    assert_eq!(world.counters().flows_refused, 4);
    assert_eq!(world.counters().flows, 0);
}

#[test]
fn a_server_that_sends_byte_after_byte_is_understood() {
    if !is_possible() {
        return;
    }
    let world = World::new(Settings::default());
    let port = serve(&world, HOST_V4, |mut stream| {
        stream.set_nodelay(true).unwrap();
        for byte in 0..200 {
            stream.write_all(&[byte]).unwrap();
            thread::sleep(Duration::from_millis(1));
        }
    });
    let all = world.guest.run(move || {
        let mut all = Vec::new();
        TcpStream::connect((HOST_V4, port)).unwrap().read_to_end(&mut all).unwrap();
        all
    });
    assert_eq!(all, (0..200).collect::<Vec<u8>>());
}

#[test]
fn a_thousand_connections_work_at_once() {
    const COUNT: u64 = 1000;
    if !is_possible() {
        return;
    }
    let most = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most }).unwrap();
    let world = World::new(Settings::default());
    let port = serve(&world, HOST_V4, echo);
    let streams = world.guest.run(move || {
        let connect = |_| TcpStream::connect((HOST_V4, port)).unwrap();
        let mut streams: Vec<TcpStream> = (0..COUNT).map(connect).collect();
        for (number, stream) in (0_u64..).zip(&mut streams) {
            stream.write_all(&number.to_le_bytes()).unwrap();
        }
        for (number, stream) in (0_u64..).zip(&mut streams) {
            let mut answer = [0; 8];
            stream.read_exact(&mut answer).unwrap();
            assert_eq!(u64::from_le_bytes(answer), number);
        }
        streams
    });
    // The guest delays its acknowledgements.
    world.wait_for("idle", |counters| (counters.flows, counters.buffered) == (COUNT, 0));
    drop(streams);
    world.wait_for("without flows", |counters| counters.flows == 0);
}
