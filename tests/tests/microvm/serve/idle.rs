//! A warm microVM between two requests, and after requests that its runtime does not outlive.

use std::thread::sleep;
use std::time::Duration;

use firn_tests::{Daemon, World};
use serde_json::{Value, json};

use super::process;

/// Leaves a busy thread behind, answers with a text of some length, or takes all memory.
const SPINNER: &str = "\
import threading
import time

turns = 0
spins = False


def spin():
    global turns
    while True:
        turns += 1


def handler(event, context):
    global spins
    found = turns
    if event.get('spin'):
        spins = True
        threading.Thread(target=spin, daemon=True).start()
    while spins and turns == found:
        time.sleep(0.001)
    blocks = []
    while event.get('grow'):
        blocks.append(b'x' * (4 << 20))
    return 'x' * event['long'] if 'long' in event else {'turns': found, 'clock': time.monotonic()}
";

#[test]
fn an_idle_microvm_is_paused_and_a_failed_runtime_is_replaced() {
    let world = World::default();
    let daemon = Daemon::start(&world, &["--standby", "0"]);
    daemon.publish("spinner", SPINNER);
    let invoke = |daemon: &Daemon, event: Value, start: &str| {
        let answer = daemon.invoke("spinner:1", &event);
        assert_eq!((answer.status, &answer.report()["start"]), (200, &json!(start)), "{answer:?}");
        answer
    };
    let first = invoke(&daemon, json!({ "spin": true }), "thawed");
    let monitor = process(&first.report());
    // The pause is not waited for: the first second does not count.
    sleep(Duration::from_secs(1));
    let before = ticks(monitor);
    sleep(Duration::from_secs(1));
    let taken = ticks(monitor) - before;
    assert!(taken <= 10, "an idle microVM took {taken} ticks in a second");
    assert_eq!(daemon.status()["versions"][0]["idle"], 1);
    // The thread goes on during a request, and the guest's clock went on in between.
    let second = invoke(&daemon, json!({}), "warm");
    let number = |answer: &Value, name: &str| answer[name].as_f64().unwrap();
    assert!(number(&second.body, "turns") > 0.0, "{second:?}");
    let passed = number(&second.body, "clock") - number(&first.body, "clock");
    assert!(passed > 1.5, "the guest's clock stood still: {passed} s");

    // `awslambdaric` exits on the 413; the agent starts another.
    let long = invoke(&daemon, json!({ "long": 7 << 20 }), "warm");
    assert_eq!(long.body["errorType"], "Function.ResponseSizeTooLarge", "{}", long.head);
    let next = invoke(&daemon, json!({}), "warm");
    assert_eq!(next.body["turns"], 0, "{next:?}");
    let grown = invoke(&daemon, json!({ "grow": true }), "warm");
    assert!(grown.head.contains("x-amz-function-error: unhandled"), "{grown:?}");
    assert_eq!(grown.body["errorType"], "Runtime.OutOfMemory", "{grown:?}");
    // A paused microVM ends with the daemon.
    invoke(&daemon, json!({}), "thawed");
    daemon.end();
    world.assert_nothing_left();

    let daemon = Daemon::start(&world, &["--standby", "0", "--idle", "run"]);
    let monitor = process(&invoke(&daemon, json!({ "spin": true }), "thawed").report());
    let before = ticks(monitor);
    let runs_on = (0..1000).any(|_| {
        sleep(Duration::from_millis(50));
        ticks(monitor) >= before + 30
    });
    assert!(runs_on, "{} ticks", ticks(monitor) - before);
    assert_eq!(daemon.status()["versions"][0]["idle"], 1);
    daemon.end();
}

/// The CPU time of a process, clock ticks.
#[track_caller]
fn ticks(process: i32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let (_, rest) = stat.rsplit_once(") ").unwrap();
    // utime and stime, fields 14 and 15.
    rest.split(' ').skip(11).take(2).map(|field| field.parse::<u64>().unwrap()).sum()
}
