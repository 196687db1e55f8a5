//! Files that are truncated while microVMs run on them, and damage that fs-verity finds.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod verity;

use std::fs::{OpenOptions, read_dir, read_to_string};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::Duration;

use firn_vmm::{KVM_DEVICE, open_kvm};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

fn firn(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_firn"));
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn done(arguments: &[&str]) -> String {
    let output = firn(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Starts a command, and waits for its first line.
fn start(arguments: &[&str]) -> Child {
    begun(&mut firn(arguments))
}

fn begun(command: &mut Command) -> Child {
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    if line.is_empty() {
        let mut error = String::new();
        child.stderr.take().unwrap().read_to_string(&mut error).unwrap();
        assert!(error.is_empty(), "{command:?}: {error}");
    }
    child
}

/// Lets a held player check all its memory; returns its standard error and exit status.
fn ended(mut player: Child) -> (String, ExitStatus) {
    drop(player.stdin.take());
    let output = player.wait_with_output().unwrap();
    (String::from_utf8(output.stderr).unwrap(), output.status)
}

fn refused(player: Child) -> String {
    let (error, status) = ended(player);
    assert_eq!(status.code(), Some(1), "{error}");
    error
}

fn truncate(path: &Path, len: u64) -> u64 {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    let whole = file.metadata().unwrap().len();
    file.set_len(len).unwrap();
    whole
}

fn has_kvm() -> bool {
    firn_required::has("kvm", open_kvm(KVM_DEVICE.as_ref()).is_ok())
}

#[test]
fn an_image_that_shrinks_ends_its_microvm() {
    if !has_kvm() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let snapshot = folder.path().join("player");
    done(&["player", "--dense", "--trace", "sequential-read:4M", "--out", text(&snapshot)]);
    let player = start(&["thaw", "--hold", text(&snapshot)]);
    let image = snapshot.join("memory.img");
    truncate(&image, 2 << 20);
    let error = refused(player);
    let lost = format!("of {} is lost: the file was truncated to 2097152 bytes", image.display());
    assert!(error.contains("the host cannot provide ") && error.contains(&lost), "{error}");
}

/// A dense snapshot of a player that replays one input, with the profile of another input and the
/// packed file of a planner.
fn packed(planner: &str, part: &str) -> (TempDir, PathBuf) {
    let folder = TempDir::new().unwrap();
    let snapshot = folder.path().join("player");
    done(&["player", "--dense", "--trace", "hello-a,hello-b", "--out", text(&snapshot)]);
    done(&["profile", "record", "--input", "hello-b", "--part", part, text(&snapshot)]);
    done(&["profile", "pack", "--planner", planner, text(&snapshot)]);
    (folder, snapshot)
}

#[test]
fn an_image_that_shrinks_ends_the_microvm_that_a_pager_serves() {
    if !has_kvm() {
        return;
    }
    for planner in ["reap", "reap:granule=16"] {
        let (_folder, snapshot) = packed("reap", "faults");
        let player = start(&["thaw", "--hold", "--planner", planner, text(&snapshot)]);
        truncate(&snapshot.join("memory.img"), 2 << 20);
        let error = refused(player);
        let (ended, lost) =
            ("the microVM was ended: page ", "the image shrank while it was in use");
        assert!(error.starts_with(&format!("firn: error: {ended}")), "{error}");
        assert!(error.contains(lost) && !error.contains("wrong memory"), "{error}");
    }
}

#[test]
fn a_loading_set_that_shrinks_ends_its_microvm() {
    if !has_kvm() {
        return;
    }
    let (_folder, snapshot) = packed("faasnap", "groups");
    let player = start(&["thaw", "--hold", "--planner", "faasnap", text(&snapshot)]);
    let set = snapshot.join("loading-set.img");
    while has_loader(&player) {
        sleep(Duration::from_millis(1));
    }
    truncate(&set, 8192);
    let error = refused(player);
    let lost = format!("of {} is lost: the file was truncated to 8192 bytes", set.display());
    assert!(error.contains("the host cannot provide ") && error.contains(&lost), "{error}");
}

/// Whether the monitor still reads beside the guest.
fn has_loader(player: &Child) -> bool {
    let children = format!("/proc/{0}/task/{0}/children", player.id());
    let children = read_to_string(children).unwrap();
    assert!(!children.is_empty(), "there is no monitor");
    let threads = children.split_whitespace().flat_map(|monitor| {
        // A monitor that has failed is gone.
        read_dir(format!("/proc/{monitor}/task")).into_iter().flatten()
    });
    let mut names = threads.map(|thread| read_to_string(thread.unwrap().path().join("comm")));
    names.any(|name| name.is_ok_and(|name| name == "loader\n"))
}

/// A pool on a file, and its manager.
struct Pool {
    folder: TempDir,
    manager: Child,
}

impl Pool {
    fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let (medium, socket) = (folder.path().join("medium"), folder.path().join("socket"));
        done(&["pool", "create", "--size", "64M", "--medium", text(&medium)]);
        let manager =
            start(&["pool", "serve", "--medium", text(&medium), "--socket", text(&socket)]);
        done(&[
            "player",
            "--pool",
            text(&socket),
            "--trace",
            "sequential-read:4M",
            "--out",
            "player",
        ]);
        Self { folder, manager }
    }

    fn medium(&self) -> PathBuf {
        self.folder.path().join("medium")
    }

    fn thaw(&self, planner: &str) -> Child {
        let socket = self.folder.path().join("socket");
        start(&["thaw", "--hold", "--planner", planner, "--pool", text(&socket), "player"])
    }
}

#[test]
fn a_medium_that_shrinks_ends_its_microvms_and_leaves_the_pool_readable() {
    if !has_kvm() {
        return;
    }
    let mut pool = Pool::new();
    let players = ["pass_shared", "pass"].map(|planner| pool.thaw(planner));
    let whole = truncate(&pool.medium(), 4096);
    for player in players {
        let error = refused(player);
        let lost = format!("of {} is lost: ", pool.medium().display());
        assert!(error.contains("the host cannot provide ") && error.contains(&lost), "{error}");
    }
    // The manager cannot repair the replica, and exits with an error.
    let status = pool.manager.wait().unwrap();
    let mut error = String::new();
    pool.manager.stderr.take().unwrap().read_to_string(&mut error).unwrap();
    assert_eq!(status.code(), Some(1), "{error}");
    let lost = format!(" of {}. The file was truncated", pool.medium().display());
    assert!(error.contains(&lost), "{error}");
    // A truncated medium is refused; a medium with its former size is read.
    let output = firn(&["pool", "ls", "--pool", text(&pool.medium())]).output().unwrap();
    assert!(String::from_utf8(output.stderr).unwrap().contains("4096 bytes"));
    truncate(&pool.medium(), whole);
    let output = firn(&["pool", "verify", "--pool", text(&pool.medium())]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
}

#[test]
fn a_lost_extent_is_reported_while_the_pool_remains() {
    if !has_kvm() {
        return;
    }
    let mut pool = Pool::new();
    let player = pool.thaw("pass_shared");
    // The truncated part is a hole afterwards; both copies of the metadata exist.
    let whole = truncate(&pool.medium(), 3 << 20);
    let error = refused(player);
    // A monitor does not keep the medium, and so not know its length.
    assert!(error.contains("is lost: the file was truncated, its device failed"), "{error}");
    truncate(&pool.medium(), whole);
    let process = Pid::from_child(&pool.manager);
    kill_process(process, Signal::TERM).unwrap();
    assert!(pool.manager.wait().unwrap().success());
    let listing = done(&["pool", "ls", "--pool", text(&pool.medium())]);
    assert!(listing.contains("player"), "{listing}");
    let output = firn(&["pool", "verify", "--pool", text(&pool.medium())]).output().unwrap();
    let found = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.code() == Some(1) && found.contains("player"), "{found}");
}

impl Drop for Pool {
    fn drop(&mut self) {
        // The manager may have exited already.
        let _ = self.manager.kill();
        let _ = self.manager.wait();
    }
}
