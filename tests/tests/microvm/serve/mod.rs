//! The daemon, with the clients that people have.

mod clients;
mod crashes;
mod pool;
mod refusals;

use std::process::Child;
use std::time::{Duration, Instant};

use firn_tests::{Daemon, Reply};
use serde_json::Value;

/// Answers with what it is told to, after the seconds that it is told to sleep.
const SLEEPER: &str = "\
import time


def handler(event, context):
    time.sleep(event.get('sleep', 0))
    return event
";

/// Fails unless the daemon refused a request, with this status and error.
#[track_caller]
fn refused(reply: &Reply, status: u16, kind: &str) {
    assert_eq!(reply.status, status, "{reply:?}");
    let kind = format!("x-amzn-errortype: {}", kind.to_lowercase());
    assert!(reply.head.contains(&kind) && reply.body["Message"].is_string(), "{reply:?}");
}

/// Waits until the daemon's status is as it should become.
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

#[track_caller]
fn finished(child: Child) -> String {
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {stderr}", output.status);
    String::from_utf8(output.stdout).unwrap()
}
