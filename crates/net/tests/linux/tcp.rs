//! Connections of the guest to servers of the host.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;

use crate::world::{HOST_V4, HOST_V6, Settings, World, is_possible};

/// Answers each connection with what it sends.
fn echo(listener: &TcpListener) {
    for stream in listener.incoming() {
        let mut stream = stream.unwrap();
        thread::spawn(move || {
            let mut copy = stream.try_clone().unwrap();
            let _ = std::io::copy(&mut stream, &mut copy);
            let _ = stream.shutdown(Shutdown::Write);
        });
    }
}

/// A server of the host, which runs until the test ends; its port.
fn serve(world: &World, address: &'static str, run: fn(&TcpListener)) -> u16 {
    let (send, receive) = std::sync::mpsc::channel();
    world.host.spawn(move || {
        let listener = TcpListener::bind((address, 0)).unwrap();
        send.send(listener.local_addr().unwrap().port()).unwrap();
        run(&listener);
    });
    receive.recv().unwrap()
}

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
}
