//! How much memory idle engines and idle flows take.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use firn_net::{GuestNetwork, Proxy};

use crate::LOCALHOST;
use crate::guest::{Guest, Link, broker};

/// Resident memory of this process in bytes.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/statm").unwrap();
    status.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

/// `cargo test -p firn-net --test stack -- --ignored --nocapture memory`
#[test]
#[ignore = "a measurement"]
fn memory_of_idle_engines_and_flows() {
    const ENGINES: usize = 1000;
    const FLOWS: usize = 1000;
    let listener = TcpListener::bind((LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut guest = Guest::new(Link::default());
    guest.buffer = 64;
    let mut flows: Vec<TcpStream> = Vec::new();
    let (mut before, mut guests) = (0, Vec::new());
    for number in 0..=FLOWS {
        if number == 1 {
            before = resident();
        }
        let socket = guest.connect(LOCALHOST, port);
        guest.run(|guest| guest.tcp(socket).may_send());
        let (mut stream, _) = listener.accept().unwrap();
        guest.tcp(socket).send_slice(b"x").unwrap();
        guest.run(|guest| guest.tcp(socket).send_queue() == 0);
        stream.read_exact(&mut [0]).unwrap();
        stream.write_all(b"y").unwrap();
        guest.run(|guest| guest.tcp(socket).can_recv());
        flows.push(stream);
        guests.push(socket);
    }
    assert_eq!(guest.proxy.counters().flows, u64::try_from(FLOWS + 1).unwrap());
    let each = (resident() - before) / FLOWS;
    println!("an idle flow with smoltcp's own socket: {each} bytes");

    let before = resident();
    let engines: Vec<Proxy> =
        (0..ENGINES).map(|_| Proxy::new(GuestNetwork::default(), broker()).unwrap()).collect();
    let each = (resident() - before) / ENGINES;
    println!("an idle engine with its broker's thread: {each} bytes");
    drop(engines);
}
