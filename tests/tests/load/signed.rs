//! Snapshots that are signed: what is not signed for its tenant is never parsed.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use firn_tests::{Daemon, World};
use serde_json::json;

use crate::{ECHO, players_in};

/// How the daemon starts a microVM for a request, once that of the request before has ended.
#[track_caller]
fn start(daemon: &Daemon) -> String {
    let begin = Instant::now();
    while daemon.status()["monitors"]["running"] != 0 {
        assert!(begin.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(10));
    }
    let reply = daemon.invoke("signed:1", &json!({}));
    assert_eq!(reply.status, 200, "{reply:?}");
    reply.report()["start"].as_str().unwrap().to_owned()
}

#[test]
fn a_snapshot_without_its_signature_is_not_thawed() {
    let world = World::default();
    let keys = world.file("keys");
    let options = players_in(&world);
    let own = ["--standby", "0", "--keep-alive", "0", "--snapshot-keys", keys.to_str().unwrap()];
    let options: Vec<&str> = own.into_iter().chain(options.iter().map(String::as_str)).collect();
    let daemon = Daemon::start(&world, &options);
    daemon.publish("signed", ECHO);
    let key = keys.join("default.pem");
    assert!(key.is_file());
    let invoke = || start(&daemon);
    assert_eq!(invoke(), "thawed");

    let mut snapshots = fs::read_dir(world.file("daemon").join("snapshots")).unwrap();
    let snapshot = snapshots.next().unwrap().unwrap().path();
    let container = snapshot.join("snapshot.firn");
    let whole = fs::read(&container).unwrap();
    // What cannot be parsed is refused for its signature, and the function boots.
    fs::write(&container, "no snapshot").unwrap();
    assert_eq!(invoke(), "cold");
    fs::write(&container, whole).unwrap();
    assert_eq!(invoke(), "thawed");
    let sign = |tenant: &str| {
        let arguments = ["verify", "--tenant", tenant, "--signing-key"];
        world.firn(arguments).arg(&key).arg(&snapshot).run().ok();
    };
    sign("another");
    assert_eq!(invoke(), "cold");
    fs::remove_file(snapshot.join("snapshot.sig")).unwrap();
    assert_eq!(invoke(), "cold");
    sign("default");
    assert_eq!(invoke(), "thawed");

    let log = daemon.end();
    for reason in [
        "snapshot.firn is not the file that was signed",
        "no valid signature for the tenant",
        "snapshot.sig is missing: the snapshot is not signed",
    ] {
        assert!(log.contains(reason), "{reason}: {log}");
    }
    world.assert_nothing_left();
}

#[test]
fn a_snapshot_in_a_pool_without_its_signature_is_not_thawed() {
    let world = World::default();
    let (keys, medium) = (world.file("keys"), world.file("pool"));
    world.firn(["pool", "create", "--size", "1G", "--medium"]).arg(&medium).run().ok();
    let options = players_in(&world);
    let own = ["--standby", "0", "--keep-alive", "0", "--snapshot-keys", keys.to_str().unwrap()];
    let in_pool = ["--pool", medium.to_str().unwrap()];
    let options = options.iter().map(String::as_str);
    let options: Vec<&str> = own.into_iter().chain(in_pool).chain(options).collect();
    let daemon = Daemon::start(&world, &options);
    daemon.publish("signed", ECHO);
    let invoke = || start(&daemon);
    assert_eq!(invoke(), "thawed");

    let extent = || {
        let list = world.firn(["pool", "ls", "--json", "--pool"]).arg(&medium).run().json();
        let extents = list["extents"].as_array().unwrap();
        extents.iter().find(|extent| extent["role"] == "snapshot").unwrap().clone()
    };
    let name = extent()["name"].as_str().unwrap().to_owned();
    let sign = |tenant: &str| {
        let verify = world.firn(["verify", "--tenant", tenant, "--signing-key"]);
        let verify = verify.arg(keys.join("default.pem")).arg("--pool").arg(&medium);
        verify.arg(&name).run().ok();
    };
    sign("another");
    assert_eq!(invoke(), "cold");
    sign("default");
    assert_eq!(invoke(), "thawed");
    let tail = extent()["extent"]["tail_offset"].as_u64().unwrap();
    // In place, because the pool's manager has it mapped.
    let file = File::options().read(true).write(true).open(&medium).unwrap();
    let flip = || {
        let mut byte = [0];
        file.read_exact_at(&mut byte, tail).unwrap();
        file.write_all_at(&[!byte[0]], tail).unwrap();
    };
    flip();
    assert_eq!(invoke(), "cold");
    flip();
    assert_eq!(invoke(), "thawed");

    let log = daemon.end();
    for reason in ["no valid signature for the tenant", "in the pool is not what was signed"] {
        assert!(log.contains(reason), "{reason}: {log}");
    }
    world.assert_nothing_left();
}
