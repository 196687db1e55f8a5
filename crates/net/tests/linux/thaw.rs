//! Connections of a guest that is thawed: the proxy forgets them, and resets the guest's.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddrV4, TcpListener, TcpStream};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use firn_net::NetworkState;
use rustix::net::{AddressFamily, SocketType, bind, listen, socket};

use crate::servers::{Pattern, echo, serve};
use crate::world::{HOST_V4, Settings, World, is_possible};

/// Saves and restores, as a freeze and a thaw would.
fn thaw(world: &World) -> usize {
    world.with_proxy(|proxy| {
        let saved = serde_json::to_vec(&proxy.save()).unwrap();
        let state: NetworkState = serde_json::from_slice(&saved).unwrap();
        proxy.restore(&state);
        assert!(proxy.has_frames());
        state.connections()
    })
}

#[test]
fn every_connection_of_before_is_reset() {
    const COUNT: usize = 1000;
    if !is_possible() {
        return;
    }
    let world = World::new(Settings::default());
    let port = serve(&world, HOST_V4, echo);
    let streams = world.guest.run(move || {
        let connect = |_| TcpStream::connect((HOST_V4, port)).unwrap();
        let mut streams: Vec<TcpStream> = (0..COUNT).map(connect).collect();
        for stream in &mut streams {
            stream.write_all(b"x").unwrap();
            stream.read_exact(&mut [0]).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        }
        streams
    });
    assert_eq!(thaw(&world), COUNT);
    let started = Instant::now();
    world.guest.run(move || {
        for stream in &streams {
            let error = { stream }.read(&mut [0]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        }
        // Ports can be used again.
        let mut stream = TcpStream::connect((HOST_V4, port)).unwrap();
        stream.write_all(b"x").unwrap();
        stream.read_exact(&mut [0]).unwrap();
    });
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
}

#[test]
fn connections_with_data_on_the_way_are_reset() {
    if !is_possible() {
        return;
    }
    let world = World::new(Settings::default());
    let port = serve(&world, HOST_V4, |stream| {
        let receive = stream.try_clone().unwrap();
        thread::spawn(move || std::io::copy(&mut { receive }, &mut std::io::sink()));
        // It ends in an error, which is the reset.
        let _ = std::panic::catch_unwind(|| Pattern::new(5).send(&stream, 1 << 30));
    });
    let (begun, has_begun) = channel();
    let reader = world.guest.spawn(move || {
        let stream = TcpStream::connect((HOST_V4, port)).unwrap();
        let writing = stream.try_clone().unwrap();
        let writer = thread::spawn(move || {
            loop {
                if let Err(error) = { &writing }.write_all(&[0; 32 << 10]) {
                    return error.kind();
                }
            }
        });
        let mut buffer = [0; 32 << 10];
        let mut total = 0;
        let kind = loop {
            match { &stream }.read(&mut buffer) {
                // The writer has got the error.
                Ok(0) => break ErrorKind::BrokenPipe,
                Ok(count) => total += count,
                Err(error) => break error.kind(),
            }
            if total > 4 << 20 {
                let _ = begun.send(());
            }
        };
        (kind, writer.join().unwrap())
    });
    has_begun.recv().unwrap();
    assert_eq!(thaw(&world), 1);
    let (reading, writing) = reader.join().unwrap();
    let reset = [ErrorKind::ConnectionReset, ErrorKind::BrokenPipe];
    assert!(reset.contains(&reading) && reset.contains(&writing), "{reading:?} {writing:?}");
}

#[test]
fn a_connect_that_waits_is_refused() {
    if !is_possible() {
        return;
    }
    let world = World::new(Settings::default());
    // A listener whose queue is full answers no SYN.
    let (port, _full) = world.host.run(|| {
        let listener = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        bind(&listener, &SocketAddrV4::new(HOST_V4.parse().unwrap(), 0)).unwrap();
        listen(&listener, 0).unwrap();
        let listener = TcpListener::from(listener);
        let address = listener.local_addr().unwrap();
        (address.port(), (TcpStream::connect(address).unwrap(), listener))
    });
    let connect =
        world.guest.spawn(move || TcpStream::connect((HOST_V4, port)).unwrap_err().kind());
    world.wait_for("connecting", |counters| counters.flows == 1);
    thread::sleep(Duration::from_millis(100));
    assert_eq!(thaw(&world), 1);
    assert_eq!(connect.join().unwrap(), ErrorKind::ConnectionRefused);
}

/// A connection that the snapshot does not have is reset when the guest uses it.
#[test]
fn an_unknown_connection_is_reset_when_it_is_used() {
    if !is_possible() {
        return;
    }
    let world = World::new(Settings::default());
    let port = serve(&world, HOST_V4, echo);
    let mut stream = world.guest.run(move || TcpStream::connect((HOST_V4, port)).unwrap());
    world.with_proxy(|proxy| proxy.restore(&NetworkState::default()));
    world.guest.run(move || {
        // The last step of the connect may be such a use already.
        let used = stream.write_all(b"x").and_then(|()| stream.read(&mut [0]));
        assert_eq!(used.unwrap_err().kind(), ErrorKind::ConnectionReset);
    });
}
