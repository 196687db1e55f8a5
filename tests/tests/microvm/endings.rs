//! Every end of a microVM is reported and leaves nothing behind.

use std::time::Duration;

use firn_run::AgentClient;
use firn_tests::{HELLO, Monitor, Outcome, World, frozen, workshop, workshop_folder};
use rustix::process::{Signal, kill_process};
use serde_json::json;

fn thawed(world: &World) -> Monitor {
    world.firn(["thaw", "--name", "it"]).arg(workshop()).start().ready()
}

#[test]
fn a_microvm_ends_cleanly_on_a_signal() {
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
fn a_signal_during_a_boot_is_reported() {
    let world = World::default();
    let boot = world.firn(["boot", "--name", "it", "--console"]).arg(world.file("console"));
    let (_, mut child) = boot.arg(HELLO.write(&world.work())).spawn();
    // The microVM exists as soon as its console exists.
    while std::fs::metadata(world.file("console")).map_or(0, |file| file.len()) == 0 {
        assert!(child.try_wait().unwrap().is_none(), "it exited without a signal");
        std::thread::sleep(Duration::from_millis(20));
    }
    kill_process(rustix::process::Pid::from_child(&child), Signal::TERM).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{text}");
    assert!(text.contains("ended by signal 15"), "{text}");
}

#[test]
fn a_guest_that_powers_off_ends_its_monitor_with_code_0() {
    let world = World::default();
    let mut monitor = thawed(&world);
    let socket = world.run_directory().join("it/vsock.sock");
    let agent = AgentClient::connect(&socket, Duration::from_secs(60)).unwrap();
    agent.shut_down().unwrap();
    let ran = monitor.end();
    ran.ok();
    assert_eq!(ran.stderr, "", "{ran:#?}");
    world.assert_nothing_left();
    world.firn(["invoke", "it", "{}"]).run().refused(&["no microVM named it is running"]);
}

/// After a panic the error contains the end of the console, without its
/// control characters.
#[track_caller]
fn reports_panic(ran: &Outcome) {
    assert_eq!(ran.code, 1, "{ran:#?}");
    for words in ["firn: error: the guest reset itself", "Kernel panic", "panic_on_oom", "[31mred"]
    {
        assert!(ran.stderr.contains(words), "without {words:?}: {ran:#?}");
    }
    assert!(!ran.stderr.chars().any(|c| c.is_control() && c != '\n'), "{ran:#?}");
}

#[test]
fn a_panic_is_reported_with_the_end_of_the_console() {
    let world = World::default();
    let boot = world.firn(["boot", "--name", "it", "--memory", "128M", "--cmdline"]);
    let boot = boot
        // With the list of processes, as the kernel's own thread may be the one that panics.
        .arg("loglevel=7 sysctl.vm.panic_on_oom=1 sysctl.vm.overcommit_memory=1")
        .arg(workshop_folder(&world.work()));
    let mut monitor = boot.start().ready();
    // The guest kills no process while memory is free, or can be had from files.
    world.ask("it", "machine", &json!({"do": "scatter"}));
    world.ask("it", "machine", &json!({"do": "shorten"}));
    let painted = json!({"do": "rename", "name": "\u{1b}[31mred\u{7}"});
    world.ask("it", "machine", &painted);
    world.firn(["freeze", "--keep", "it", "snapshot"]).run().ok();
    let more = json!({"do": "exhaust", "mebibytes": 400});
    world.ask_unchecked("it", "machine", &more).refused(&["the request got no answer"]);
    reports_panic(&monitor.end());
    world.assert_nothing_left();

    let event = json!({"module": "machine", "event": more}).to_string();
    let ran = world.firn(["thaw", "--invoke", &event, "snapshot"]).run();
    assert_eq!(ran.stdout, "");
    reports_panic(&ran);
}

/// Without its end, the function would read files for a minute.
#[test]
fn a_function_that_thrashes_is_killed() {
    let world = World::default();
    let boot = world.firn(["boot", "--name", "it", "--memory", "128M"]);
    let _monitor = boot.arg(workshop_folder(&world.work())).start().ready();
    let thrash = json!({"do": "thrash", "seconds": 60});
    let error = world.ask_unchecked("it", "machine", &thrash).function_error(&[]);
    assert_eq!(error["errorType"], "Runtime.OutOfMemory", "{error}");
    let kept_ms = json!({"do": "read", "path": "/sys/kernel/mm/lru_gen/min_ttl_ms"});
    assert_eq!(world.ask("it", "machine", &kept_ms), "0\n");
}

#[test]
fn a_failed_boot_is_reported_with_the_end_of_the_console() {
    let world = World::default();
    let boot = world.firn(["boot", "--time-limit", "5", "--cmdline"]);
    let boot = boot.arg("loglevel=7 rdinit=/nonesuch root=/dev/nonesuch rootwait");
    let ran = boot.arg(HELLO.write(&world.work())).run();
    assert_eq!((ran.code, ran.stdout.as_str()), (1, ""), "{ran:#?}");
    for words in
        ["firn: error: the agent", "did not listen within 5s (--time-limit", "end of its console"]
    {
        assert!(ran.stderr.contains(words), "without {words:?}: {ran:#?}");
    }
}

/// Kills the command and the monitor of its microVM, so that neither can remove anything.
#[track_caller]
fn kill_both(command: &mut Monitor) {
    let monitor = command.monitor();
    // Stopped, the monitor does not notice the end of the command.
    kill_process(monitor, Signal::STOP).unwrap();
    command.signal(Signal::KILL);
    assert_eq!(command.end().code, 128 + 9);
    kill_process(monitor, Signal::KILL).unwrap();
}

#[test]
fn files_of_killed_processes_are_removed_by_the_next() {
    let world = World::default();
    kill_both(&mut thawed(&world));
    assert!(
        world.run_directory().join("it").exists(),
        "no file was left, so this test checks nothing"
    );
    world.firn(["invoke", "it", "{}"]).run().refused(&["no microVM named it is running"]);
    world.assert_nothing_left();

    kill_both(&mut thawed(&world));
    let thaw = world.firn(["thaw", "--name", "it", "--invoke", HELLO.input_b]);
    assert_eq!(thaw.arg(frozen(&HELLO)).run().ok(), HELLO.expected_b);
}

#[test]
fn a_microvm_whose_command_was_killed_ends_and_leaves_nothing_after_the_next_command() {
    let world = World::default();
    let mut command = thawed(&world);
    command.signal(Signal::KILL);
    assert_eq!(command.end().code, 128 + 9);
    let thaw = world.firn(["thaw", "--invoke", HELLO.input_b]).arg(frozen(&HELLO)).run();
    assert_eq!(thaw.ok(), HELLO.expected_b);
    world.assert_nothing_left();
}

#[test]
fn a_killed_monitor_is_reported_and_leaves_nothing() {
    let world = World::default();
    let mut command = thawed(&world);
    kill_process(command.monitor(), Signal::KILL).unwrap();
    let ran = command.end();
    assert_eq!(ran.code, 1, "{ran:#?}");
    assert!(ran.stderr.starts_with("firn: error: the monitor ended (signal: 9"), "{ran:#?}");
    world.assert_nothing_left();
}

#[test]
fn a_freeze_ends_a_microvm_in_the_background() {
    let world = World::default();
    let thaw = world.firn(["thaw", "--detach", "--name", "behind"]).arg(frozen(&HELLO)).run();
    assert!(thaw.ok().starts_with("behind: thawed"), "{thaw:#?}");
    // The command and its monitor.
    assert_eq!(world.processes().len(), 2);
    let answer = world.firn(["invoke", "behind", HELLO.input_b]).run();
    assert_eq!(answer.ok(), HELLO.expected_b);
    world.firn(["freeze", "behind", "snapshot"]).run().ok();
    world.assert_nothing_left();
}
