//! What the threads that a guest drives may do.

use std::fs::{File, OpenOptions, read_dir, read_to_string, remove_file};
use std::path::Path;
use std::process::Stdio;

use firn_captive::Gate;
use rustix::process::geteuid;
use serde_json::json;

use crate::player::{Player, has_kvm};
use crate::process::Process;

/// A thread: its id, its name, and its fields `Seccomp`, `NoNewPrivs` and `CapEff`.
type Thread = (i32, String, [String; 3]);

/// The capabilities to open what a client names: CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH,
/// CAP_NET_ADMIN (linux/capability.h).
const OPENING: u64 = 1 << 1 | 1 << 2 | 1 << 12;

/// Each thread but those of KVM itself.
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
    threads.filter(|(_, name, _)| !name.starts_with("kvm-")).collect()
}

/// Boots a microVM whose guest can reach programs on the host.
fn boot_with_vsock(player: &Player, process: &Process, dir: &Path) {
    let path = dir.join("vsock");
    let _ = remove_file(&path);
    process.put("/vsock", &json!({ "guest_cid": 3, "uds_path": path }));
    player.boot(process);
}

#[test]
fn threads_have_the_privileges_of_their_role() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let player = Player::new(dir.path());
    let process = Process::start();
    boot_with_vsock(&player, &process, dir.path());
    let found = threads(&process);
    let is_opening = |name: &str| ["fc_api", "vsock-broker"].contains(&name);
    assert_eq!(found.iter().filter(|(_, name, _)| is_opening(name)).count(), 2, "{found:?}");
    assert!(found.len() > 3, "{found:?}");
    let own = if geteuid().is_root() { OPENING } else { 0 };
    for (_, name, fields) in found {
        let kept = if is_opening(&name) { own } else { 0 };
        assert_eq!(fields, ["2", "1", &format!("{kept:016x}")], "{name}");
    }
    let process = Process::with(&["--level", "Off", "--no-seccomp"]);
    player.boot(&process);
    assert!(threads(&process).iter().all(|(_, _, [seccomp, ..])| seccomp == "0"));
}

/// What is asked about standard input is allowed, whatever it is.
#[test]
fn a_microvm_boots_with_any_standard_input() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let player = Player::new(dir.path());
    let file =
        || Stdio::from(File::open(env!("CARGO_MANIFEST_DIR").to_owned() + "/Cargo.toml").unwrap());
    let terminal = || {
        let options = OpenOptions::new().read(true).write(true).open("/dev/ptmx");
        Stdio::from(options.unwrap())
    };
    for input in [Stdio::null(), file(), terminal()] {
        let process = Process::with_input(&["--level", "Off"], input);
        player.boot(&process);
    }
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
        boot_with_vsock(&player, &process, dir.path());
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
