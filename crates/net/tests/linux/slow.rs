//! Readers that do not read.

use std::io::{ErrorKind, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use crate::servers::{Pattern, serve};
use crate::world::{HOST_V4, Settings, World, is_possible};

/// What one flow may hold in one direction.
const FLOW_LIMIT: u64 = 512 << 10;
const LEN: usize = 32 << 20;

/// Writes until the other side has taken nothing for a while; returns the bytes, which are zeros.
fn write_until_full(stream: &mut TcpStream) -> usize {
    stream.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
    let mut written = 0;
    loop {
        match stream.write(&[0; 64 << 10]) {
            Ok(count) => written += count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return written,
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn a_server_that_does_not_read_holds_a_bounded_amount() {
    if !is_possible() {
        return;
    }
    let world = World::new(Settings::default());
    let (go, wait) = channel::<()>();
    let wait = std::sync::Arc::new(std::sync::Mutex::new(wait));
    let (send, receive) = channel();
    let port = serve(&world, HOST_V4, move |mut stream| {
        wait.lock().unwrap().recv().unwrap();
        send.send(std::io::copy(&mut stream, &mut std::io::sink()).unwrap()).unwrap();
    });
    let (written, stream) = world.guest.run(move || {
        let mut stream = TcpStream::connect((HOST_V4, port)).unwrap();
        (write_until_full(&mut stream), stream)
    });
    let counters = world.counters();
    assert!(counters.buffered_peak <= FLOW_LIMIT + 4096, "{counters:?}");
    assert!(counters.buffered > 0, "{counters:?}");
    go.send(()).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    assert_eq!(receive.recv().unwrap(), u64::try_from(written).unwrap());
    world.wait_for("empty", |counters| counters.buffered == 0);
}

#[test]
fn a_guest_that_does_not_read_holds_a_bounded_amount() {
    if !is_possible() {
        return;
    }
    let world = World::new(Settings::default());
    let port = serve(&world, HOST_V4, |stream| Pattern::new(3).send(&stream, LEN));
    let stream = world.guest.run(move || {
        let stream = TcpStream::connect((HOST_V4, port)).unwrap();
        thread::sleep(Duration::from_millis(1500));
        stream
    });
    let counters = world.counters();
    assert!(counters.buffered_peak <= FLOW_LIMIT + 4096, "{counters:?}");
    assert!(counters.bytes_to_guest < 16 << 20, "{counters:?}");
    world.guest.run(move || Pattern::new(3).expect(&stream, LEN));
    world.wait_for("empty", |counters| counters.buffered == 0);
}

#[test]
fn many_connections_share_the_memory_of_a_guest() {
    const COUNT: usize = 320;
    if !is_possible() {
        return;
    }
    let world = World::new(Settings::default());
    let port = serve(&world, HOST_V4, |stream| Pattern::new(4).send(&stream, 1 << 20));
    let streams = world.guest.run(move || {
        let streams: Vec<TcpStream> =
            (0..COUNT).map(|_| TcpStream::connect((HOST_V4, port)).unwrap()).collect();
        thread::sleep(Duration::from_millis(1500));
        streams
    });
    let counters = world.counters();
    // 32 MiB in each direction, and a chunk for each flow beyond that.
    assert!(counters.buffered_peak <= 33 << 20, "{counters:?}");
    let started = Instant::now();
    world.guest.run(move || {
        for stream in &streams {
            Pattern::new(4).expect(stream, 1 << 20);
        }
    });
    // A guest that had closed its windows does not wait for time-outs: that takes minutes.
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
    world.wait_for("empty", |counters| counters.buffered == 0);
}
