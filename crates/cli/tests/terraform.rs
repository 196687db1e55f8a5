//! `firn serve` as a process, with boto3 as its client, for all that needs no microVM. Requires the
//! part `clients`: boto3 from `make clients`, and a Python.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use firn_lab::cache_dir;
use rustix::process::{Pid, Signal, kill_process};

/// A daemon. Killed when this is dropped.
struct Daemon {
    process: Child,
    endpoint: String,
}

impl Daemon {
    /// It never boots a microVM, so it gets no files for guests.
    fn start(directory: &Path) -> Self {
        let mut serve = Command::new(env!("CARGO_BIN_EXE_firn"));
        serve.args(["serve", "--listen", "127.0.0.1:0", "--software-kvm", "--standby", "0"]);
        serve.arg("--data").arg(directory.join("data")).env("FIRN_RUN_DIR", directory);
        for file in ["--kernel", "--initramfs", "--root", "--overlay"] {
            serve.args([file, "/dev/null"]);
        }
        let mut process = serve.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let (_, endpoint) = line.trim().rsplit_once(' ').unwrap();
        Self { process, endpoint: endpoint.to_owned() }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let pid = Pid::from_child(&self.process);
        let _ = kill_process(pid, Signal::KILL);
        let _ = self.process.wait();
    }
}

/// The folder with boto3, if this host has it.
fn clients() -> Option<PathBuf> {
    let folder = cache_dir()?.join("clients");
    let has = firn_required::has("clients", folder.join("boto3").is_dir());
    has.then_some(folder)
}

#[test]
fn what_terraform_sets_is_what_it_reads() {
    let Some(clients) = clients() else { return };
    let directory = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(directory.path());
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/clients/terraform.py");
    let mut python = Command::new("python3");
    python.arg(script).arg(&daemon.endpoint);
    python.env("PYTHONPATH", clients).env("PYTHONDONTWRITEBYTECODE", "1");
    python.env("AWS_ACCESS_KEY_ID", "any").env("AWS_SECRET_ACCESS_KEY", "any");
    python.env("AWS_DEFAULT_REGION", "us-east-1").env("HOME", directory.path());
    let output = python.output().unwrap();
    let (text, error) = (output.stdout, String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text == b"done\n", "{error}");
}
