//! `firn bench paper` as a process: every experiment of the table on a tiny trace.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use firn_bench::paper::{EXPERIMENTS, Experiment, Medium, Shape, Way};
use firn_vmm::{KVM_DEVICE, open_kvm};
use serde_json::Value;

use memory_pool::MemoryPool;

mod memory_pool;

const FIRN: &str = env!("CARGO_BIN_EXE_firn");
/// The smallest trace with another input, the smallest function with inputs of other sizes, and the
/// smallest trace of SYSTOR '22.
const SMALL: &str = "hello-a";
const SMALL_OF_SIZES: &str = "json";
const SMALL_OF_TIERS: &str = "hello-a2";

fn paper(arguments: &[&str]) -> Output {
    let mut command = Command::new(FIRN);
    command.args(["bench", "paper"]).args(arguments).stdin(Stdio::null()).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn all_experiments_are_listed() {
    let (listing, help) = (paper(&[]), paper(&["--help"]));
    for Experiment { name, .. } in &EXPERIMENTS {
        assert!(text(&listing.stdout).contains(&format!(" {name} ")), "{name}");
        assert!(text(&help.stdout).split_whitespace().any(|word| word == *name), "{name}");
    }
}

#[test]
#[ignore = "takes minutes: make test-full"]
fn every_experiment_runs_from_end_to_end() {
    let root = rustix::process::geteuid().is_root();
    if !firn_required::has("kvm", open_kvm(KVM_DEVICE.as_ref()).is_ok())
        || !firn_required::has("root", root)
    {
        return;
    }
    let results = tempfile::tempdir().unwrap();
    let out = results.path().to_str().unwrap();
    let pool = MemoryPool::serve("1G", &[]);
    let socket = pool.socket();
    let mut failed = Vec::new();
    for experiment in &EXPERIMENTS {
        let name = experiment.name;
        let mut arguments = vec![name, "--out", out, "--runs", "1", "--most", "2"];
        match experiment.way {
            // In the lab: make dax-counts.
            Way::Replays(parts) if parts.iter().any(|part| part.medium != Medium::Any) => continue,
            Way::Replays(parts) => {
                let sizes = parts.iter().any(|part| part.shape == Shape::Sizes);
                let trace = if sizes { SMALL_OF_SIZES } else { SMALL };
                arguments.extend(["--trace", trace, "--pool", socket.to_str().unwrap()]);
            }
            Way::Tiers(systor) if systor.functions.contains(&SMALL_OF_TIERS) => {
                arguments.extend(["--trace", SMALL_OF_TIERS]);
            }
            Way::Tiers(_) => continue,
        }
        let output = paper(&arguments);
        if !output.status.success() {
            failed.push(format!("{name}: {}", text(&output.stderr)));
            continue;
        }
        for file in experiment.files() {
            failed.extend(check(results.path(), &file).map(|why| format!("{file}: {why}")));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    let json =
        |file: &str| fs::read_to_string(results.path().join(format!("{file}.json"))).unwrap();
    let order = |file| serde_json::from_str::<Value>(&json(file)).unwrap()["order"].clone();
    assert_eq!(order("snapbpf-figure-3b"), order("snapbpf-figure-3c"), "they share their runs");
    let before = json("snapbpf-figure-3b");
    let arguments = ["snapbpf-figure-3b", "--out", out, "--runs", "1", "--most", "2"];
    let again = [&arguments[..], &["--trace", SMALL, "--pool", socket.to_str().unwrap()]].concat();
    assert!(paper(&again).status.success());
    assert_eq!(json("snapbpf-figure-3b"), before, "what was measured is not measured again");
}

/// What is wrong with the files of an experiment.
fn check(results: &Path, file: &str) -> Option<String> {
    let read = |ending: &str| fs::read_to_string(results.join(format!("{file}.{ending}")));
    let [json, table, picture] =
        ["json", "md", "svg"].map(|ending| read(ending).unwrap_or_default());
    let json: Value = serde_json::from_str(&json).unwrap_or_default();
    let list = |key: &str| json[key].as_array().cloned().unwrap_or_default();
    let rows: Vec<Value> = ["sessions", "budgets"]
        .into_iter()
        .flat_map(list)
        .flat_map(|place| {
            let rows = [&place["rows"], &place["results"]].into_iter();
            rows.flat_map(|rows| rows.as_array().cloned().unwrap_or_default()).collect::<Vec<_>>()
        })
        .chain(list("cells"))
        .collect();
    if rows.is_empty() {
        return Some(format!("no results: {json}"));
    }
    if !table.contains('|') || !picture.contains("</svg>") {
        return Some("no table or no picture".to_owned());
    }
    // A system that is left out here has a reason that is the host's.
    let left_out = json["left_out"].as_object().cloned().unwrap_or_default();
    let wrong = left_out.iter().find(|(name, _)| !name.starts_with("vanilla_dax"));
    wrong.map(|(name, reason)| format!("{name} was left out: {reason}"))
}
