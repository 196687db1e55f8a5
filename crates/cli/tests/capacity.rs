//! `firn bench capacity` as a process, with real players in a real cgroup. Requires KVM and root.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::process::Command;

use firn_bench::MemoryLimit;
use firn_run::cgroup::CgroupError;
use firn_vmm::{KVM_DEVICE, open_kvm};
use serde_json::Value;

/// Whether this process may limit the memory of a cgroup. It enters a cgroup and leaves it again.
fn can_limit() -> bool {
    let entered = MemoryLimit::enter(1 << 30);
    !matches!(entered, Err(CgroupError::NoController(_) | CgroupError::Io { .. }))
}

fn groups() -> String {
    fs::read_to_string("/proc/self/cgroup").unwrap()
}

#[test]
fn a_budget_is_filled_with_microvms() {
    let before = groups();
    if !firn_required::has("kvm", open_kvm(KVM_DEVICE.as_ref()).is_ok()) || !can_limit() {
        return;
    }
    assert_eq!(groups(), before, "dropping the limit returns this process to its cgroup");
    let directory = tempfile::tempdir().unwrap();
    let json = directory.path().join("r.json");
    // Each microVM writes 8 MiB.
    let output = Command::new(env!("CARGO_BIN_EXE_firn"))
        .args(["bench", "capacity", "--memory", "64M", "--trace", "sequential-write:8M"])
        .args(["--planner", "firecracker", "--dir", directory.path().to_str().unwrap(), "--json"])
        .arg(&json)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let results: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    let row = &results["results"][0];
    assert!((1..8).contains(&row["microvms"].as_u64().unwrap()), "{row}");
    assert!(row["usage"]["total"].as_u64().unwrap() <= 64 << 20, "{row}");
    let written = row["microvms"].as_u64().unwrap() * (8 << 20);
    assert!(row["usage"]["anonymous"].as_u64().unwrap() >= written, "{row}");
    assert!(row["end"].is_string(), "{row}");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "the player is removed");

    // The charged memory has a price.
    let cost = |more: &[&str]| {
        let words = ["bench", "cost", "--json", "--dram-price", "16", "--pool-price", "8"];
        let mut command = Command::new(env!("CARGO_BIN_EXE_firn"));
        command.args(words).args(more).arg(&json).output().unwrap()
    };
    let output = cost(&[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let priced: Value = serde_json::from_slice(&output.stdout).unwrap();
    let priced = &priced["costs"][0];
    let charged = row["usage"]["total"].as_f64().unwrap();
    let total = priced["total"].as_f64().unwrap();
    assert!((total - charged / f64::from(1 << 30) * 16.0).abs() < 1e-9, "{priced}");
    assert_eq!(priced["to_cheapest"], 1.0, "{priced}");
    let stored = cost(&["--storage", "1G", "--storage-price", "1"]);
    let stored: Value = serde_json::from_slice(&stored.stdout).unwrap();
    assert!((stored["costs"][0]["total"].as_f64().unwrap() - total - 1.0).abs() < 1e-9);
    fs::write(&json, "{}").unwrap();
    let refused = String::from_utf8(cost(&[]).stderr).unwrap();
    assert!(refused.contains("contains no capacities"), "{refused}");
}
