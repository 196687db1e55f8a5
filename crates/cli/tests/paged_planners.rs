//! Players that are thawed by planners that serve page faults, with the profile of another input.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Output};

use firn_memory::planners::{pack, parse};
use firn_vmm::{KVM_DEVICE, open_kvm};
use serde_json::Value;
use tempfile::TempDir;

const PAGE: u64 = 4096;

fn run(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_firn")).args(arguments).current_dir(folder).output().unwrap()
}

fn json(folder: &Path, arguments: &[&str]) -> Value {
    let output = run(folder, arguments);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{arguments:?}: {error}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A dense snapshot of a player with two inputs, the profile of the second, and packed files.
fn profiled() -> Option<TempDir> {
    if !firn_required::has("kvm", open_kvm(KVM_DEVICE.as_ref()).is_ok()) {
        return None;
    }
    let folder = TempDir::new().unwrap();
    let at = folder.path();
    json(at, &["player", "--dense", "--json", "--trace", "hello-a,hello-b", "--out", "s"]);
    json(at, &["profile", "record", "--json", "s", "--input", "hello-b", "--part", "faults,free"]);
    for planner in ["reap", "faast"] {
        let report = pack(&at.join("s"), &*parse(planner).unwrap()).unwrap().unwrap();
        assert!(report.pages > 100 && !report.was_there, "{report:?}");
    }
    Some(folder)
}

#[test]
fn the_working_set_of_another_input_is_installed_and_the_rest_is_served() {
    let Some(folder) = profiled() else { return };
    let thaw = |planner: &str, input: &str| {
        let arguments = ["thaw", "--json", "--planner", planner, "--input", input, "s"];
        json(folder.path(), &arguments)
    };
    let counter = |report: &Value, name: &str| report["pager"][name].as_u64().unwrap();
    for planner in ["reap", "faast", "reap:granule=16", "faast:granule=16"] {
        let report = thaw(planner, "hello-a");
        assert_eq!(counter(&report, "direct_reads"), 1, "{report}");
        assert_eq!(counter(&report, "install_wakes"), 1, "{report}");
        let installed = counter(&report, "installed_pages");
        assert_eq!(counter(&report, "packed_bytes"), installed * PAGE);
        // Both inputs touch mostly the same pages, and each touches some other pages.
        assert!(counter(&report, "faults") > 0, "{report}");
        assert!(installed > 1000, "{report}");
        assert_eq!(counter(&report, "zero_pages"), 0, "{report}");
        assert_eq!(
            report["execute"]["zero_bytes"].as_u64() > Some(0),
            planner.starts_with("faast"),
            "{report}"
        );
        assert!(report["private_bytes"].as_u64().unwrap() >= installed * PAGE, "{report}");
    }
    // With the profile's own input, fewer faults remain.
    let own = thaw("reap", "hello-b");
    assert!(counter(&own, "faults") < counter(&thaw("reap", "hello-a"), "faults"), "{own}");
}

#[test]
fn a_damaged_page_ends_the_player_with_a_report() {
    let Some(folder) = profiled() else { return };
    let image = folder.path().join("s/memory.img");
    let image = std::fs::OpenOptions::new().read(true).write(true).open(image).unwrap();
    let pages = image.metadata().unwrap().len() / PAGE;
    let mut byte = [0];
    for page in 0..pages {
        image.read_exact_at(&mut byte, page * PAGE + 77).unwrap();
        image.write_all_at(&[!byte[0]], page * PAGE + 77).unwrap();
    }
    let output = run(folder.path(), &["thaw", "--planner", "reap", "--input", "hello-a", "s"]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    let ended = error.starts_with("firn: error: the microVM was ended: page ");
    assert!(ended && error.contains("of the image is damaged"), "{error}");
}
