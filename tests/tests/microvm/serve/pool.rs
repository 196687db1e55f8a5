//! A daemon with a pool.

use std::time::{Duration, Instant};

use firn_tests::{Daemon, World, reply};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::{SLEEPER, processes, refused, until};

#[test]
fn functions_are_published_into_a_pool_and_thawed_from_it() {
    let world = World::default();
    let medium = world.file("pool");
    world.firn(["pool", "create", "--size", "320M", "--medium"]).arg(&medium).run().ok();
    let medium = medium.display().to_string();
    let snapshots = || {
        let listed = world.firn(["pool", "ls", "--json", "--pool", &medium]).run().json();
        listed["extents"].as_array().unwrap().len()
    };
    let daemon = Daemon::start(&world, &["--pool", &medium]);
    daemon.publish("sleeper", SLEEPER);
    let thawed = daemon.invoke("sleeper:1", &json!({ "a": 1 }));
    assert_eq!((thawed.status, &thawed.body), (200, &json!({ "a": 1 })), "{thawed:?}");
    let report = thawed.report();
    assert_eq!(report["start"], "thawed", "{report}");
    assert_eq!(report["thaw"]["planner"], "firn:copy=1,read=32,granule=2m,learn=on", "{report}");
    assert!(report["thaw"]["pool_bytes"].as_u64().unwrap() > 0, "{report}");
    assert_eq!(report["thaw"]["shared_bytes"], 0, "{report}");
    // A killed daemon finds the function again. Deleting the function removes its snapshot from the
    // pool.
    daemon.kill();
    world.assert_swept();
    let daemon = Daemon::start(
        &world,
        &["--pool", &medium, "--log", "json", "--monitors", "1", "--queue", "1"],
    );
    assert_eq!(daemon.invoke("sleeper:1", &json!({})).report()["start"], "thawed");

    // One microVM at a time: a second request waits, a third is refused.
    let path = "/2015-03-31/functions/sleeper:1/invocations";
    let served = daemon.send("POST", path, r#"{"sleep": 3}"#);
    until(&daemon, |status| status["versions"][0]["busy"] == 1);
    let waits = daemon.send("POST", path, "{}");
    until(&daemon, |status| status["queued"] == 1);
    refused(&daemon.invoke("sleeper:1", &json!({})), 429, "TooManyRequestsException");
    assert_eq!((reply(served).status, reply(waits).status), (200, 200));

    // Daemon and manager are killed between the deletion and the removal of the snapshot: the
    // manager does not respond meanwhile, and a monitor and the daemon wait for it.
    assert_eq!(snapshots(), 1);
    let managers = processes(&world, "pool");
    let signal = |process: &i32, signal| kill_process(Pid::from_raw(*process).unwrap(), signal);
    managers.iter().for_each(|manager| signal(manager, Signal::STOP).unwrap());
    let one = "/2015-03-31/functions/sleeper";
    let deleted = daemon.send("DELETE", one, "");
    let begin = Instant::now();
    while daemon.ask("GET", one, &Value::Null).status != 404 {
        assert!(begin.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(50));
    }
    let log = daemon.kill().stderr;
    drop(deleted);
    managers.iter().for_each(|manager| signal(manager, Signal::KILL).unwrap());
    assert_eq!(snapshots(), 1);
    let daemon = Daemon::start(&world, &["--pool", &medium, "--standby", "0"]);
    assert_eq!(snapshots(), 0);
    daemon.end();
    // Not even the sockets of the monitor that waited: it ended after its daemon.
    world.assert_nothing_left();
    let lines = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let invoked: Vec<Value> = lines.filter(|line| line["fields"]["message"] == "invoked").collect();
    assert_eq!(invoked.len(), 3, "{log}");
    let report: Value =
        serde_json::from_str(invoked[0]["fields"]["report"].as_str().unwrap()).unwrap();
    assert_eq!(report["start"], "thawed", "{report}");
}
