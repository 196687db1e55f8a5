//! Freezes that continue the microVM, are refused, or are killed.

use std::fs;
use std::path::Path;

use firn_tests::{HELLO, JSON, Monitor, World, frozen};
use rustix::process::{Signal, kill_process};

fn thawed(world: &World, name: &str) -> Monitor {
    world.firn(["thaw", "--name", name]).arg(frozen(&HELLO)).start().ready()
}

#[track_caller]
fn answers(world: &World, name: &str) {
    assert_eq!(world.firn(["invoke", name, HELLO.input_b]).run().ok(), HELLO.expected_b);
}

/// The files of a directory and its subdirectories.
fn files(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_microvm_kept_after_a_freeze_continues_to_answer() {
    let world = World::default();
    let _monitor = thawed(&world, "kept");
    for _ in 0..2 {
        world.firn(["freeze", "--keep", "kept", "snapshot"]).run().ok();
        answers(&world, "kept");
    }
    assert_eq!(files(&world.work()), ["snapshot"], "the second freeze replaces the first");
    world.firn(["verify", "snapshot"]).run().ok();
    let thaw = world.firn(["thaw", "--invoke", HELLO.input_a, "snapshot"]).run();
    assert_eq!(thaw.ok(), HELLO.expected_a);
}

#[test]
fn a_refused_freeze_changes_nothing() {
    let world = World::default();
    let _monitor = thawed(&world, "it");
    fs::create_dir(world.file("own")).unwrap();
    fs::write(world.file("own/precious"), "text").unwrap();
    fs::write(world.file("a-file"), "text").unwrap();
    let cases = [
        ("own", ["own exists and is not a snapshot", "not changed"]),
        ("a-file", ["a-file exists and is not a snapshot", "not changed"]),
        ("no-folder/snapshot", ["no-folder: it is not a directory", "create it first"]),
        ("/", ["cannot be a snapshot's directory", "ends in a name"]),
    ];
    for (destination, words) in cases {
        world.firn(["freeze", "it", destination]).run().refused(&words);
        answers(&world, "it");
    }
    assert_eq!(files(&world.work()), ["a-file", "own"]);
    assert_eq!(fs::read(world.file("own/precious")).unwrap(), b"text");
    world.firn(["freeze", "other", "snapshot"]).run().refused(&["no microVM named other", "it"]);
}

#[test]
fn a_monitor_killed_during_a_freeze_leaves_the_previous_snapshot() {
    let world = World::default();
    let mut first = thawed(&world, "first");
    world.firn(["freeze", "first", "snapshot"]).run().ok();
    first.end().ok();
    let before = fs::read(world.file("snapshot/snapshot.firn")).unwrap();

    let mut second = thawed(&world, "second");
    let (_, mut freeze) = world.firn(["freeze", "second", "snapshot"]).spawn();
    // During the freeze: a new file exists beside the old snapshot, not yet in its place.
    while files(&world.work()).len() == 1 {
        assert!(freeze.try_wait().unwrap().is_none(), "the freeze ended before it was observed");
    }
    kill_process(second.monitor(), Signal::KILL).unwrap();
    assert_eq!(second.end().code, 1);
    let output = freeze.wait_with_output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.starts_with("firn: error: "), "{text}");

    assert_eq!(fs::read(world.file("snapshot/snapshot.firn")).unwrap(), before);
    world.firn(["verify", "snapshot"]).run().ok();
    let thaw = world.firn(["thaw", "--invoke", HELLO.input_b, "snapshot"]);
    assert_eq!(thaw.run().ok(), HELLO.expected_b);
    // The next freeze removes the files of the killed one.
    let mut third = thawed(&world, "third");
    world.firn(["freeze", "third", "snapshot"]).run().ok();
    third.end().ok();
    assert_eq!(files(&world.work()), ["snapshot"]);
}

#[test]
fn thaws_during_a_replacement_use_the_old_or_the_new_snapshot() {
    let world = World::default();
    let snapshot = world.file("snapshot");
    let mut old = world.firn(["thaw", "--name", "old"]).arg(frozen(&JSON)).start().ready();
    world.firn(["freeze", "old"]).arg(&snapshot).run().ok();
    old.end().ok();
    let event = r#"{"name": "Ada", "seed": 3, "records": 1}"#;
    let thaw = || world.firn(["thaw", "--invoke", event]).arg(&snapshot).run();
    let of_json = thaw().ok().to_owned();

    let mut new = thawed(&world, "new");
    let (_, mut freeze) = world.firn(["freeze", "new"]).arg(&snapshot).spawn();
    let mut answers = Vec::new();
    while freeze.try_wait().unwrap().is_none() {
        answers.push(thaw().ok().to_owned());
    }
    assert!(freeze.wait_with_output().unwrap().status.success());
    new.end().ok();
    answers.push(thaw().ok().to_owned());
    let changed = answers.iter().position(|answer| *answer == HELLO.expected_a).unwrap();
    assert!(answers[..changed].iter().all(|answer| *answer == of_json), "{answers:#?}");
    assert!(answers[changed..].iter().all(|answer| *answer == HELLO.expected_a), "{answers:#?}");
}

#[test]
fn a_clone_runs_after_its_snapshot_is_removed() {
    let world = World::default();
    let mut first = thawed(&world, "first");
    world.firn(["freeze", "first", "snapshot"]).run().ok();
    first.end().ok();
    let clone = world.firn(["thaw", "--name", "clone", "snapshot"]).start().ready();
    fs::remove_dir_all(world.file("snapshot")).unwrap();
    answers(&world, "clone");
    world.firn(["thaw", "snapshot"]).run().refused(&["no snapshot at snapshot"]);
    drop(clone);
}
