//! A microVM of `firn thaw` runs in a monitor, which ends with the command, and the command with
//! it.
//! Requires any kind of KVM.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use firn_vmm::{KVM_DEVICE, open_kvm};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use tempfile::TempDir;

/// Less than what a monitor gets to end before it ends itself.
const LIMIT: Duration = Duration::from_secs(8);

/// A folder with a player, and the directory of names.
struct World(TempDir);

/// A thaw whose player waits.
struct Held {
    child: Child,
    monitor: Pid,
}

impl World {
    /// `None` without KVM.
    fn new() -> Option<Self> {
        if !firn_required::has("kvm", open_kvm(KVM_DEVICE.as_ref()).is_ok()) {
            return None;
        }
        let world = Self(tempfile::tempdir().unwrap());
        let mut made = world.firn(&["player", "--trace", "sequential-read:4M", "--out", "player"]);
        assert!(made.output().unwrap().status.success());
        Some(world)
    }

    fn names(&self) -> PathBuf {
        self.0.path().join("run")
    }

    fn firn(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_firn"));
        command.args(arguments).current_dir(&self.0).env("FIRN_RUN_DIR", self.names());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn hold(&self) -> Held {
        let thaw = ["thaw", "--hold", "--json", "--name", "it", "player"];
        let mut child = self.firn(&thaw).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "held\n");
        let children = format!("/proc/{0}/task/{0}/children", child.id());
        let children = std::fs::read_to_string(children).unwrap();
        let monitor = Pid::from_raw(children.trim().parse().unwrap()).unwrap();
        assert!(self.names().join("it/control.sock").exists());
        Held { child, monitor }
    }

    fn left(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.names()).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect()
    }
}

impl Held {
    /// The end of the command, whose standard input stays open, and of its monitor.
    fn end(mut self) -> (ExitStatus, String) {
        until(|| self.child.try_wait().unwrap().is_some());
        until(|| !runs(self.monitor));
        let mut error = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut error).unwrap();
        (self.child.wait().unwrap(), error)
    }
}

/// Whether a process runs: one that has ended and was not waited for does not.
fn runs(process: Pid) -> bool {
    let stat = format!("/proc/{}/stat", process.as_raw_nonzero());
    let stat = std::fs::read_to_string(stat).unwrap_or_default();
    test_kill_process(process).is_ok() && !stat.contains(") Z ")
}

#[track_caller]
fn until(condition: impl FnMut() -> bool) {
    let (begin, mut condition) = (Instant::now(), condition);
    while !condition() {
        assert!(begin.elapsed() < LIMIT, "it hangs");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn socket_names(path: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(path).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn the_report_has_the_process_of_the_monitor_and_the_time_since_the_command_began() {
    let Some(world) = World::new() else { return };
    let before = firn_base::now_ns();
    let held = world.hold();
    let (monitor, output) = (held.monitor, held.child.wait_with_output().unwrap());
    let most = firn_base::now_ns() - before;
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["pid"], monitor.as_raw_nonzero().get());
    assert!(report["times"]["process_start_ns"].as_u64().unwrap() > 0, "{report}");
    assert!(report["times"]["total_ns"].as_u64().unwrap() < most, "{report}");
    assert_eq!((output.status.code(), world.left()), (Some(0), vec![]));
}

#[test]
fn a_name_is_in_use_while_its_microvm_runs() {
    let Some(world) = World::new() else { return };
    let held = world.hold();
    let mut sockets = socket_names(&world.names().join("it"));
    sockets.sort();
    assert_eq!(sockets, ["control.sock", "lock", "vsock.sock"]);
    for socket in ["control.sock", "vsock.sock"] {
        let error = UnixStream::connect(world.names().join("it").join(socket)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "a player serves no client");
    }
    let second = world.firn(&["thaw", "--name", "it", "player"]).output().unwrap();
    let error = String::from_utf8(second.stderr).unwrap();
    assert!(error.starts_with("firn: error: a microVM named it is already running"), "{error}");
    assert_eq!(second.status.code(), Some(1));
    assert!(held.child.wait_with_output().unwrap().status.success());
    assert_eq!(world.left(), Vec::<PathBuf>::new());
}

#[test]
fn a_signal_to_the_command_ends_its_player() {
    let Some(world) = World::new() else { return };
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let held = world.hold();
        kill_process(Pid::from_child(&held.child), signal).unwrap();
        let (status, error) = held.end();
        assert_eq!(error, format!("firn: error: ended by signal {}\n", signal.as_raw()));
        assert_eq!((status.code(), world.left()), (Some(1), vec![]));
    }
}

#[test]
fn a_monitor_that_is_killed_or_gets_a_signal_is_reported() {
    let Some(world) = World::new() else { return };
    let ends = [(Signal::KILL, "signal: 9 (SIGKILL)"), (Signal::TERM, "exit status: 1")];
    for (signal, ended) in ends {
        let held = world.hold();
        kill_process(held.monitor, signal).unwrap();
        let (status, error) = held.end();
        assert!(error.starts_with(&format!("firn: error: the monitor ended ({ended}")), "{error}");
        assert_eq!((status.code(), world.left()), (Some(1), vec![]));
    }
}

#[test]
fn a_monitor_ends_when_the_command_is_killed_and_the_next_command_removes_the_sockets() {
    let Some(world) = World::new() else { return };
    let next: [&[&str]; 3] = [
        &["thaw", "player"],
        &["thaw", "--name", "it", "player"],
        // Reports that there is none.
        &["invoke", "it", "{}"],
    ];
    for arguments in next {
        let held = world.hold();
        kill_process(Pid::from_child(&held.child), Signal::KILL).unwrap();
        let (status, _) = held.end();
        assert_eq!(status.signal(), Some(Signal::KILL.as_raw()));
        assert_eq!(world.left(), [world.names().join("it")], "the monitor has no access to it");
        let _ = world.firn(arguments).output().unwrap();
        assert_eq!(world.left(), Vec::<PathBuf>::new(), "{arguments:?}");
    }
}
