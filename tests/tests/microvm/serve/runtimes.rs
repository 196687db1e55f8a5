//! The runtimes of Debian 13, each on the image that `firn image build` makes of its name.

use std::collections::BTreeSet;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use firn_tests::{Daemon, Reply, World, zip_of_files};
use serde_json::{Value, json};

use super::thaws::{function_url, text};
use crate::secrets::made;

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

/// An ES module with an async handler.
const MODULE: &str = r#"
export const handler = async (event, context) => {
  if (event.fail) throw new RangeError("it is asked to");
  return {
    event, kind: "module", version: process.version.split(".")[0], arn: context.invokedFunctionArn,
    execution: process.env.AWS_EXECUTION_ENV,
  };
};
"#;

/// A CommonJS module with a callback, which is called after a timer, and a module of a layer.
const SCRIPT: &str = r#"
const kind = require("kind");
exports.nested = {
  handler(event, context, callback) {
    if (event.fail) return callback(new RangeError("it is asked to"));
    const answer = {
      event, kind, version: process.version.split(".")[0], arn: context.invokedFunctionArn,
      execution: process.env.AWS_EXECUTION_ENV,
    };
    setTimeout(() => callback(null, answer), 1);
  },
};
"#;

/// An ES module whose handler streams its answer.
const STREAMED: &str = r#"
export const handler = awslambda.streamifyResponse(async (event, stream) => {
  const answer = awslambda.HttpResponseStream.from(stream, { statusCode: 201, headers: { "x-own": "1" } });
  answer.write("first ");
  answer.write({ then: 1 });
  if (event.fail) throw new RangeError("it is asked to");
  answer.write("second");
  answer.end();
});
"#;

/// Publishes a layer of one file, and returns its version's ARN.
#[track_caller]
fn layer(daemon: &Daemon, path: &str, contents: &[u8]) -> Value {
    let zip = STANDARD.encode(zip_of_files([(path, contents)]));
    let layer = json!({ "Content": { "ZipFile": zip } });
    let layer = daemon.ask("POST", "/2018-10-31/layers/more/versions", &layer);
    assert_eq!(layer.status, 201, "{layer:?}");
    layer.body["LayerVersionArn"].clone()
}

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

/// Invokes the function `own` of a runtime, and returns the error when it is asked to fail.
#[track_caller]
fn cold_and_failed(daemon: &Daemon, runtime: &str, version: &Value) -> Reply {
    let cold = answer(daemon, "own", "cold");
    assert_eq!((&cold["version"], &cold["begun"]), (version, &json!("on-demand")), "{cold}");
    assert_eq!(cold["execution"], format!("AWS_Lambda_{runtime}"), "{cold}");
    error(daemon, "own")
}

/// Invokes two clones of the function `own`, and fails if a hook has not run once in each, or if a
/// value occurs twice.
#[track_caller]
fn two_clones(world: &World, daemon: &Daemon) {
    let settled = daemon.settled("own");
    assert_eq!(settled.body["State"], "Active", "{settled:?}");
    let clones = [(); 2].map(|()| {
        let clone = answer(daemon, "own:1", "thawed");
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
    let failed = cold_and_failed(&daemon, "python3.13", &json!("3.13"));
    assert_eq!(failed.body["errorType"], "ValueError", "{failed:?}");
    two_clones(&world, &daemon);
    daemon.end();
}

#[test]
#[ignore = "long: make test-full"]
fn java_21_serves_and_thaws_with_its_hooks() {
    let world = World::default();
    let daemon = Daemon::start(&world, &["--standby", "0"]);
    let class = |name: &str| std::fs::read(made("FIRN_LANGUAGES").join(name)).unwrap();
    let (hooks, streams) = (class("shop/Hooks.class"), class("shop/Streams.class"));
    let jar = zip_of_files([("shop/Streams.class", streams.as_slice())]);
    let layer = layer(&daemon, "java/lib/streams.jar", &jar);
    let code = STANDARD.encode(zip_of_files([("shop/Hooks.class", hooks.as_slice())]));
    let function = |handler: &str, more: &Value| {
        let mut function = json!({
            "Runtime": "java21", "Handler": handler, "MemorySize": 512, "Code": { "ZipFile": code },
        });
        function.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        function
    };
    assert_eq!(daemon.create("own", "any", "", &function("shop.Hooks", &json!({}))).status, 201);
    let failed = cold_and_failed(&daemon, "java21", &json!(21));
    assert_eq!(failed.body["errorType"], "java.lang.IllegalStateException", "{failed:?}");
    assert_eq!(failed.body["errorMessage"], "it is asked to", "{failed:?}");
    let frame = failed.body["stackTrace"][0].as_str().unwrap();
    assert!(frame.starts_with("shop.Hooks.handleRequest(Hooks.java:"), "{failed:?}");
    let more = json!({ "Publish": false, "SnapStart": { "ApplyOn": "None" }, "Layers": [layer] });
    for (name, handler, answer) in
        [("method", "shop.Hooks::shout", "ABC"), ("stream", "shop.Streams", "abc")]
    {
        assert_eq!(daemon.create(name, "any", "", &function(handler, &more)).status, 201);
        let reply = daemon.invoke(name, &json!("abc"));
        assert_eq!((reply.status, &reply.body), (200, &json!(answer)), "{reply:?}");
    }
    two_clones(&world, &daemon);
    daemon.end();
}

#[test]
#[ignore = "long: make test-full"]
fn nodejs_20_serves_modules_and_callbacks() {
    let world = World::default();
    let daemon = Daemon::start(&world, &["--standby", "0"]);
    let layer = layer(&daemon, "nodejs/node_modules/kind/index.js", b"module.exports = 'script';");
    let function = |handler: &str| {
        json!({
            "Runtime": "nodejs20.x", "Handler": handler, "Publish": false,
            "SnapStart": { "ApplyOn": "None" }, "Layers": [layer],
        })
    };
    let (module, script) = (function("own.handler"), function("lib/own.nested.handler"));
    assert_eq!(daemon.create("module", "own.mjs", MODULE, &module).status, 201);
    assert_eq!(daemon.create("script", "lib/own.js", SCRIPT, &script).status, 201);
    for name in ["module", "script"] {
        let cold = answer(&daemon, name, "cold");
        assert_eq!((&cold["kind"], &cold["version"]), (&json!(name), &json!("v20")), "{cold}");
        assert_eq!(cold["execution"], "AWS_Lambda_nodejs20.x", "{cold}");
        assert!(cold["arn"].as_str().unwrap().ends_with(name), "{cold}");
        let failed = error(&daemon, name);
        assert_eq!(failed.body["errorType"], "RangeError", "{failed:?}");
        assert_eq!(failed.body["trace"][0], "RangeError: it is asked to", "{failed:?}");
        answer(&daemon, name, "warm");
    }
    daemon.end();
}

#[test]
#[ignore = "long: make test-full"]
fn nodejs_20_streams_answers() {
    let world = World::default();
    let daemon = Daemon::start(&world, &["--standby", "0"]);
    let function = json!({
        "Runtime": "nodejs20.x", "Handler": "own.handler", "Publish": false,
        "SnapStart": { "ApplyOn": "None" },
    });
    assert_eq!(daemon.create("own", "own.mjs", STREAMED, &function).status, 201);
    let url = function_url(&daemon, "own", None);
    let page = text(daemon.send("GET", &url, ""));
    let (head, body) = page.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 201") && head.contains("\r\nx-own: 1"), "{page}");
    assert!(body.contains("first ") && body.contains("second"), "{page}");

    let path = "/2021-11-15/functions/own/response-streaming-invocations";
    for _ in 0..2 {
        let failed = text(daemon.send("POST", path, r#"{"fail":true}"#));
        assert!(failed.contains("first ") && failed.contains(r#"{"then":1}"#), "{failed}");
        assert!(!failed.contains("second"), "{failed}");
        for part in ["InvokeComplete", r#""ErrorCode":"Unhandled""#, "RangeError", "it is asked to"]
        {
            assert!(failed.contains(part), "{part}: {failed}");
        }
    }
    daemon.end();
}
