//! SnapBPF's prefetch by a BPF program, with players. It needs the module `firn_snapbpf`, which is
//! that of the lab's kernel.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::process::Command;

use serde_json::Value;

const FIRN: &str = env!("CARGO_BIN_EXE_firn");

/// Each player checks every byte of its memory.
#[test]
#[ignore = "in the lab, with the module: make test-snapbpf"]
fn a_program_prefetches_what_the_loader_does() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("results.json");
    let planners = "firecracker:readahead=off,snapbpf,snapbpf:prefetch=kernel";
    let mut bench = Command::new(FIRN);
    bench.args(["bench", "thaw", "--planner", planners, "--trace", "hello-a", "--cache", "cold"]);
    let output = bench.args(["--dense", "--runs", "2", "--json"]).arg(&json).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let results: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    let row = |planner: &str| {
        let mut rows = results["results"].as_array().unwrap().iter();
        rows.find(|row| row["planner"] == planner).unwrap()
    };
    let number = |planner: &str, what: &str| row(planner)[what].as_f64().unwrap();
    let cached = |planner| number(planner, "batch_page_cache_bytes");
    let [demand, loader, kernel] =
        ["firecracker:readahead=off", "snapbpf", "snapbpf:prefetch=kernel"];
    // The recorded input is another one, so what was prefetched is not all that is touched.
    assert!(cached(demand) < cached(loader), "{results}");
    let ratio = cached(kernel) / cached(loader);
    assert!((0.98..1.02).contains(&ratio), "{ratio}: {results}");
    // Every page but the first is read by the kernel's own worker, for no thread of the monitor.
    let read = |planner| number(planner, "read_bytes");
    assert!(read(kernel) < read(loader) / 2.0, "{results}");
}
