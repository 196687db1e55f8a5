//! However a microVM ends, it says so and leaves nothing.

use firn_tests::{HELLO, Monitor, World, frozen, workshop};
use rustix::process::Signal;
use serde_json::json;

fn thawed(world: &World) -> Monitor {
    world.firn(["thaw", "--name", "it"]).arg(workshop()).start().ready()
}

/// Does to the guest what it does not survive: there is no answer, and no panic of firn's either.
#[track_caller]
fn end_by(world: &World, event: &serde_json::Value) {
    world.ask_for_anything("it", "machine", event).refused(&["the request got no answer"]);
}

#[test]
fn signals_end_a_microvm_in_order() {
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let world = World::default();
        let mut monitor = thawed(&world);
        monitor.signal(signal);
        let ran = monitor.end();
        ran.ok();
        assert_eq!(ran.stderr, "", "{signal:?}");
        world.assert_nothing_left();
    }
}

#[test]
fn a_signal_in_the_middle_of_a_boot_is_told() {
    let world = World::default();
    let boot = world.firn(["boot", "--name", "it", "--console"]).arg(world.file("console"));
    let (_, mut child) = boot.arg(HELLO.write(&world.work())).spawn();
    // Once it has a console it has a microVM.
    while std::fs::metadata(world.file("console")).map_or(0, |file| file.len()) == 0 {
        assert!(child.try_wait().unwrap().is_none(), "it ended by itself");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), Signal::TERM).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{text}");
    assert!(text.contains("ended by signal 15"), "{text}");
}

#[test]
fn a_guest_that_powers_off_ends_its_monitor_well() {
    let world = World::default();
    let mut monitor = thawed(&world);
    end_by(&world, &json!({"do": "power_off"}));
    monitor.end().ok();
    world.assert_nothing_left();
    world.firn(["invoke", "it", "{}"]).run().refused(&["no microVM named it is running"]);
}

#[test]
fn a_guest_that_panics_is_told_with_the_end_of_its_console() {
    let world = World::default();
    let mut monitor = thawed(&world);
    let painted = json!({"do": "console", "text": "\u{1b}[31mred\u{7}\u{9b}2J\n"});
    world.ask("it", "machine", &painted);
    end_by(&world, &json!({"do": "sysrq", "key": "c"}));
    let ran = monitor.end();
    assert_eq!(ran.code, 1, "{ran:#?}");
    for words in ["firn: error:", "panic", "sysrq triggered crash", "[31mred"] {
        assert!(ran.stderr.contains(words), "without {words:?}: {ran:#?}");
    }
    assert!(!ran.stderr.chars().any(|c| c.is_control() && c != '\n'), "{ran:#?}");
    world.assert_nothing_left();
}

#[test]
fn a_guest_that_panics_in_a_thaws_request_is_told() {
    let world = World::default();
    let event = json!({"module": "machine", "event": {"do": "sysrq", "key": "c"}}).to_string();
    let ran = world.firn(["thaw", "--invoke", &event]).arg(workshop()).run();
    assert_eq!((ran.code, ran.stdout.as_str()), (1, ""), "{ran:#?}");
    assert!(ran.stderr.contains("sysrq triggered crash"), "{ran:#?}");
}

#[test]
fn what_a_killed_monitor_leaves_is_swept_by_the_next() {
    let world = World::default();
    let mut monitor = thawed(&world);
    monitor.signal(Signal::KILL);
    assert_eq!(monitor.end().code, 128 + 9);
    assert!(world.run_directory().join("it").exists(), "nothing was left: this test tests nothing");
    world.firn(["invoke", "it", "{}"]).run().refused(&["no microVM named it is running"]);
    world.assert_nothing_left();

    let mut monitor = thawed(&world);
    monitor.signal(Signal::KILL);
    monitor.end();
    let thaw = world.firn(["thaw", "--name", "it", "--invoke", HELLO.input_b]);
    assert_eq!(thaw.arg(frozen(&HELLO)).run().ok(), HELLO.expected_b);
}

#[test]
fn a_microvm_in_the_background_ends_by_a_freeze() {
    let world = World::default();
    let thaw = world.firn(["thaw", "--detach", "--name", "behind"]).arg(frozen(&HELLO)).run();
    assert!(thaw.ok().starts_with("behind: thawed"), "{thaw:#?}");
    assert_eq!(world.processes().len(), 1);
    let answer = world.firn(["invoke", "behind", HELLO.input_b]).run();
    assert_eq!(answer.ok(), HELLO.expected_b);
    world.firn(["freeze", "behind", "snapshot"]).run().ok();
    world.assert_nothing_left();
}
