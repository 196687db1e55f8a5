//! Real functions that start from a pool, with a shared snapshot or with a replica for each
//! microVM.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use firn_pool::Client;
use firn_tests::{Function, HELLO, JSON, Monitor, World, at_once, check_memory, frozen};
use serde_json::Value;

const MIB: u64 = 1 << 20;
const MEMORY: u64 = 256 * MIB;
/// All planners for a snapshot in a pool.
const PLANNERS: [&str; 3] = ["pass", "pass_shared", "firn"];

pub(crate) fn serve(world: &World, medium: &str, socket: &Path) -> Monitor {
    let manager = world.firn(["pool", "serve", "--medium", medium, "--socket"]).arg(socket);
    manager.start().ready()
}

/// Boots hello and freezes it into the pool.
pub(crate) fn freeze_into(world: &World, socket: &Path) {
    let boot = world.firn(["boot", "--name", "first", "--memory", "256M"]);
    let mut monitor = boot.arg(HELLO.write(&world.work())).start().ready();
    let answer = world.firn(["invoke", "first", HELLO.input_a]).run();
    assert_eq!(answer.ok(), HELLO.expected_a);
    world.firn(["freeze", "--pool"]).arg(socket).args(["first", "hello"]).run().ok();
    monitor.end().ok();
}

fn ask(world: &World, socket: &Path, function: &Function, words: &[&str]) -> Value {
    let thaw = world.firn(["thaw", "--json", "--invoke", function.input_b]).args(words);
    let report = thaw.arg("--pool").arg(socket).arg(function.name).run().json();
    let expected: Value = serde_json::from_str(function.expected_b).unwrap();
    assert_eq!(report["outcome"]["answer"], expected, "{report}");
    report
}

fn thaw(world: &World, socket: &Path, planner: &str) -> Value {
    ask(world, socket, &HELLO, &["--planner", planner])
}

fn two_at_once(world: &World, socket: &Path) -> [Value; 2] {
    at_once(|| thaw(world, socket, "pass_shared"))
}

fn bytes(report: &Value, what: &str) -> u64 {
    report[what].as_u64().unwrap_or_else(|| panic!("no {what}: {report}"))
}

/// Runs in a replica, waits until the manager has repaired it, and compares all of it with the
/// sealed bytes.
fn a_repaired_replica_equals_its_snapshot(world: &World, socket: &Path) {
    let mut client = Client::connect(socket).unwrap();
    for _ in 0..2 {
        thaw(world, socket, "pass");
        let imaging = loop {
            let extents = client.list().unwrap().extents;
            if let Some(imaging) = extents.iter().find_map(|extent| extent.imaging) {
                break imaging;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        };
        assert!(imaging.copied > 0 && imaging.compared == MEMORY, "{imaging:?}");
    }
    let replica = client.replica("hello").unwrap();
    assert!(replica.prepared.is_some());
    let is = replica.grant.map().unwrap();
    let was = client.snapshot("hello").unwrap().map().unwrap();
    let (mut here, mut there) = (vec![0; 2 << 20], vec![0; 2 << 20]);
    for at in (0..MEMORY).step_by(here.len()) {
        is.read_guest(at, &mut here);
        was.read_guest(at, &mut there);
        assert!(here == there, "{at:#x}");
    }
}

#[test]
fn one_sealed_snapshot_serves_microvms_at_once_and_keeps_its_bytes() {
    let world = World::default();
    let socket = world.file("pool.sock");
    let _manager = serve(&world, "memfd:640M", &socket);
    freeze_into(&world, &socket);
    for _ in 0..2 {
        for report in two_at_once(&world, &socket) {
            // Written pages are private. The other pages are in the pool, once for all microVMs,
            // except the pages that the guest has returned.
            assert_eq!(bytes(&report, "shared_bytes"), 0, "{report}");
            let mapped = bytes(&report, "private_bytes") + bytes(&report, "pool_bytes");
            assert!((1..=MEMORY).contains(&mapped), "{report}");
            assert!(bytes(&report, "private_bytes") < MEMORY / 4, "{report}");
            // The system may have evicted a page of the program.
            assert!(bytes(&report, "read_bytes") < MIB, "{report}");
        }
    }
    a_repaired_replica_equals_its_snapshot(&world, &socket);
    // A planner for directories and an unknown name are refused.
    let thaw = |words: [&str; 2]| {
        let thaw = ["thaw", "--planner", words[0], "--invoke", "{}", "--pool"];
        world.firn(thaw).arg(&socket).arg(words[1]).run()
    };
    thaw(["firecracker", "hello"]).refused(&["in a pool", "pass_shared"]);
    thaw(["pass_shared", "unknown"]).refused(&["unknown"]);
}

/// The lab's /dev/dax0.0, elsewhere a file.
pub(crate) fn medium(world: &World) -> PathBuf {
    let make = |medium: &Path, options: &[&str]| {
        world.firn(["pool", "create", "--medium"]).arg(medium).args(options).run().ok();
    };
    if std::env::var_os("FIRN_LAB").is_some() {
        let device = PathBuf::from("/dev/dax0.0");
        make(&device, &["--overwrite"]);
        return device;
    }
    let path = world.file("medium");
    make(&path, &["--size", "640M"]);
    path
}

#[test]
fn a_microvm_runs_in_a_replica_with_both_indexes_complete() {
    let world = World::default();
    let socket = world.file("pool.sock");
    let medium = medium(&world);
    let manager = serve(&world, medium.to_str().unwrap(), &socket);
    freeze_into(&world, &socket);
    // The first run waits for its replica. Its writes are reverted before the next run.
    for _ in 0..3 {
        let report = thaw(&world, &socket, "pass");
        assert_eq!(bytes(&report, "private_bytes"), 0, "{report}");
        assert_eq!(bytes(&report, "pool_bytes"), MEMORY, "{report}");
        let indexed: u64 = report["execute"]["steps"]
            .as_array()
            .unwrap()
            .iter()
            .map(|step| bytes(step, "indexed_bytes"))
            .sum();
        assert_eq!(indexed, MEMORY, "{report}");
        // If the kernel can fill KVM's tables in advance, they map all of guest memory.
        let built = &report["restore"]["kvm_index"]["built"]["bytes"];
        assert!(built.is_null() || *built == MEMORY, "{report}");
        if medium.starts_with("/dev") {
            // Real devdax under nested paging: the leaves are as large as those of the device.
            assert!(
                report["kvm"]["pages_2m"].as_u64().unwrap() >= MEMORY / (2 * MIB) - 8,
                "{report}"
            );
        }
    }
    if medium.starts_with("/dev") {
        // The kernel has no private mappings of a device: two microVMs share the extent, and the
        // monitors copy the pages that they write.
        let reports = two_at_once(&world, &socket);
        for report in reports {
            let copies = &report["chunk_copies"];
            assert_eq!(bytes(copies, "bytes"), bytes(copies, "chunks") * 2 * MIB, "{report}");
            assert!(bytes(&report, "private_bytes") <= bytes(copies, "bytes"), "{report}");
            let ahead = bytes(&report["restore"], "copied_ahead_bytes");
            assert!((1..bytes(copies, "bytes")).contains(&ahead), "{report}");
            assert!(bytes(copies, "write_faults") > 0, "{report}");
        }
        pages_are_copied_over_what_a_pager_fills(&world, &socket);
        drop(manager);
        world.firn(["pool", "verify", "--pool"]).arg(&medium).run().ok();
    }
}

/// Without private mappings, too, a copy can hold the pages alone that two runs have written.
fn pages_are_copied_over_what_a_pager_fills(world: &World, socket: &Path) {
    let run = || {
        let report = ask(world, socket, &HELLO, &["--compare", "--planner", "firn:granule=16k"]);
        check_memory(&report, &BTreeSet::new());
        report
    };
    let own = |report: &Value| bytes(report, "private_bytes") + bytes(report, "copy_bytes");
    let (whole, mut client) = (run(), Client::connect(socket).unwrap());
    for _ in 0..10 {
        let report = run();
        client.settle().unwrap();
        if bytes(&report, "copy_bytes") > 0 {
            assert!(bytes(&report["pager"], "faults") > 0, "{report}");
            assert!(own(&report) < own(&whole) / 2, "{report}: {whole}");
            return;
        }
    }
    panic!("no copy was ready");
}

/// Freezes a function into a pool, and records it there on input a. It is thawed once before, so
/// that the guest has reported its free pages: pages that it returns after the next thaw are not
/// compared.
fn record_in(world: &World, socket: &Path, function: &Function) {
    let thaw = world.firn(["thaw", "--name", "again"]).arg(frozen(function));
    let mut thawed = thaw.start().ready();
    world.firn(["freeze", "--pool"]).arg(socket).args(["again", function.name]).run().ok();
    thawed.end().ok();
    let record = ["profile", "record", "--invoke", function.input_a, "--input", "a", "--pool"];
    world.firn(record).arg(socket).arg(function.name).run().ok();
}

/// Invokes it with input b. Checks the answer, guest memory, and the planner's counters.
fn compare(world: &World, socket: &Path, function: &Function, planner: &str) -> Value {
    let report = ask(world, socket, function, &["--compare", "--planner", planner]);
    check_memory(&report, &BTreeSet::new());
    let (private, copied) = (bytes(&report, "private_bytes"), bytes(&report, "copy_bytes"));
    match planner {
        "pass" => {
            assert_eq!(bytes(&report, "pool_bytes"), MEMORY, "{report}");
            assert_eq!((private, copied), (0, 0), "{report}");
        }
        "pass_shared" => assert!(private > 0 && copied == 0, "{report}"),
        // With the profile.
        _ => assert!(bytes(&report["writes"], "predicted") > 0, "{report}"),
    }
    report
}

fn thaw_with_every_planner(world: &World, function: &Function, medium: &str) {
    let socket = world.file("pool.sock");
    let _manager = serve(world, medium, &socket);
    record_in(world, &socket, function);
    for planner in PLANNERS {
        // If the manager has a ready copy, `firn` uses it.
        Client::connect(&socket).unwrap().settle().unwrap();
        let report = compare(world, &socket, function, planner);
        assert_eq!(bytes(&report, "copy_bytes") > 0, planner == "firn", "{report}");
    }
}

#[test]
fn every_planner_of_a_pool_thaws_hello() {
    thaw_with_every_planner(&World::default(), &HELLO, "memfd:640M");
}

/// On the lab's device the monitors copy written pages; elsewhere the kernel copies them.
#[test]
#[ignore = "long: make test-full"]
fn every_planner_of_a_pool_thaws_json() {
    let world = World::default();
    let medium = medium(&world);
    thaw_with_every_planner(&world, &JSON, medium.to_str().unwrap());
}

/// Slow, so for `make test-full`. The pool has space for four replicas in addition to the
/// snapshots.
#[test]
#[ignore = "long: make test-full"]
fn every_planner_of_a_pool_thaws_four_microvms_at_once() {
    let world = World::default();
    let socket = world.file("pool.sock");
    let _manager = serve(&world, "memfd:1408M", &socket);
    record_in(&world, &socket, &HELLO);
    for planner in PLANNERS {
        at_once::<4, _>(|| compare(&world, &socket, &HELLO, planner));
    }
}
