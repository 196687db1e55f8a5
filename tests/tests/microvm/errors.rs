//! Errors of functions are answers, and the microVM continues.

use firn_tests::{Monitor, World, folder, workshop};
use serde_json::{Value, json};

fn thawed(world: &World) -> Monitor {
    world.firn(["thaw", "--name", "it"]).arg(workshop()).start().ready()
}

/// Invokes a function that fails, and returns its error.
#[track_caller]
fn error(world: &World, module: &str, event: &Value) -> Value {
    world.ask_unchecked("it", module, event).function_error(&[])
}

#[track_caller]
fn continues(world: &World) {
    assert_eq!(world.ask("it", "never_returns", &json!({"return": true})), "returned");
}

#[test]
fn errors_of_functions_are_answers() {
    let world = World::default();
    let _monitor = thawed(&world);
    let raised = error(&world, "raises", &Value::Null);
    assert_eq!(raised["errorType"], "KeyError");
    assert_eq!(raised["errorMessage"], "'missing'");
    let trace = raised["stackTrace"].as_array().unwrap();
    assert!(trace.last().unwrap().as_str().unwrap().contains("in inner"), "{raised}");
    continues(&world);

    for what in ["set", "bytes", "nan", "infinity", "loop", "nested", "key"] {
        let error = error(&world, "unserialisable", &json!(what));
        assert_eq!(error["errorType"], "Runtime.MarshalError", "{what}: {error}");
        assert!(error["errorMessage"].as_str().unwrap().len() > 20, "{what}: {error}");
    }
    continues(&world);

    let large = error(&world, "ten_megabytes", &json!(10 << 20));
    assert_eq!(large["errorType"], "Function.ResponseSizeTooLarge");
    assert!(large["errorMessage"].as_str().unwrap().contains("10485760"), "{large}");
    // The largest permitted answer arrives complete.
    let most = world.ask("it", "ten_megabytes", &json!(6_291_556));
    assert!(most == "x".repeat(6_291_554), "{} bytes", most.as_str().unwrap_or("").len());
    continues(&world);
}

#[test]
fn a_function_that_ends_its_process_is_started_again() {
    let world = World::default();
    let _monitor = thawed(&world);
    for (how, status) in [("sys.exit", "exit status: 3"), ("segfault", "signal")] {
        let error = error(&world, "exits", &json!(how));
        assert_eq!(error["errorType"], "Runtime.ExitError", "{how}: {error}");
        assert!(error["errorMessage"].as_str().unwrap().contains(status), "{how}: {error}");
        continues(&world);
    }
}

#[test]
fn a_function_that_never_returns_is_stopped_at_its_time_limit() {
    let world = World::default();
    let _monitor = thawed(&world);
    let event = json!({"module": "never_returns", "event": {"return": false}}).to_string();
    let ran = world.firn(["invoke", "--time-limit", "2", "it", &event]).run();
    let error = ran.function_error(&["timed out after 2.00 seconds"]);
    assert_eq!(error["errorType"], "Sandbox.Timedout");
    let note = "firn: --time-limit sets how long the function may take\n";
    assert_eq!(ran.stderr, format!("waiting\n{note}"), "what it printed, and the option");
    continues(&world);
    let thaw = world.firn(["thaw", "--time-limit", "5", "--invoke", &event]).arg(workshop()).run();
    assert_eq!(thaw.function_error(&["timed out"])["errorType"], "Sandbox.Timedout");
}

#[test]
fn control_characters_of_a_function_do_not_reach_the_terminal() {
    let world = World::default();
    let _monitor = thawed(&world);
    let painted = "\u{1b}[31mred\u{7}\u{9b}2J";
    let say = json!({"do": "say", "text": painted});
    let ran = world.ask_unchecked("it", "machine", &say);
    assert_eq!((ran.ok(), ran.stderr.as_str()), ("null\n", "[31mred2J\n"));
    let raise = json!({"do": painted});
    let ran = world.ask_unchecked("it", "machine", &raise);
    ran.function_error(&["KeyError"]);
    assert!(!ran.stdout.trim_end().chars().any(char::is_control), "{ran:#?}");
}

#[test]
fn events_that_are_not_json_are_refused() {
    let world = World::default();
    let _monitor = thawed(&world);
    for event in ["", "{", "nonsense", "{} {}", "'single'", "{\"a\": NaN}"] {
        world.firn(["invoke", "it", event]).run().refused(&["the event is not JSON"]);
        let thaw = world.firn(["thaw", "--invoke", event]).arg(workshop()).run();
        thaw.refused(&["the event is not JSON"]);
    }
    world.firn(["invoke", "it", "@missing.json"]).run().refused(&["missing.json", "No such file"]);
    let large = world.file("large.json");
    std::fs::write(&large, format!("\"{}\"", "x".repeat(6 << 20))).unwrap();
    let ran = world.firn(["invoke", "it", "@large.json"]).run();
    ran.refused(&["the event has 6291458 bytes", "at most 6291456"]);
    continues(&world);
}

#[test]
fn a_function_that_does_not_import_does_not_boot() {
    let world = World::default();
    let painted = "raise ImportError('no_such_module \\x1b[31mred\\x07\\x9b2J')";
    let boot = world.firn(["boot"]).arg(folder(&world.work(), "painted", painted)).run();
    boot.refused(&["the function does not load", "ImportModuleError", "no_such_module", "[31mred"]);
}
