//! A guest that connects to programs on the host, through the broker of its command.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use firn_tests::{World, workshop, workshop_folder};
use serde_json::{Value, json};

const PORT: u32 = 5000;
/// Connections that are open at the same time.
const CONNECTIONS: usize = 200;
/// Bytes each way.
const BYTES: usize = 50_000;

/// Where the connections of the guest `it` to the port arrive.
fn socket(world: &World) -> PathBuf {
    world.run_directory().join(format!("it/vsock.sock_{PORT}"))
}

/// A program on the host that answers each connection with the complement of what it gets. Returns
/// their number so far.
fn serve(world: &World) -> Arc<AtomicUsize> {
    let listener = UnixListener::bind(socket(world)).unwrap();
    let accepted = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&accepted);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            count.fetch_add(1, Ordering::SeqCst);
            std::thread::spawn(move || answer(stream.unwrap()));
        }
    });
    accepted
}

fn answer(mut stream: UnixStream) {
    let mut bytes = vec![0; BYTES];
    stream.read_exact(&mut bytes).unwrap();
    bytes.iter_mut().for_each(|byte| *byte = !*byte);
    stream.write_all(&bytes).unwrap();
    // The guest closes the connection.
    assert_eq!(stream.read(&mut [0]).unwrap(), 0);
}

#[track_caller]
fn connect(world: &World, count: usize) -> Value {
    let event = json!({ "do": "connect", "port": PORT, "count": count, "length": BYTES });
    world.ask("it", "machine", &event)
}

/// Refused, then connected as often as asked for, then refused again.
#[track_caller]
fn connects(world: &World) {
    let refused = json!({ "refused": "ECONNRESET" });
    assert_eq!(connect(world, 1), refused, "no program listens");
    let accepted = serve(world);
    for round in 1..=2 {
        let right = json!({ "right": CONNECTIONS });
        assert_eq!(connect(world, CONNECTIONS), right);
        assert_eq!(accepted.load(Ordering::SeqCst), round * CONNECTIONS);
    }
    fs::remove_file(socket(world)).unwrap();
    assert_eq!(connect(world, 1), refused, "the program listens at no path");
    // A file of a program that has ended.
    drop(UnixListener::bind(socket(world)).unwrap());
    assert_eq!(connect(world, 1), refused, "the program has ended");
    fs::remove_file(socket(world)).unwrap();
}

#[test]
fn a_booted_guest_and_its_clone_connect_to_programs_on_the_host() {
    let world = World::default();
    let boot = world.firn(["boot", "--name", "it"]).arg(workshop_folder(&world.work()));
    let mut booted = boot.start().ready();
    connects(&world);
    world.firn(["freeze", "it", "snapshot"]).run().ok();
    booted.end().ok();
    let _clone = world.firn(["thaw", "--name", "it", "snapshot"]).start().ready();
    connects(&world);
}

#[test]
fn clones_connect_each_to_its_own_programs() {
    let world = World::default();
    let thaw = |name: &str| world.firn(["thaw", "--name", name]).arg(workshop()).start().ready();
    let _clones = [thaw("it"), thaw("other")];
    let accepted = serve(&world);
    assert_eq!(connect(&world, 3), json!({ "right": 3 }));
    // The same port of another clone.
    let event = json!({ "do": "connect", "port": PORT, "count": 1, "length": BYTES });
    let refused = json!({ "refused": "ECONNRESET" });
    assert_eq!(world.ask("other", "machine", &event), refused);
    assert_eq!(accepted.load(Ordering::SeqCst), 3);
    fs::remove_file(socket(&world)).unwrap();
}
