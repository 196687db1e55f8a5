//! The runtimes of Debian 13, each on the image that `firn image build` makes of its name.

use std::collections::BTreeSet;

use firn_tests::{Daemon, Reply, World};
use serde_json::{Value, json};

/// Draws random values, and returns what its hooks saw.
const PYTHON: &str = r#"
import os, random, ssl, sys, uuid

import boto3
import snapshot_restore_py as snap_start

seen = {"before": 0, "after": 0}


@snap_start.register_before_snapshot
def before():
    seen["before"] += 1
    random.random(), uuid.uuid4(), ssl.RAND_bytes(8)


@snap_start.register_after_restore
def after():
    seen["after"] += 1
    seen["restored"] = random.random()


def handler(event, context):
    if event.get("fail"):
        raise ValueError("it is asked to")
    draws = [random.random(), str(uuid.uuid1()), str(uuid.uuid4()), ssl.RAND_bytes(8).hex(), os.urandom(8).hex()]
    return {
        "event": event, "seen": seen, "draws": draws, "boto3": boto3.__name__,
        "version": "%d.%d" % sys.version_info[:2], "execution": os.environ["AWS_EXECUTION_ENV"],
        "begun": os.environ["AWS_LAMBDA_INITIALIZATION_TYPE"], "arn": context.invoked_function_arn,
    }
"#;

/// Invokes a version and checks how its microVM started.
#[track_caller]
fn answer(daemon: &Daemon, function: &str, start: &str) -> Value {
    let reply = daemon.invoke(function, &json!({ "a": 1 }));
    assert_eq!(reply.status, 200, "{reply:?}");
    assert_eq!(reply.report()["start"], start, "{reply:?}");
    assert_eq!(reply.body["event"], json!({ "a": 1 }), "{reply:?}");
    reply.body
}

/// The error of a function that is asked to fail.
#[track_caller]
fn error(daemon: &Daemon, function: &str) -> Reply {
    let reply = daemon.invoke(function, &json!({ "fail": true }));
    assert!(reply.head.contains("x-amz-function-error: unhandled"), "{reply:?}");
    reply
}

/// Invokes two clones of version 1, and fails if a hook has not run once in each, or if a value
/// occurs twice.
#[track_caller]
fn two_clones(world: &World, daemon: &Daemon, function: &str) {
    let version = format!("{function}:1");
    let clones = [(); 2].map(|()| {
        let clone = answer(daemon, &version, "thawed");
        super::processes(world, "monitor").into_iter().for_each(super::kill);
        clone
    });
    let mut drawn = BTreeSet::new();
    for clone in &clones {
        assert_eq!((&clone["seen"]["before"], &clone["seen"]["after"]), (&json!(1), &json!(1)));
        assert_eq!(clone["begun"], "snap-start", "{clone}");
        let draws = clone["draws"].as_array().unwrap().iter().chain([&clone["seen"]["restored"]]);
        for draw in draws {
            assert!(!draw.is_null() && drawn.insert(draw.to_string()), "{draw}: {clones:#?}");
        }
    }
}

#[test]
#[ignore = "long: make test-full"]
fn python_3_13_serves_and_thaws_with_its_hooks() {
    let world = World::default();
    let daemon = Daemon::start(&world, &["--standby", "0"]);
    let runtime = json!({ "Runtime": "python3.13" });
    assert_eq!(daemon.create("own", "handler.py", PYTHON, &runtime).status, 201);
    let cold = answer(&daemon, "own", "cold");
    assert_eq!((&cold["version"], &cold["begun"]), (&json!("3.13"), &json!("on-demand")), "{cold}");
    assert_eq!(cold["execution"], "AWS_Lambda_python3.13", "{cold}");
    let failed = error(&daemon, "own");
    assert_eq!(failed.body["errorType"], "ValueError", "{failed:?}");
    let settled = daemon.settled("own");
    assert_eq!(settled.body["State"], "Active", "{settled:?}");
    two_clones(&world, &daemon, "own");
    daemon.end();
}
