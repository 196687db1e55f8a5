//! Helpers that tests of several modules share.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio, exit};

use firn_memory::recorders::ProfileRecorder;
use firn_run::jail::{Jail, JailMode};
use firn_run::{RecordError, StartReport};
use firn_snapshot::{Profile, Snapshot};
use parking_lot::{Mutex, MutexGuard};
use rustix::process::{Signal, getpid, kill_process};
use serde_json::{Value, json};

use crate::cache::Cache;
use crate::host::{self, KvmKind};
use crate::players::profile::Host;
use crate::progress::Quiet;
use crate::thaw::{Results, Row, RowHead, Run};

/// Held by every test that writes a program and starts it. A process that another test starts
/// meanwhile would inherit the open file, and the kernel does not execute a file that is open for
/// writing.
pub(crate) fn one_at_a_time() -> MutexGuard<'static, ()> {
    static STARTING: Mutex<()> = Mutex::new(());
    STARTING.lock()
}

/// Tells a process of [`monitor_program`] its script.
const SCRIPT: &str = "FIRN_TEST_SCRIPT";

/// A program that speaks a monitor's protocol, and gets its behaviour from a shell script. `$1` of
/// the script is the planner, `$2` the snapshot's directory, or `pool` with the name in `$3`, and
/// `$ORDER` the request as JSON. A line `held` on its output is the event of that name: its input
/// ends with the release. The rest of its output is the report.
pub(crate) fn monitor_program(directory: &Path, script: &str) -> PathBuf {
    let path = directory.join("script");
    fs::write(&path, script).unwrap();
    test_program(directory, &format!("{SCRIPT}={}", path.display()), "a_monitor_follows_its_script")
}

/// A program that runs a test of this module with a variable.
fn test_program(directory: &Path, variable: &str, test: &str) -> PathBuf {
    let path = directory.join("firn");
    let program = std::env::current_exe().unwrap();
    let program = program.display();
    let command =
        format!("#!/bin/sh\n{variable} exec {program} --exact testing::{test} --nocapture\n");
    fs::write(&path, command).unwrap();
    fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
    path
}

/// The process of [`monitor_program`]; in a test run of its own it does nothing.
#[test]
fn a_monitor_follows_its_script() {
    let Some(script) = std::env::var_os(SCRIPT) else { return };
    let connection = UnixDatagram::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let mut packet = vec![0; 64 << 10];
    // The devices come before the order.
    connection.recv(&mut packet).unwrap();
    let len = connection.recv(&mut packet).unwrap();
    // The first byte marks the last packet of a message.
    let order: Value = serde_json::from_slice(&packet[1..len]).unwrap();
    let thaw = &order["start"]["origin"]["thaw"];
    let mut words = vec![thaw["planner"].as_str().unwrap()];
    match (&thaw["source"]["directory"]["path"], &thaw["source"]["pool"]["name"]) {
        (Value::String(path), _) => words.push(path),
        (_, Value::String(name)) => words.extend(["pool", name]),
        other => panic!("{other:?}"),
    }
    let mut child = Command::new("sh")
        .arg(script)
        .args(words)
        .env("ORDER", order.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let send = |event: Value| {
        let message = [&[0], event.to_string().as_bytes()].concat();
        connection.send(&message).unwrap();
    };
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut report = String::new();
    stdout.read_line(&mut report).unwrap();
    if report == "held\n" {
        report.clear();
        send(json!("held"));
        connection.recv(&mut packet).unwrap();
    }
    drop(child.stdin.take());
    stdout.read_to_string(&mut report).unwrap();
    let status = child.wait().unwrap();
    if status.success() {
        send(json!({ "started": serde_json::from_str::<Value>(&report).unwrap() }));
    }
    if status.signal().is_some() {
        kill_process(getpid(), Signal::KILL).unwrap();
    }
    exit(status.code().unwrap_or(1));
}

/// Tells a process that it is one of [`record`].
const MONITOR: &str = "FIRN_TEST_MONITOR";

/// Lets a player in a directory replay a trace under a recorder. Its monitor is a process of this
/// test, without a jail.
pub(crate) fn record(
    snapshot: &Snapshot,
    input: Option<&str>,
    recorder: ProfileRecorder,
    profile: &mut Profile,
) -> Result<(), RecordError> {
    let _alone = one_at_a_time();
    let directory = tempfile::tempdir().unwrap();
    let program = test_program(directory.path(), &format!("{MONITOR}=1"), "a_monitor_serves");
    let (path, program, progress) = (snapshot.path(), &*program, &Quiet);
    let host = Host { path, program, progress, jail: Jail::new(JailMode::Off) };
    host.record(snapshot, input, recorder, profile)
}

/// The process of [`record`]; in a test run of its own it does nothing.
#[test]
fn a_monitor_serves() {
    if std::env::var_os(MONITOR).is_some() {
        exit(i32::from(firn_run::monitor::serve().is_err()));
    }
}

/// A report as `firn thaw --json` prints it for a player.
pub(crate) const REPORT: &str = r#"{"trace":"t","planner":"firecracker:readahead=on","touches":11,"pages":10,
"times":{"process_start_ns":1,"load_ns":20,"plan_ns":300,"execute_ns":3000,"preload_ns":0,"index_ns":0,
"resume_ns":50000,"replay_ns":600000,"total_ns":654321,"verify_ns":7},
"kvm":{"page_faults":12,"exits":13,"pages_4k":10,"pages_2m":0,"pages_1g":0},
"minor_faults":14,"major_faults":2,"read_bytes":8192,"private_bytes":4096,"shared_bytes":40960,"pool_bytes":0,
"page_table_bytes":12288,"cpu_ns":500000}"#;

fn report(replay_ns: u64) -> StartReport {
    let mut report: StartReport = serde_json::from_str(REPORT).unwrap();
    report.times.replay_ns = Some(replay_ns);
    report
}

pub(crate) fn head(label: Option<&str>, oversubscribed: bool) -> RowHead {
    RowHead {
        planner: "firecracker:readahead=on".to_owned(),
        label: label.map(str::to_owned),
        trace: "t".to_owned(),
        concurrency: 2,
        cache: Cache::Cold,
        oversubscribed,
        snapshots: 1,
        recorded_on: None,
        at_once: None,
        standby_bytes: None,
        ready_bytes: None,
    }
}

pub(crate) fn run(replays: &[u64]) -> Run {
    Run {
        reports: replays.iter().map(|&ns| report(ns)).collect(),
        burst_ns: 5_000_000,
        preload_ns: None,
        settle_ns: None,
        kvm_table_bytes: 0,
        cached_bytes: 8192,
        free_bytes: None,
    }
}

/// Results with one row, for other tests.
pub(crate) fn sample(planner: &str, trace: &str, oversubscribed: bool) -> Results {
    let mut row = Row::of(head(None, oversubscribed), &[run(&[1_000_000, 2_000_000])]).unwrap();
    row.planner = planner.to_owned();
    row.trace = trace.to_owned();
    let host = host::Host {
        machine: "2 x Some <CPU> & more, 4 GiB".to_owned(),
        cpus: 2,
        memory_bytes: 4 << 30,
        kernel: "6.12".to_owned(),
        kvm: KvmKind::Software,
        medium: "ext4 on /dev/vda".to_owned(),
        commit: "unknown".to_owned(),
    };
    Results { results: vec![row], ..Results::at(host) }
}

/// Whether every element is closed in order, every attribute is quoted, and every `&` begins an
/// entity.
pub(crate) fn well_formed(svg: &str) -> bool {
    let mut open = Vec::new();
    let mut rest = svg;
    while let Some(at) = rest.find('<') {
        let (text, tag) = rest.split_at(at);
        let Some(end) = tag.find('>') else { return false };
        let (tag, behind) = (&tag[1..end], &tag[end + 1..]);
        if text.contains('>') || !entities(text) || !entities(tag) || tag.contains('<') {
            return false;
        }
        if let Some(name) = tag.strip_prefix('/') {
            if open.pop() != Some(name) {
                return false;
            }
        } else {
            if tag.matches('"').count() % 2 != 0 {
                return false;
            }
            if !tag.ends_with('/') {
                open.push(tag.split(' ').next().unwrap_or_default());
            }
        }
        rest = behind;
    }
    open.is_empty() && rest.trim().is_empty() && !svg.contains("NaN") && !svg.contains("inf")
}

fn entities(text: &str) -> bool {
    text.split('&')
        .skip(1)
        .all(|part| ["lt;", "gt;", "amp;", "quot;"].iter().any(|entity| part.starts_with(entity)))
}
