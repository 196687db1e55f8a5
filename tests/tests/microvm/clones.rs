//! Clones of one snapshot have separate identities and separate memory.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use firn_tests::{World, workshop};
use serde_json::{Value, json};

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
    let differ = [
        "urandom",
        "random",
        "uuid1",
        "uuid4",
        "temporary",
        "host_name",
        "instance_id",
        "log_stream_name",
    ];
    for what in differ {
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
