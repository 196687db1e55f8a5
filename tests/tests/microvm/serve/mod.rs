//! The daemon with its users' clients.

mod clients;
mod cpu;
mod crashes;
mod disks;
mod idle;
mod network;
mod pool;
mod refusals;
mod runtimes;
mod thaws;

use std::process::Child;
use std::time::{Duration, Instant};

use firn_tests::{Daemon, Reply, World};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Returns the value in its event, after the seconds in its event.
const SLEEPER: &str = "\
import time


def handler(event, context):
    time.sleep(event.get('sleep', 0))
    return event
";

/// Fails unless the daemon refused a request with this status and error.
#[track_caller]
fn refused(reply: &Reply, status: u16, kind: &str) {
    assert_eq!(reply.status, status, "{reply:?}");
    let kind = format!("x-amzn-errortype: {}", kind.to_lowercase());
    assert!(reply.head.contains(&kind) && reply.body["Message"].is_string(), "{reply:?}");
}

/// Fails unless the parts of a report add up to its request's time.
#[track_caller]
fn adds_up(report: &Value) {
    let ns = |name: &str| report[name].as_u64().unwrap_or_else(|| panic!("{name}: {report}"));
    let parts = ["accept_ns", "queue_ns", "start_ns", "invoke_ns"].map(ns);
    assert!(parts.iter().sum::<u64>() <= ns("total_ns"), "{report}");
    assert!(ns("accept_ns") > 0 && ns("invoke_ns") > 0, "{report}");
    let of_start = match report["start"].as_str() {
        Some("cold") => ns("boot_ns") + ns("load_ns"),
        Some("thawed") => report["thaw"]["times"]["total_ns"].as_u64().unwrap(),
        _ => return assert_eq!(ns("start_ns"), 0, "{report}"),
    };
    assert!((1..=ns("start_ns")).contains(&of_start), "{report}");
}

/// Waits until the daemon's status satisfies `is`.
#[track_caller]
fn until(daemon: &Daemon, is: impl Fn(&Value) -> bool) {
    let begin = Instant::now();
    loop {
        let status = daemon.status();
        if is(&status) {
            return;
        }
        assert!(begin.elapsed() < Duration::from_secs(120), "{status}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Kills a process, and waits until it has exited.
#[track_caller]
fn kill(process: i32) {
    kill_process(Pid::from_raw(process).unwrap(), Signal::KILL).unwrap();
    // The kernel frees its memory before its parent can observe the exit.
    let stat = || std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    while stat().rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z')) {
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The process that answered with this report, after a thaw.
#[track_caller]
fn process(report: &Value) -> i32 {
    i32::try_from(report["thaw"]["pid"].as_i64().unwrap()).unwrap()
}

/// Processes that run one of firn's commands.
#[track_caller]
fn processes(world: &World, command: &str) -> Vec<i32> {
    let found = world.processes_of(command);
    assert!(!found.is_empty());
    found
}

#[track_caller]
fn finished(child: Child) -> String {
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {stderr}", output.status);
    String::from_utf8(output.stdout).unwrap()
}
