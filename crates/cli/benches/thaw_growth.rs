//! Does a thaw's own work grow with guest memory? It must not: process start to resume, read-ahead
//! off, for guests of 256 MiB and of 2 GiB, in turn, in one run.
//!
//! Needs a host that runs Linux guests: `make bench` runs it there, or in the lab, where only the
//! ratio means something. `FIRN` names the firn to measure, `FIRN_FUNCTIONS` the directory with the
//! function hello.

#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::panic)]

use std::path::{Path, PathBuf};
use std::process::Command;

use firn_base::now_ns;
use serde_json::Value;

const SIZES: [&str; 2] = ["256M", "2G"];
const ROUNDS: usize = 20;
/// What a thaw does itself, before the guest runs.
const PARTS: [&str; 5] = ["process_start_ns", "load_ns", "plan_ns", "execute_ns", "resume_ns"];

fn main() {
    // `cargo test` runs benchmarks too, to see that they start: there is nothing to measure then.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let snapshots = SIZES.map(|size| snapshot(work.path(), size));
    let mut times = SIZES.map(|_| Vec::new());
    for _ in 0..ROUNDS {
        for (snapshot, times) in snapshots.iter().zip(&mut times) {
            times.push(thaw(snapshot));
        }
    }
    println!("process start to resume, firecracker:readahead=off, {ROUNDS} thaws each");
    println!("{:>8} {:>12} {:>12}", "memory", "median ms", "p95 ms");
    let medians = times.map(|mut times| {
        times.sort_unstable();
        (times[ROUNDS / 2], times[ROUNDS * 95 / 100])
    });
    for (size, (median, p95)) in SIZES.iter().zip(medians) {
        println!("{size:>8} {:>12} {:>12}", milliseconds(median), milliseconds(p95));
    }
    println!("ratio of the medians: {}", ratio(medians[1].0, medians[0].0));
}

fn firn(arguments: &[&str]) -> Value {
    let firn = std::env::var("FIRN").unwrap_or(env!("CARGO_BIN_EXE_firn").to_owned());
    let output = Command::new(firn)
        .args(arguments)
        .env("FIRN_REQUEST_NS", now_ns().to_string())
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "firn {}: {errors}", arguments.join(" "));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn snapshot(work: &Path, size: &str) -> PathBuf {
    let functions = std::env::var("FIRN_FUNCTIONS").unwrap_or("guest/functions".to_owned());
    let name = format!("growth-{}-{}", size.to_lowercase(), std::process::id());
    let path = work.join(size);
    firn(&[
        "boot",
        "--json",
        "--detach",
        "--memory",
        size,
        "--name",
        &name,
        &format!("{functions}/hello"),
    ]);
    firn(&["freeze", "--json", &name, path.to_str().unwrap()]);
    path
}

/// ns from the request to a running guest.
fn thaw(snapshot: &Path) -> u64 {
    let report = firn(&[
        "thaw",
        "--json",
        "--planner",
        "firecracker:readahead=off",
        "--invoke",
        r#"{"name": "growth"}"#,
        snapshot.to_str().unwrap(),
    ]);
    PARTS.iter().map(|part| report["times"][part].as_u64().unwrap()).sum()
}

fn milliseconds(ns: u64) -> String {
    format!("{}.{:03}", ns / 1_000_000, ns / 1000 % 1000)
}

fn ratio(large: u64, small: u64) -> String {
    let hundredths = large * 100 / small.max(1);
    format!("{}.{:02}", hundredths / 100, hundredths % 100)
}
