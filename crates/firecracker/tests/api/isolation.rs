//! What the threads that a guest drives may do.

use std::fs::{read_dir, read_to_string};

use firn_captive::Gate;
use rustix::process::geteuid;

use crate::player::{Player, has_kvm};
use crate::process::Process;

/// A thread: its id, its name, and its fields `Seccomp`, `NoNewPrivs` and `CapEff`.
type Thread = (i32, String, [String; 3]);

/// Each thread but the API's and those of KVM itself.
fn threads(process: &Process) -> Vec<Thread> {
    let tasks = read_dir(format!("/proc/{}/task", process.pid())).unwrap();
    let threads = tasks.filter_map(|task| {
        let status = read_to_string(task.unwrap().path().join("status")).ok()?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.unwrap().trim_start_matches(':').trim().to_owned()
        };
        let fields = [field("Seccomp"), field("NoNewPrivs"), field("CapEff")];
        Some((field("Pid").parse().unwrap(), field("Name"), fields))
    });
    threads.filter(|(_, name, _)| name != "fc_api" && !name.starts_with("kvm-")).collect()
}

#[test]
fn the_threads_of_the_microvm_have_no_privileges() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let player = Player::new(dir.path());
    let process = Process::start();
    player.boot(&process);
    let found = threads(&process);
    assert!(found.len() > 1, "{found:?}");
    for (_, name, fields) in found {
        assert_eq!(fields, ["2", "1", "0000000000000000"], "{name}");
    }
    let process = Process::with(&["--level", "Off", "--no-seccomp"]);
    player.boot(&process);
    assert!(threads(&process).iter().all(|(_, _, [seccomp, ..])| seccomp == "0"));
}

/// Each thread makes the call, as a guest that took it over would.
#[test]
fn a_call_that_is_denied_ends_the_process_with_its_exit_code() {
    // Root, to trace another process.
    if !has_kvm() || !firn_required::has("root", geteuid().is_root()) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let player = Player::new(dir.path());
    let boot = || {
        let process = Process::start();
        player.boot(&process);
        let threads = threads(&process);
        (process, threads)
    };
    for at in 0..boot().1.len() {
        let (process, threads) = boot();
        let (id, name, _) = &threads[at];
        let call = (libc::SYS_socket, [0; 6]);
        Gate::of(process.pid()).captive(*id).enter(Some(call));
        assert_eq!(process.wait().code(), Some(148), "{name}");
    }
}
