//! Functions return correct answers after a thaw, and after many thaws.

use std::fs;

use firn_tests::{HELLO, JSON, LIGHT, World, frozen, together};
use serde_json::{Value, json};

#[test]
#[ignore = "long: make test-full"]
fn light_workloads_answer_after_a_thaw() {
    let world = World::default();
    let boot = world.firn(["boot", "--json", "--name", "first"]);
    let mut first = boot.arg(together(&world.work(), &LIGHT)).start().ready();
    // A fixed processor model, so that the functions' libraries choose the same code
    // on every host.
    let report: Value = serde_json::from_str(&first.first_line).unwrap();
    let model = report["cpu"].as_str().unwrap();
    assert!(["x86-64-v2", "x86-64-v3", "x86-64-v4"].contains(&model), "{report}");
    world.firn(["freeze", "first", "snapshot"]).run().ok();
    first.end().ok();
    let _thawed = world.firn(["thaw", "--name", "thawed", "snapshot"]).start().ready();
    for function in LIGHT {
        for (input, expected) in
            [(function.input_a, function.expected_a), (function.input_b, function.expected_b)]
        {
            let event = format!(r#"{{"function": "{}", "event": {input}}}"#, function.name);
            let ran = world.firn(["invoke", "--time-limit", "60", "thawed", &event]).run();
            assert_eq!(ran.ok(), expected, "{}", function.name);
        }
    }
    // Events that bring their input: [1, 2] in base64, and a file of the guest's.
    let brought = |function: &str, event: &str| {
        let event = format!(r#"{{"function": "{function}", "event": {event}}}"#);
        world.firn(["invoke", "--time-limit", "60", "thawed", &event]).run()
    };
    let answer = brought("json_serdes", r#"{"base64": "WzEsIDJd"}"#).json();
    assert_eq!((&answer["records"], &answer["read_bytes"]), (&json!(2), &json!(6)), "{answer}");
    let answer = brought("compression", r#"{"file": "/etc/hostname"}"#).json();
    assert_eq!(answer["bytes"], "firn\n".len(), "{answer}");
    for (event, words) in [
        (r#"{"file": "/nonesuch"}"#, "/nonesuch"),
        (r#"{"base64": "*"}"#, "base64"),
        (r#"{"seed": 1, "file": "/etc/hostname"}"#, "seed and file"),
        ("{}", "none"),
    ] {
        brought("compression", event).function_error(&["ValueError", words]);
    }
}

#[test]
fn a_report_has_times_counts_and_the_answer() {
    let world = World::default();
    let thaw = world.firn(["thaw", "--json", "--invoke", JSON.input_b, "--name", "named"]);
    let report =
        thaw.arg(frozen(&JSON)).with(|command| command.env("FIRN_REQUEST_NS", "1")).run().json();
    assert_eq!(
        report["outcome"]["answer"],
        serde_json::from_str::<Value>(JSON.expected_b).unwrap()
    );
    assert_eq!(report["name"], "named");
    for part in ["process_start", "load", "plan", "execute", "resume", "identify", "invoke"] {
        assert!(report["times"][format!("{part}_ns")].as_u64().unwrap() > 0, "{part}: {report}");
    }
    for count in ["guest_pages", "private_bytes", "shared_bytes"] {
        assert!(report[count].as_u64().unwrap() > 0, "{count}: {report}");
    }
}

#[test]
fn events_come_from_arguments_files_and_standard_input() {
    let world = World::default();
    let event = world.file("event.json");
    fs::write(&event, HELLO.input_b).unwrap();
    let at = format!("@{}", event.display());
    let thaw = |argument: &str| world.firn(["thaw", "--invoke", argument]).arg(frozen(&HELLO));
    assert_eq!(thaw(&at).run().ok(), HELLO.expected_b);
    let input = fs::File::open(&event).unwrap();
    assert_eq!(thaw("-").with(|command| command.stdin(input)).run().ok(), HELLO.expected_b);
}

/// Resources of the system and of this world that grow with every leak.
fn resources(world: &World) -> Vec<(&'static str, Vec<String>)> {
    let names = |folder: &str| {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    let firns = names("/proc").into_iter().filter(|name| {
        fs::read_to_string(format!("/proc/{name}/comm")).is_ok_and(|comm| comm == "firn\n")
    });
    // Unix sockets with a name only: the number of others changes with each connection.
    let sockets = fs::read_to_string("/proc/net/unix").unwrap();
    let sockets = sockets.lines().filter_map(|line| line.split_whitespace().nth(7));
    vec![
        ("processes named firn", firns.collect()),
        ("sockets", sockets.map(ToOwned::to_owned).collect()),
        ("files of firn", world.leftovers()),
        ("temporary files", names(&std::env::temp_dir().display().to_string())),
        ("shared memory", names("/dev/shm")),
    ]
}

#[test]
fn fifty_consecutive_thaws_answer_correctly_and_leave_no_resources() {
    let snapshot = frozen(&HELLO);
    let world = World::default();
    let before = resources(&world);
    let open = || fs::read_to_string("/proc/sys/fs/file-nr").unwrap();
    let open = || open().split_whitespace().next().unwrap().parse::<i64>().unwrap();
    let space = || rustix::fs::statvfs(snapshot).unwrap().f_bfree;
    let (mut files_early, mut space_early) = (0, 0);
    for turn in 0..50 {
        let event = format!(r#"{{"name": "number {turn}"}}"#);
        let ran = world.firn(["thaw", "--invoke", &event]).arg(snapshot).run();
        assert_eq!(ran.ok(), format!("{{\"greeting\": \"Hello, number {turn}!\"}}\n"));
        if turn == 9 {
            (files_early, space_early) = (open(), space());
        }
    }
    world.assert_nothing_left();
    assert_eq!(resources(&world), before);
    // Other programs open files and write too, but a leak in each of 40 thaws would show.
    assert!(
        open() - files_early < 40,
        "{files_early} open files after 10 thaws, {} after 50",
        open()
    );
    let lost = space_early.saturating_sub(space());
    assert!(lost < 40, "40 thaws took {lost} blocks of the file system");
}
