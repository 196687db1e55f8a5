//! Invalid requests.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use firn_tests::{Daemon, World, reply, zip_of};
use serde_json::{Value, json};

use super::refused;

/// Looks like an event of the log.
const FORGED: &str = "2026-01-01T00:00:00Z  INFO firn: deleted";

#[test]
fn invalid_requests_get_aws_lambdas_errors() {
    let world = World::default();
    let daemon = Daemon::start(&world, &[]);
    let functions = "/2015-03-31/functions";
    let create = |name: &str, zip: &[u8]| {
        let code = json!({ "Code": { "ZipFile": STANDARD.encode(zip) }, "Publish": false });
        daemon.create(name, "handler.py", "", &code)
    };
    let value = "InvalidParameterValueException";
    refused(&create("f", b"no zip"), 400, value);
    for path in ["../handler.py", "/etc/handler.py", "a/../../b.py"] {
        refused(&create("f", &zip_of(path, "")), 400, value);
    }
    refused(&create("a b", &zip_of("handler.py", "")), 400, "ValidationException");
    let listed = daemon.ask("GET", functions, &Value::Null);
    assert_eq!(listed.body["Functions"], json!([]), "no refused function exists");

    // A function without a running instance.
    assert_eq!(create("f", &zip_of("handler.py", "def handler(e, c): return e")).status, 201);
    refused(&create("f", &zip_of("handler.py", "")), 409, "ResourceConflictException");
    let invoke = |name: &str, body: &str| {
        reply(daemon.send("POST", &format!("{functions}/{name}/invocations"), body))
    };
    refused(&invoke("f", "{no json"), 400, "InvalidRequestContentException");
    let long = format!("\"{}\"", "x".repeat(6 << 20));
    refused(&invoke("f", &long), 413, "RequestTooLargeException");
    for name in ["unknown", "f:7", "f:alias"] {
        refused(&invoke(name, "{}"), 404, "ResourceNotFoundException");
    }
    refused(&invoke("f%20g", "{}"), 400, "ValidationException");
    assert_eq!(daemon.status()["monitors"]["running"], 0, "no refused request starts a microVM");

    // A zip without the handler fails when the function starts: at once if the version is to be
    // frozen.
    let created = daemon.create("without", "other.py", "", &Value::Null);
    assert_eq!(created.status, 201, "{created:?}");
    let settled = daemon.settled("without");
    assert_eq!(settled.body["State"], "Failed", "{settled:?}");
    let reason = settled.body["StateReason"].as_str().unwrap();
    assert!(reason.contains("handler"), "{reason}");
    // The texts of a function begin no line of the log.
    let source = format!("raise RuntimeError('bad\\n{FORGED}\\x1b[2J')");
    assert_eq!(daemon.create("forger", "handler.py", &source, &Value::Null).status, 201);
    assert_eq!(daemon.settled("forger").body["State"], "Failed");
    let without = daemon.invoke("without", &json!({}));
    assert_eq!(without.status, 200, "{without:?}");
    assert!(without.head.contains("x-amz-function-error: unhandled"), "{without:?}");
    assert_eq!(without.body["errorType"], "Runtime.ImportModuleError", "{without:?}");
    let log = daemon.end();
    let told = format!("bad\\n{FORGED}");
    assert!(log.lines().any(|line| line.contains("not frozen") && line.contains(&told)), "{log}");
    assert!(!log.lines().any(|line| line.starts_with(FORGED)), "{log}");
}
