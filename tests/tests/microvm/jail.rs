//! What a monitor cannot do once its Linux guest has taken it over. Requires root.

use std::path::Path;

use firn_captive::Hostile;
use firn_tests::{Daemon, HELLO, Monitor, World, profiled};
use rustix::process::{Pid, Signal, geteuid};
use serde_json::{Value, json};

use crate::pool_thaws::{freeze_into, medium, serve as serve_pool};

/// Threads that every monitor of a guest has: of devices, of a vCPU, and of orders.
pub(crate) const THREADS: usize = 3;

fn is_root() -> bool {
    firn_required::has("root", geteuid().is_root())
}

fn hostile(process: Pid, threads: usize) -> Hostile {
    Hostile::of(process.as_raw_nonzero().get().cast_unsigned(), threads)
}

/// Thaws hello in a jail with all walls.
fn thawed(world: &World, words: &[&str]) -> Monitor {
    let thaw = world.firn(["thaw", "--name", "it"]).args(words);
    thaw.start().ready()
}

/// Attacks each thread of the monitor while the guest waits and after it has worked, and has the
/// guest answer after each.
#[track_caller]
fn attack(world: &World, thawed: &mut Monitor, threads: usize) -> Hostile {
    let hostile = hostile(thawed.monitor(), threads);
    for _ in 0..2 {
        hostile.attack();
        let answer = world.firn(["invoke", "it", HELLO.input_b]).run();
        assert_eq!(answer.ok(), HELLO.expected_b);
    }
    hostile
}

#[track_caller]
fn end(mut thawed: Monitor) {
    thawed.signal(Signal::TERM);
    thawed.end().ok();
}

/// `reap` has a thread that serves page faults, and a descriptor of a userfaultfd.
#[test]
fn a_hostile_monitor_of_a_directory_reaches_nothing() {
    if !is_root() {
        return;
    }
    let snapshot = profiled(&HELLO).to_str().unwrap();
    for (planner, threads) in [("reap", THREADS + 1), ("firecracker", THREADS)] {
        let world = World::default();
        let mut thawed = thawed(&world, &["--planner", planner, snapshot]);
        let hostile = attack(&world, &mut thawed, threads);
        let descriptors = hostile.descriptors();
        let pages = descriptors.iter().any(|(_, what)| is_userfaultfd(what));
        assert!(pages || planner != "reap", "{descriptors:?}");
        end(thawed);
    }
}

fn is_userfaultfd(what: &Path) -> bool {
    what.to_str().is_some_and(|what| what.contains("userfaultfd"))
}

/// On the lab's device the monitors copy written pages; elsewhere the kernel copies them.
#[test]
fn a_hostile_monitor_of_a_pool_reaches_nothing_and_has_no_medium() {
    if !is_root() {
        return;
    }
    let world = World::default();
    let medium = medium(&world);
    let socket = world.file("pool.sock");
    let _manager = serve_pool(&world, medium.to_str().unwrap(), &socket);
    freeze_into(&world, &socket);
    for planner in ["firn", "pass"] {
        let words = ["--planner", planner, "--pool", socket.to_str().unwrap(), "hello"];
        let mut thawed = thawed(&world, &words);
        let hostile = attack(&world, &mut thawed, THREADS);
        let descriptors = hostile.descriptors();
        assert!(descriptors.iter().all(|(_, what)| *what != medium), "{descriptors:?}");
        end(thawed);
    }
}

/// Its answer, and whether anything on the host serves a port.
const CALLER: &str = "\
import errno
import socket


def handler(event, context):
    try:
        with socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM) as connection:
            connection.connect((socket.VMADDR_CID_HOST, event['port']))
    except OSError as error:
        return errno.errorcode[error.errno]
    return 'connected'
";

#[test]
fn a_hostile_monitor_of_the_daemon_reaches_nothing() {
    if !is_root() {
        return;
    }
    let world = World::default();
    let daemon = Daemon::start(&world, &["--standby", "0"]);
    daemon.publish("caller", CALLER);
    // The guests of a daemon connect to nothing on the host.
    let invoke = |start: &str| -> Value {
        let answer = daemon.invoke("caller:1", &json!({ "port": 5000 }));
        assert_eq!((answer.status, &answer.body), (200, &json!("ECONNRESET")), "{answer:?}");
        assert_eq!(answer.report()["start"], start, "{answer:?}");
        answer.report()
    };
    let process = i32::try_from(invoke("thawed")["thaw"]["pid"].as_i64().unwrap()).unwrap();
    let hostile = hostile(Pid::from_raw(process).unwrap(), THREADS);
    for _ in 0..2 {
        hostile.attack();
        invoke("warm");
    }
    daemon.end();
}
