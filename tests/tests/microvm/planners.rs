//! Planners that need a profile: recorded on one input, asked with the other.

use firn_tests::{HELLO, World, frozen};
use serde_json::Value;

/// A snapshot of hello of its own, dense, with these parts of a profile recorded on input a.
fn profiled(world: &World, parts: &str) -> std::path::PathBuf {
    let snapshot = world.file("snapshot");
    let mut thawed = world.firn(["thaw", "--name", "again"]).arg(frozen(&HELLO)).start().ready();
    world.firn(["freeze", "--dense", "again"]).arg(&snapshot).run().ok();
    thawed.end().ok();
    let record = world.firn(["profile", "record", "--invoke", HELLO.input_a, "--part", parts]);
    record.arg(&snapshot).run().ok();
    snapshot
}

/// The report of a thaw that was asked with input b, and answered right.
fn thawed(world: &World, snapshot: &std::path::Path, planner: &str) -> Value {
    let thaw = world.firn(["thaw", "--json", "--planner", planner, "--invoke", HELLO.input_b]);
    let report = thaw.arg(snapshot).run().json();
    let expected: Value = serde_json::from_str(HELLO.expected_b).unwrap();
    assert_eq!(report["outcome"]["answer"], expected, "{planner}");
    report
}

#[test]
fn hello_by_faasnap() {
    let world = World::default();
    let snapshot = profiled(&world, "groups");
    let pack = world.firn(["profile", "pack", "--json", "--planner", "faasnap"]).arg(&snapshot);
    let packed = pack.run().json();
    assert!(packed["runs"].as_u64() < packed["runs_before_merging"].as_u64(), "{packed}");
    let report = thawed(&world, &snapshot, "faasnap");
    assert_eq!(report["execute"]["packed_regions"], packed["runs"], "{report}");
    assert_eq!(report["loader"]["loaded"], true, "{report}");
    assert!(report["execute"]["zero_bytes"].as_u64().unwrap() > 0, "{report}");
}

#[test]
fn hello_by_snapbpf() {
    let world = World::default();
    let snapshot = profiled(&world, "cache");
    let report = thawed(&world, &snapshot, "snapbpf");
    assert_eq!(report["execute"]["packed_bytes"], 0, "{report}");
    assert_eq!(report["loader"]["loaded"], true, "{report}");
    assert!(report["loader"]["ranges"].as_u64().unwrap() > 1, "{report}");
}
