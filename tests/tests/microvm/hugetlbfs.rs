//! A pool that uses all reserved huge pages. In the lab the test reserves the huge pages; on other
//! hosts it passes without a check.

use std::fs;

use firn_tests::World;
use serde_json::Value;

const MIB: u64 = 1 << 20;
const RESERVED: &str = "/proc/sys/vm/nr_hugepages";

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
    for planner in ["pass_shared", "firn", "firn", "firn", "pass"] {
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
