//! The planner `firn` with the profile of another input: runs correct the predicted chunks.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

use std::path::Path;
use std::process::{Command, Stdio};

use firn_vmm::{KVM_DEVICE, open_kvm};
use serde_json::Value;

use memory_pool::MemoryPool;

mod memory_pool;

/// The maximum number of runs until the predicted chunks equal the written chunks.
const MOST_RUNS: u32 = 16;

struct Pool(MemoryPool);

impl Pool {
    fn serve(options: &[&str]) -> Self {
        Self(MemoryPool::serve("800M", options))
    }

    fn json(&self, arguments: &[&str]) -> Value {
        let mut command = Command::new(env!("CARGO_BIN_EXE_firn"));
        command.args(arguments).args(["--json", "--pool"]).arg(self.0.socket());
        let output = command.stdin(Stdio::null()).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {error}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    fn thaw(&self, input: &str) -> Writes {
        let report = self.json(&["thaw", "--planner", "firn", "--input", input, "json"]);
        let count = |name: &str| {
            report["writes"][name].as_u64().unwrap_or_else(|| panic!("no {name}: {report}"))
        };
        Writes {
            predicted: count("predicted"),
            copied: count("copied"),
            missed: count("missed"),
            unused: count("unused"),
        }
    }

    /// Runs an input until the written chunks equal the predicted chunks, and returns the number of
    /// that run.
    fn settle(&self, input: &str) -> u32 {
        let mut run = |_: &u32| {
            let writes = self.thaw(input);
            (writes.missed, writes.unused) == (0, 0)
        };
        (1..=MOST_RUNS)
            .find(&mut run)
            .unwrap_or_else(|| panic!("the chunks of {input} are not learnt"))
    }
}

/// Numbers of chunks of a run.
#[derive(Debug)]
struct Writes {
    predicted: u64,
    copied: u64,
    missed: u64,
    unused: u64,
}

#[test]
fn runs_correct_the_profile_of_another_input_and_earlier_corrections() {
    if !firn_required::has("kvm", open_kvm(Path::new(KVM_DEVICE)).is_ok()) {
        return;
    }
    let pool = Pool::serve(&[]);
    pool.json(&["player", "--trace", "json-a,json-b", "--out", "json"]);
    // Without a profile no chunk is predicted, and every written chunk is missed.
    let first = pool.thaw("json-a");
    assert!(first.predicted == 0 && first.missed > 8 && first.copied == 0, "{first:?}");
    pool.json(&["profile", "record", "--part", "writes", "--input", "json-a", "json"]);

    // The profile is correct for its input from the first run on. For the other input it is wrong,
    // and the report shows by how many chunks.
    let own = pool.thaw("json-a");
    assert!(own.predicted > 8 && (own.missed, own.unused) == (0, 0), "{own:?}");
    let other = pool.thaw("json-b");
    assert!(other.missed > 0 && other.missed + other.predicted > other.unused, "{other:?}");
    assert!(pool.settle("json-b") > 1);
    let settled = pool.thaw("json-b");
    assert!((settled.missed, settled.unused) == (0, 0), "{settled:?}");
    assert_ne!(settled.predicted, own.predicted);

    // A later change of the input replaces the learnt chunks too.
    let back = pool.thaw("json-a");
    assert!(back.missed + back.unused > 0, "{back:?}");
    pool.settle("json-a");
    assert!(pool.thaw("json-a").predicted.abs_diff(own.predicted) <= 1);
}

#[test]
fn copies_stay_within_the_arena() {
    if !firn_required::has("kvm", open_kvm(Path::new(KVM_DEVICE)).is_ok()) {
        return;
    }
    for (arena, most) in [("0", 0), ("4M", 2)] {
        let pool = Pool::serve(&["--arena", arena]);
        pool.json(&["player", "--trace", "json-a", "--out", "json"]);
        pool.json(&["profile", "record", "--part", "writes", "json"]);
        let copied = (0..MOST_RUNS).map(|_| pool.thaw("json-a").copied).max();
        assert_eq!(copied, Some(most), "arena of {arena}");
    }
}
