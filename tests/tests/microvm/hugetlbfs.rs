//! Pools of reserved huge pages. In the lab the tests reserve the huge pages; on other hosts the
//! first one passes without a check.

use std::fs;

use firn_tests::{HELLO, World};
use serde_json::Value;

const MIB: u64 = 1 << 20;
const RESERVED: &str = "/proc/sys/vm/nr_hugepages";
const RESERVED_1G: &str = "/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages";

/// The number of free huge pages.
fn free_pages() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("HugePages_Free:")).unwrap();
    line.trim().parse().unwrap()
}

#[test]
fn a_pool_of_huge_pages_needs_no_further_huge_pages() {
    if std::env::var_os("FIRN_LAB").is_none() {
        return;
    }
    fs::write(RESERVED, "64").unwrap();
    let world = World::default();
    let socket = world.file("pool.sock");
    let serve = world.firn(["pool", "serve", "--medium", "memfd:128M,huge", "--socket"]);
    let mut manager = serve.arg(&socket).start().ready();
    assert_eq!(free_pages(), 0);
    let player = ["player", "--trace", "sequential-write:16M", "--out", "player", "--pool"];
    world.firn(player).arg(&socket).run().ok();
    // Each player checks every byte of its memory. Its writes are copied into memory that is not
    // reserved.
    let fine = "firn:granule=16k";
    for planner in ["pass_shared", "firn", "firn", "firn", fine, fine, fine, "pass"] {
        let thaw = ["thaw", "--json", "--planner", planner, "--pool"];
        let report: Value = world.firn(thaw).arg(&socket).arg("player").run().json();
        let own =
            report["private_bytes"].as_u64().unwrap() + report["copy_bytes"].as_u64().unwrap();
        assert_eq!(own >= 16 * MIB, planner != "pass", "{report}");
        assert!(report["kvm"]["pages_2m"].as_u64().unwrap() >= 8, "{report}");
    }
    world.firn(["pool", "verify", "--pool"]).arg(&socket).run().ok();
    manager.signal(rustix::process::Signal::TERM);
    manager.end().ok();
    fs::write(RESERVED, "0").unwrap();
}

/// The pool takes a page for each copy of its metadata, two for the snapshot (memory, tail) and one
/// for a replica.
#[test]
#[ignore = "needs five free huge pages of 1 GiB"]
fn pass_maps_a_guest_by_one_leaf_of_1_gib() {
    fs::write(RESERVED_1G, "5").unwrap();
    assert_eq!(fs::read_to_string(RESERVED_1G).unwrap().trim(), "5");
    let world = World::default();
    let socket = world.file("pool.sock");
    let serve = world.firn(["pool", "serve", "--medium", "memfd:5G,huge=1G", "--socket"]);
    let mut manager = serve.arg(&socket).start().ready();
    let boot = world.firn(["boot", "--name", "first", "--memory", "1G"]);
    let mut monitor = boot.arg(HELLO.write(&world.work())).start().ready();
    world.firn(["invoke", "first", HELLO.input_a]).run().ok();
    world.firn(["freeze", "--pool"]).arg(&socket).args(["first", "hello"]).run().ok();
    monitor.end().ok();
    let thaw = |planner, name| {
        let thaw = ["thaw", "--json", "--invoke", HELLO.input_b, "--planner", planner, "--pool"];
        world.firn(thaw).arg(&socket).arg(name).run()
    };
    let report: Value = thaw("pass", "hello").json();
    let expected: Value = serde_json::from_str(HELLO.expected_b).unwrap();
    assert_eq!(report["outcome"]["answer"], expected, "{report}");
    assert_eq!(report["kvm"]["pages_1g"], 1, "{report}");
    assert_eq!(report["kvm"]["page_faults"], 0, "{report}");
    for planner in ["pass_shared", "firn"] {
        thaw(planner, "hello").refused(&["leaves of 1 GiB", "or use pass"]);
    }
    world.firn(["pool", "rm", "--pool"]).arg(&socket).arg("hello").run().ok();
    // A guest that is not made of whole leaves.
    let player = ["player", "--trace", "sequential-write:16M", "--out", "player", "--pool"];
    world.firn(player).arg(&socket).run().ok();
    thaw("pass", "player").refused(&["whole leaves of 1 GiB", "18874368 bytes"]);
    manager.signal(rustix::process::Signal::TERM);
    manager.end().ok();
    fs::write(RESERVED_1G, "0").unwrap();
}
