//! A kill affects only the requests of the killed process, and many requests leave nothing behind.

use std::time::Duration;

use firn_tests::{Daemon, Resources, World, reply};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::{SLEEPER, adds_up, kill, process, processes, until};

const PATH: &str = "/2015-03-31/functions/sleeper:1/invocations";

#[test]
fn kills_affect_only_their_own_requests() {
    let world = World::default();
    // The daemon is killed during a freeze: the next daemon repeats the freeze.
    let daemon = Daemon::start(&world, &["--standby", "0"]);
    let created = daemon.create("sleeper", "handler.py", SLEEPER, &Value::Null);
    assert_eq!(created.body["State"], "Pending", "{created:?}");
    until(&daemon, |_| world.leftovers().iter().any(|found| found.ends_with("/control.sock")));
    assert_eq!(daemon.status()["versions"][0]["publishing"], 1);
    daemon.kill();
    world.assert_swept();
    // The memory suffices for one microVM in the worst case (208 MiB and its image), and for two by
    // the measured use of the first. Disks count too where the temporary folder is in memory.
    let daemon = Daemon::start(&world, &["--memory", "400M", "--disk", "64M"]);
    let settled = daemon.settled("sleeper");
    assert_eq!(settled.body["State"], "Active", "{settled:?}");

    // Monitors are killed during requests.
    let first = daemon.invoke("sleeper:1", &json!({}));
    let report = first.report();
    assert_eq!(report["standby"], true, "{report}");
    assert_eq!(
        report["thaw"]["planner"], "firecracker:readahead=on",
        "the default planner of a directory: {report}"
    );
    let killed = daemon.send("POST", PATH, r#"{"sleep": 100}"#);
    let warm = process(&report);
    std::thread::sleep(Duration::from_millis(500));
    let unaffected = daemon.send("POST", PATH, r#"{"sleep": 1, "who": "unaffected"}"#);
    std::thread::sleep(Duration::from_millis(500));
    kill(warm);
    let (killed, unaffected) = (reply(killed), reply(unaffected));
    assert_eq!(killed.status, 500, "{killed:?}");
    assert!(killed.head.contains("x-amzn-errortype: serviceexception"), "{killed:?}");
    let report = killed.report();
    let start_and_reason = (&report["start"], &report["reason"]);
    assert_eq!(start_and_reason, (&json!("warm"), &json!("the microvm ended before it answered")));
    adds_up(&report);
    assert_eq!(
        (unaffected.status, &unaffected.body["who"]),
        (200, &json!("unaffected")),
        "{unaffected:?}"
    );

    // An idle instance and all standby monitors are killed: no request fails.
    let warm = process(&unaffected.report());
    kill_process(Pid::from_raw(warm).unwrap(), Signal::STOP).unwrap();
    let anew = daemon.send("POST", PATH, r#"{"anew": 1}"#);
    until(&daemon, |status| status["versions"][0]["busy"] == 1);
    processes(&world, "monitor").into_iter().filter(|process| *process != warm).for_each(kill);
    kill(warm);
    let anew = reply(anew);
    assert_eq!((anew.status, &anew.body["anew"]), (200, &json!(1)), "{anew:?}");
    assert_eq!(anew.report()["start"], "thawed", "{anew:?}");

    // Standby monitors have the VM of this version made by now, or soon.
    let mut last = anew;
    let hit = (0..20).any(|_| {
        kill(process(&last.report()));
        last = daemon.invoke("sleeper:1", &json!({}));
        last.report()["thaw"]["standby"] == "hit"
    });
    assert!(hit, "{last:?}");

    // A client disconnects while its function runs: the function continues.
    let answered = |status: &Value| {
        let count = |name: &str| status["versions"][0][name].as_u64().unwrap();
        count("requests") - count("failed") - count("throttled") - count("function_errors")
    };
    let before = answered(&daemon.status());
    let gone = daemon.send("POST", PATH, r#"{"sleep": 1}"#);
    until(&daemon, |status| status["versions"][0]["busy"] == 1);
    drop(gone);
    until(&daemon, |status| answered(status) == before + 1);

    // Truncated requests have no effect.
    let functions = "/2015-03-31/functions";
    drop(daemon.send_part("POST", PATH, r#"{"cut": "#, 100));
    drop(daemon.send_part("POST", functions, r#"{"FunctionName": "#, 1 << 20));
    let warm = daemon.invoke("sleeper:1", &json!({ "still": "here" }));
    assert_eq!((warm.status, &warm.body["still"]), (200, &json!("here")), "{warm:?}");
    let status = daemon.status();
    assert_eq!((answered(&status), &status["versions"][0]["busy"]), (before + 2, &json!(0)));
    let listed = daemon.ask("GET", functions, &Value::Null);
    let names: Vec<&Value> =
        listed.body["Functions"].as_array().unwrap().iter().map(|f| &f["FunctionName"]).collect();
    assert_eq!(names, ["sleeper"]);

    // The daemon is killed during a request: its microVMs end, its functions remain.
    let lost = daemon.send("POST", PATH, r#"{"sleep": 100}"#);
    std::thread::sleep(Duration::from_millis(500));
    daemon.kill();
    drop(lost);
    world.assert_swept();
    let daemon = Daemon::start(&world, &["--keep-alive", "1"]);
    let thawed = daemon.invoke("sleeper:1", &json!({ "again": 1 }));
    assert_eq!((thawed.status, &thawed.body["again"]), (200, &json!(1)), "{thawed:?}");
    assert_eq!(thawed.report()["start"], "thawed", "{thawed:?}");
    many(&world, &daemon);
    daemon.end();
}

/// Sends 100 requests, or `FIRN_INVOCATIONS`. The daemon thaws, reuses and ends microVMs.
/// Afterwards it uses as much memory and as many files and processes as before.
fn many(world: &World, daemon: &Daemon) {
    let count = std::env::var("FIRN_INVOCATIONS").map_or(100, |count| count.parse().unwrap());
    const ROUND: usize = 50;
    let round = || {
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for turn in 0..ROUND / 2 {
                        let answer = daemon.invoke("sleeper:1", &json!({ "turn": turn }));
                        assert_eq!(answer.body["turn"], turn, "{answer:?}");
                    }
                });
            }
        });
        // Idle instances end, and used standby monitors are replaced.
        until(daemon, |status| {
            let monitors = &status["monitors"];
            (&monitors["running"], &monitors["standby"]) == (&json!(0), &json!(4))
        });
    };
    round();
    let before = Resources::of(world, daemon);
    for _ in 0..count / ROUND - 1 {
        round();
    }
    Resources::of(world, daemon).assert_same_as(&before);
    let status = daemon.status();
    for what in ["private", "shared", "private_booked", "shared_booked"] {
        assert_eq!(status["memory"][what], 0, "{status}");
    }
}
