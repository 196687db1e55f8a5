//! Managers that are started on demand.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use firn_pool::Client;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

struct World {
    folder: TempDir,
}

impl World {
    fn new() -> Self {
        let world = Self { folder: TempDir::new().unwrap() };
        world.ok(&[
            "pool",
            "create",
            "--size",
            "32M",
            "--medium",
            world.medium().to_str().unwrap(),
        ]);
        world
    }

    fn medium(&self) -> PathBuf {
        self.folder.path().join("medium")
    }

    fn sockets(&self) -> Vec<PathBuf> {
        let found = std::fs::read_dir(self.folder.path().join("run"));
        let found = found.into_iter().flatten().map(|entry| entry.unwrap().path());
        found.filter(|path| path.extension().is_some_and(|end| end == "sock")).collect()
    }

    fn firn(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_firn"));
        command.args(arguments).env("FIRN_RUN_DIR", self.folder.path().join("run"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.firn(arguments).output().unwrap()
    }

    fn ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {error}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Requests a snapshot that does not exist: the error shows whether a manager was reached.
    fn ask(&self) -> Command {
        self.firn(&["thaw", "--pool", self.medium().to_str().unwrap(), "snow"])
    }

    /// A client of the manager, which keeps the manager running, and the manager's process ID.
    /// Starts the manager again if it has just exited.
    fn manager(&self) -> (Client, u32) {
        loop {
            if let Some(socket) = self.sockets().first()
                && let Ok(mut client) = Client::connect(socket)
                && let Ok(described) = client.describe()
            {
                return (client, described.pid);
            }
            reached(&self.ask().output().unwrap());
        }
    }
}

fn reached(output: &Output) {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("the pool has no snapshot \"snow\""), "{error}");
}

fn is_alive(pid: u32) -> bool {
    // A process that has not been waited for is a zombie.
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

fn wait_for_end(pid: u32) {
    while is_alive(pid) {
        std::thread::yield_now();
    }
}

#[test]
fn one_manager_serves_concurrent_clients_and_exits_after_the_last() {
    let world = World::new();
    let clients: Vec<_> = (0..8).map(|_| world.ask().spawn().unwrap()).collect();
    for client in clients {
        reached(&client.wait_with_output().unwrap());
    }
    assert!(world.sockets().len() <= 1);
    let (client, pid) = world.manager();
    reached(&world.ask().output().unwrap());
    let medium = world.medium();
    let listing = world.ok(&["pool", "ls", "--json", "--pool", medium.to_str().unwrap()]);
    let listing: Value = serde_json::from_str(&listing).unwrap();
    assert_eq!(listing["extents"], Value::Array(vec![]));
    let in_use =
        world.run(&["pool", "create", "--overwrite", "--medium", medium.to_str().unwrap()]);
    assert!(String::from_utf8_lossy(&in_use.stderr).contains("in use by another process"));
    assert_eq!(world.manager().1, pid, "the same manager serves");
    drop(client);
    wait_for_end(pid);
    assert!(world.sockets().is_empty());
    // The socket of a killed manager does not block the next manager.
    let (client, pid) = world.manager();
    kill_process(Pid::from_raw(pid.try_into().unwrap()).unwrap(), Signal::KILL).unwrap();
    wait_for_end(pid);
    drop(client);
    let (client, second) = world.manager();
    assert_ne!(second, pid);
    drop(client);
    wait_for_end(second);
}

#[test]
fn a_manually_started_manager_is_found_by_its_medium() {
    let world = World::new();
    let (medium, socket) = (world.medium(), world.folder.path().join("here"));
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let serve = ["pool", "serve", "--detach", "--json", "--medium", &text(&medium)];
    let serving = world.ok(&[&serve[..], &["--socket", &text(&socket)]].concat());
    let serving: Value = serde_json::from_str(&serving).unwrap();
    reached(&world.ask().output().unwrap());
    assert_eq!(world.manager().1, u32::try_from(serving["pid"].as_u64().unwrap()).unwrap());
    let pid = serving["pid"].as_i64().unwrap().try_into().unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::TERM).unwrap();
    wait_for_end(pid.cast_unsigned());
    assert!(world.sockets().is_empty() && !socket.exists());
}

#[test]
fn a_medium_without_a_pool_is_reported_immediately() {
    let world = World::new();
    std::fs::write(world.medium(), vec![0; 8 << 20]).unwrap();
    let output = world.ask().output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("did not start") && error.contains("firn pool create"), "{error}");
    std::fs::remove_file(world.medium()).unwrap();
    let output = world.ask().output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("no pool's manager answers on"), "{error}");
}
