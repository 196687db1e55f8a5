//! Clones of one snapshot have separate identities and separate memory.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use firn_run::jail::{Jail, JailMode};
use firn_run::monitor::Monitor;
use firn_run::{
    Descriptors, HostSpec, InvokeSpec, Origin, OwnedInstance, ReadyUse, ReplaySpec, SourceSpec,
    StartSpec, ThawSpec,
};
use firn_tests::{World, workshop};
use firn_vmm::KVM_DEVICE;
use serde_json::{Value, json};

/// What no two clones share.
const IDENTITY: [&str; 8] = [
    "urandom",
    "random",
    "uuid1",
    "uuid4",
    "temporary",
    "host_name",
    "instance_id",
    "log_stream_name",
];
const LIMIT: Duration = Duration::from_secs(120);

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64()
}

#[test]
fn clones_thawed_at_once_have_separate_identities() {
    let world = World::default();
    let snapshot = workshop();
    let event = json!({"module": "identity", "event": null}).to_string();
    let before = now();
    let thaw = || world.firn(["thaw", "--invoke", &event]).arg(snapshot);
    let at_once = std::thread::scope(|scope| {
        let first = scope.spawn(|| thaw().run().json());
        let second = scope.spawn(|| thaw().run().json());
        [first.join().unwrap(), second.join().unwrap()]
    });
    let third = thaw().run().json();
    let after = now();
    let clones: Vec<Value> = at_once.into_iter().chain([third]).collect();

    for clone in &clones {
        let time = clone["time"].as_f64().unwrap();
        // The guest reads its clock in between. The clocks of host and guest may differ by seconds.
        assert!((before - 2.0..after + 2.0).contains(&time), "{before} to {after}: {clone}");
        assert_eq!(clone["host_name"], clone["instance_id"]);
    }
    for what in IDENTITY {
        let values: BTreeMap<_, _> =
            clones.iter().map(|clone| (clone[what].to_string(), ())).collect();
        assert_eq!(values.len(), clones.len(), "two clones have the same {what}: {clones:#?}");
    }
    // A version 1 UUID ends in the clock sequence and the node: they must differ, not the time
    // alone.
    let nodes: BTreeMap<_, _> = clones
        .iter()
        .map(|clone| (clone["uuid1"].as_str().unwrap()[19..].to_owned(), ()))
        .collect();
    assert_eq!(nodes.len(), clones.len(), "{clones:#?}");
}

#[test]
fn ready_clones_get_their_identities_and_the_time_when_they_are_resumed() {
    const CLONES: usize = 8;
    let firn = std::env::var_os("FIRN").unwrap_or_else(|| "firn".into());
    let program = Path::new(&firn).with_file_name("firn-monitor");
    let snapshot = workshop();
    let event = json!({"module": "identity", "event": null}).to_string();
    let jail = Jail::new(JailMode::Auto);
    let make = |number: usize| {
        let mut descriptors = Descriptors::default();
        let (source, root) =
            SourceSpec::directory_with_root(snapshot, None, &mut descriptors).unwrap();
        let thaw = ThawSpec {
            source,
            planner: "dram_cached".to_owned(),
            preloaded: false,
            root,
            invoke: Some(InvokeSpec { event: event.clone(), keep: false, compare: false }),
            replay: ReplaySpec::default(),
            record: None,
        };
        let name = format!("ready-{}-{number}", std::process::id());
        let (claimed, host) = HostSpec::claim(Some(&name), None, true, &mut descriptors).unwrap();
        let spec = StartSpec::new(Origin::Thaw(thaw), host, LIMIT);
        let mut monitor = Monitor::spawn(&jail, &program, KVM_DEVICE.as_ref()).unwrap();
        monitor.make_ready(spec, &descriptors).unwrap();
        assert!(monitor.wait_made_ready(LIMIT).unwrap().dram_bytes > 0);
        (monitor, claimed)
    };
    let mut monitors: Vec<(Monitor, OwnedInstance)> = (0..CLONES).map(make).collect();
    // Longer than the tolerance below: a clock that was set at the making is late by more.
    std::thread::sleep(Duration::from_secs(5));
    let before = now();
    for (monitor, _) in &mut monitors {
        monitor.resume(firn_base::now_ns(), None).unwrap();
    }
    let mut clones: Vec<Value> = Vec::new();
    for (mut monitor, _claimed) in monitors {
        let report = monitor.started(Some(LIMIT)).unwrap();
        assert_eq!(report.ready, Some(ReadyUse::Hit));
        let outcome = report.outcome.unwrap();
        let answer = outcome.answer.unwrap_or_else(|| panic!("{:?}", outcome.error));
        clones.push(serde_json::from_str(answer.get()).unwrap());
        monitor.wait().unwrap();
    }
    let after = now();
    for clone in &clones {
        let time = clone["time"].as_f64().unwrap();
        assert!((before - 2.0..after + 2.0).contains(&time), "{before} to {after}: {clone}");
        assert_eq!(clone["host_name"], clone["instance_id"]);
    }
    for what in IDENTITY {
        let values: BTreeSet<_> = clones.iter().map(|clone| clone[what].to_string()).collect();
        assert_eq!(values.len(), CLONES, "two clones have the same {what}: {clones:#?}");
    }
}

#[test]
fn clones_do_not_see_the_writes_of_other_clones() {
    let world = World::default();
    let snapshot = workshop();
    let files = ["/tmp/note", "/tmp/another"];
    let _one = world.firn(["thaw", "--name", "one"]).arg(snapshot).start().ready();
    let _two = world.firn(["thaw", "--name", "two"]).arg(snapshot).start().ready();
    for file in files {
        for clone in ["one", "two"] {
            let text =
                world.ask(clone, "machine", &json!({"do": "append", "path": file, "text": clone}));
            assert_eq!(text, clone, "{file}");
        }
    }
    for clone in ["one", "two"] {
        for file in files {
            let text = world.ask(clone, "machine", &json!({"do": "read_again", "path": file}));
            assert_eq!(text, clone, "{file}");
        }
    }
    let third = json!({"do": "append", "path": "/tmp/note", "text": "three"});
    assert_eq!(world.thaw_and_ask(snapshot, "machine", &third), "three");
    world.firn(["verify"]).arg(snapshot).run().ok();
}

#[test]
fn files_written_before_the_freeze_exist_after_the_thaw() {
    let world = World::default();
    let snapshot = world.file("snapshot");
    let mut first = world.firn(["thaw", "--name", "first"]).arg(workshop()).start().ready();
    let text = "written before the freeze ".repeat(3000);
    for file in ["/tmp/long", "/var/tmp/long"] {
        let event = json!({"do": "write", "path": file, "text": text});
        assert_eq!(world.ask("first", "machine", &event), text.len());
    }
    assert_eq!(world.ask("first", "machine", &json!({"do": "fill", "mebibytes": 40})), 40);
    world.firn(["freeze", "first"]).arg(&snapshot).run().ok();
    first.end().ok();

    let _second = world.firn(["thaw", "--name", "second"]).arg(&snapshot).start().ready();
    assert_eq!(world.ask("second", "machine", &json!({"do": "check"})), json!([]));
    for file in ["/tmp/long", "/var/tmp/long"] {
        let read = world.ask("second", "machine", &json!({"do": "read_again", "path": file}));
        assert!(read == text, "{file}");
    }
    // The first snapshot is unchanged.
    let gone =
        json!({"module": "machine", "event": {"do": "read", "path": "/tmp/long"}}).to_string();
    let ran = world.firn(["thaw", "--invoke", &gone]).arg(workshop()).run();
    assert_eq!(ran.function_error(&[])["errorType"], "FileNotFoundError");
    for snapshot in [snapshot.as_path(), workshop()] {
        world.firn(["verify"]).arg(snapshot).run().ok();
    }
}
