//! Clones draw different random values, whatever draws them, and whenever after the restore.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use firn_run::{AgentClient, Invocation, InvokeError, LambdaLoad, RuntimeKind};
use firn_tests::{Firn, World, at_once, folder};
use serde_json::{Value, json};

const DRAWS: &str = include_str!("../../functions/draws/handler.py");
const DRAWS_NODE: &str = include_str!("../../functions/draws_node/bootstrap");
const DRAWS_JAVA: &str = include_str!("../../functions/draws_java/bootstrap");

/// A runtime whose after-restore hook never returns.
const NEVER_RESTORED: &str = r#"#!/usr/bin/python3
import os, time, urllib.request

api = "http://" + os.environ["AWS_LAMBDA_RUNTIME_API"] + "/2018-06-01/runtime/"
urllib.request.urlopen(api + "restore/next").read()
while True:
    time.sleep(1000)
"#;

/// `IN_MODIFY` and `IN_CLOSE_WRITE` (inotify(7)): one write.
const ONE_WRITE: [u32; 2] = [2, 8];

/// The limit of a guest in the lab, which may have to run another seven.
const LIMIT: Duration = Duration::from_secs(300);

/// A file that `make guest-tests` or `make long-guest-tests` makes.
pub(crate) fn made(variable: &str) -> PathBuf {
    let path = std::env::var_os(variable);
    path.unwrap_or_else(|| panic!("{variable} is not set: use make guest-tests")).into()
}

fn boot(world: &World) -> Firn {
    world.firn(["boot", "--name", "first", "--time-limit", "300"])
}

#[track_caller]
fn freeze(world: &World, boot: Firn, load: impl FnOnce(AgentClient)) {
    let mut first = boot.start().ready();
    let socket = world.run_directory().join("first/vsock.sock");
    load(AgentClient::connect(&socket, LIMIT).unwrap());
    world.firn(["freeze", "first", "snapshot"]).run().ok();
    first.end().ok();
}

/// Loads a `provided` runtime as the daemon does for SnapStart.
#[track_caller]
fn load(mut agent: AgentClient, bootstrap: &[u8]) {
    agent.put(true, "bootstrap", true, bootstrap).unwrap();
    let load = LambdaLoad {
        name: "draws".to_owned(),
        version: "1".to_owned(),
        handler: "handler.handler".to_owned(),
        environment: BTreeMap::new(),
        memory_mib: 256,
        time_limit: LIMIT,
        runtime: RuntimeKind::Provided,
        snap_start: true,
    };
    agent.load_lambda(&load).unwrap();
}

/// What eight clones return that are thawed at once.
#[track_caller]
fn eight_clones(world: &World) -> [Value; 8] {
    let thaw = ["thaw", "--time-limit", "300", "--invoke", "{}", "snapshot"];
    at_once(|| world.firn(thaw).run().json())
}

/// Fails if two of the clones' values are equal, or if one has not drawn all `kinds` for a request.
/// A clone has a list for each of the `drawers`, of objects with the drawn value of each kind.
#[track_caller]
fn assert_all_differ(clones: &[Value], drawers: &[&str], kinds: &[&str]) {
    let (mut seen, mut shared) = (BTreeMap::new(), Vec::new());
    for (number, clone) in clones.iter().enumerate() {
        for drawer in drawers {
            let draws = clone[drawer].as_array().unwrap();
            assert!(!draws.is_empty(), "the {drawer} of clone {number} drew nothing: {clone}");
            for (position, draw) in draws.iter().enumerate() {
                for (kind, value) in draw.as_object().unwrap() {
                    let here = format!("{kind}, draw {position} of the {drawer} of clone {number}");
                    let value = value.as_str().unwrap().to_owned();
                    let there = seen.insert((kind.clone(), value.clone()), here.clone());
                    shared.extend(there.map(|there| format!("{value} is {here} and {there}")));
                }
            }
        }
        let drawn: BTreeSet<&str> =
            clone["request"][0].as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(drawn, kinds.iter().copied().collect(), "clone {number}");
    }
    assert!(shared.is_empty(), "{shared:#?}");
}

#[test]
#[ignore = "long: make test-full"]
fn eight_clones_draw_different_values() {
    let world = World::default();
    let boot = boot(&world).arg("--root").arg(made("FIRN_CLONES_IMAGE"));
    freeze(&world, boot.arg(folder(&world.work(), "draws", DRAWS)), drop);
    let clones = eight_clones(&world);
    let kinds = ["random", "ssl", "urandom", "numpy", "ec", "x25519"];
    assert_all_differ(&clones, &["thread", "child", "request"], &kinds);
    // The child process gets the event of the generation, exactly one, before each of its draws.
    for clone in &clones {
        let events = clone["events"].as_array().unwrap();
        assert!(events.iter().all(|events| *events == json!(ONE_WRITE)), "{events:?}");
    }
}

/// `rand::rng()`, in earlier versions `thread_rng()`.
#[test]
fn eight_clones_of_a_runtime_in_rust_draw_different_values() {
    let world = World::default();
    let bootstrap = std::fs::read(made("FIRN_DRAWS_RUST")).unwrap();
    freeze(&world, boot(&world), |agent| load(agent, &bootstrap));
    assert_all_differ(&eight_clones(&world), &["thread", "request"], &["rng"]);
}

/// Checks the clones of a runtime on the image with Debian's packages of languages.
#[track_caller]
fn check_language(memory: &str, bootstrap: &[u8], kinds: &[&str]) {
    let world = World::default();
    let image = made("FIRN_LANGUAGES").join("image.erofs");
    let boot = boot(&world).args(["--memory", memory, "--root"]).arg(image);
    freeze(&world, boot, |agent| load(agent, bootstrap));
    assert_all_differ(&eight_clones(&world), &["request"], kinds);
}

#[test]
#[ignore = "long: make test-full"]
fn eight_clones_of_a_runtime_in_javascript_draw_different_values() {
    check_language("256M", DRAWS_NODE.as_bytes(), &["random", "uuid", "integer", "bytes"]);
}

#[test]
#[ignore = "long: make test-full"]
fn eight_clones_of_a_runtime_in_go_draw_different_values() {
    let bootstrap = std::fs::read(made("FIRN_LANGUAGES").join("draws-go")).unwrap();
    check_language("256M", &bootstrap, &["math", "own", "crypto"]);
}

#[test]
#[ignore = "long: make test-full"]
fn eight_clones_of_a_runtime_in_java_draw_different_values() {
    check_language("512M", DRAWS_JAVA.as_bytes(), &["random", "secure", "drbg", "uuid"]);
}

/// A minute long: the agent's limit.
#[test]
#[ignore = "long: make test-full"]
fn a_runtime_that_does_not_reseed_in_time_fails_the_thaw_with_its_gate_closed() {
    let world = World::default();
    freeze(&world, boot(&world), |agent| load(agent, NEVER_RESTORED.as_bytes()));
    let socket = world.run_directory().join("clone/vsock.sock");
    let event = Invocation::new("{}", LIMIT).unwrap();
    let thaw = || world.firn(["thaw", "--name", "clone", "--invoke", "{}", "snapshot"]).run();
    let (ran, refusals) = std::thread::scope(|scope| {
        let thaw = scope.spawn(thaw);
        let mut refusals = Vec::new();
        while !thaw.is_finished() {
            // Fails before the clone's agent listens, and when the clone has just ended.
            if let Ok(mut agent) = AgentClient::connect(&socket, LIMIT) {
                match agent.invoke(&event) {
                    Ok(answer) => panic!("{answer:?}"),
                    Err(InvokeError::Refused(refusal)) => refusals.push(refusal.message),
                    Err(_) => {}
                }
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        (thaw.join().unwrap(), refusals)
    });
    let error = ran.function_error(&["Restore timed out after 60.00 seconds"]);
    assert_eq!(error["errorType"], "Sandbox.Timedout", "{error}");
    assert!(!refusals.is_empty());
    assert!(refusals.iter().all(|text| text.contains("no identity yet")), "{refusals:#?}");
    world.assert_nothing_left();
}
