//! The daemon, with the clients that people have: boto3 and the aws command, and through them `awslambdaric` in the guest.

use std::process::Child;
use std::time::Duration;

use firn_tests::{Daemon, World, reply, zip_of};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

const BOTO: &str = include_str!("../../clients/boto.py");

/// Answers with what it is told to, after the seconds that it is told to sleep.
const SLEEPER: &str = "\
import time


def handler(event, context):
    time.sleep(event.get('sleep', 0))
    return event
";

#[track_caller]
fn finished(child: Child) -> String {
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {stderr}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn boto3_and_the_aws_command_work_unmodified() {
    const INVOCATIONS: u64 = 100;
    let world = World::default();
    let daemon = Daemon::start(&world, &["--monitors", "3"]);
    let script = world.file("boto.py");
    std::fs::write(&script, BOTO).unwrap();
    let (script, count) = (script.display().to_string(), INVOCATIONS.to_string());
    let boto = daemon.python(&[&script, &daemon.endpoint(), &count, "16"]);
    aws(&world, &daemon);
    let text = finished(boto);
    let seen: Value = serde_json::from_str(&text).unwrap();

    assert_eq!(seen["taken"], "ResourceConflictException");
    assert_eq!(seen["published"], json!(["1", "Pending"]));
    assert_eq!(seen["early"], "SnapStartNotReadyException");
    let first = &seen["first"];
    assert_eq!(first["report"]["start"], "thawed", "{first}");
    assert_eq!(first["body"]["greeting"], "Hello, Ada!");
    assert_eq!(
        first["body"]["hooks"],
        json!(["before", "after"]),
        "hooks run once, before the first request"
    );
    assert_eq!(first["body"]["version"], "1");
    let arn = "arn:aws:lambda:us-east-1:000000000000:function:greeter:live";
    assert_eq!(first["body"]["arn"], arn);
    assert!((1..=10_000).contains(&first["body"]["left"].as_u64().unwrap()), "{first}");
    assert!(first["log"].as_str().unwrap().contains("\nasked for Ada\nEND RequestId"), "{first}");
    let raised = &seen["raised"];
    assert_eq!(
        (&raised["error"], &raised["body"]["errorType"]),
        (&json!("Unhandled"), &json!("KeyError"))
    );
    assert_eq!((&seen["dry"]["status"], &seen["event"]["status"]), (&json!(204), &json!(202)));
    for all in ["right", "randoms", "requests"] {
        assert_eq!(seen[all], INVOCATIONS, "{all}");
    }
    assert_eq!(seen["hooks"], json!([["before", "after"]]));
    let thaws = seen["thaws"].as_array().unwrap();
    assert!(thaws.iter().all(|thaw| thaw["count"] == 1) && thaws.len() < 3, "{thaws:?}");
    let slow = &seen["slow"];
    assert_eq!(
        (&slow["error"], &slow["body"]["errorType"]),
        (&json!("Unhandled"), &json!("Sandbox.Timedout"))
    );
    assert_eq!(seen["unknown"], "ResourceNotFoundException");
    let second = &seen["second"];
    assert_eq!(
        (&second["report"]["start"], &second["body"]["greeting"]),
        (&json!("cold"), &json!("Hi, Ada!"))
    );
    assert_eq!(second["body"]["hooks"], json!([]), "hooks are SnapStart's alone");
    assert_eq!(seen["throttled"], "TooManyRequestsException");
    assert_eq!(seen["versions"], json!(["$LATEST", "1", "2"]));
    assert_eq!(
        (&seen["functions"], &seen["gone"]),
        (&json!(true), &json!("ResourceNotFoundException"))
    );

    daemon.end();
    for folder in ["code", "snapshots"] {
        let left = std::fs::read_dir(world.file("daemon").join(folder)).unwrap().count();
        assert_eq!(left, 0, "what was deleted is gone: {folder}");
    }
}

/// One function, by the aws command alone.
#[track_caller]
fn aws(world: &World, daemon: &Daemon) {
    let (zip, answer) = (world.file("code.zip"), world.file("answer.json"));
    std::fs::write(&zip, zip_of(SLEEPER)).unwrap();
    let zip = format!("fileb://{}", zip.display());
    let event = world.file("event.json");
    std::fs::write(&event, "{\"a\": [1]}").unwrap();
    let event = format!("fileb://{}", event.display());
    let answer = answer.display().to_string();
    let lambda = |arguments: &[&str]| {
        let command = [&["-m", "awscli", "lambda"], arguments].concat();
        finished(daemon.python(&command))
    };
    let created = lambda(&[
        "create-function",
        "--function-name",
        "by-aws",
        "--runtime",
        "python3.11",
        "--handler",
        "handler.handler",
        "--role",
        "arn:aws:iam::000000000000:role/any",
        "--zip-file",
        &zip,
    ]);
    let created: Value = serde_json::from_str(&created).unwrap();
    assert_eq!(created["FunctionName"], "by-aws");
    lambda(&["invoke", "--function-name", "by-aws", "--payload", &event, &answer]);
    assert_eq!(std::fs::read_to_string(&answer).unwrap(), "{\"a\": [1]}");
    lambda(&["delete-function", "--function-name", "by-aws"]);
}

#[test]
fn kills_cost_their_own_requests_and_nothing_else() {
    let world = World::default();
    let daemon = Daemon::start(&world, &[]);
    daemon.publish("sleeper", SLEEPER);
    let path = "/2015-03-31/functions/sleeper:1/invocations";

    // A monitor in the middle of a request.
    let first = daemon.invoke("sleeper:1", &json!({}));
    let victim = i32::try_from(first.report()["thaw"]["pid"].as_i64().unwrap()).unwrap();
    let doomed = daemon.send("POST", path, r#"{"sleep": 100}"#);
    std::thread::sleep(Duration::from_millis(500));
    let spared = daemon.send("POST", path, r#"{"sleep": 1, "who": "spared"}"#);
    std::thread::sleep(Duration::from_millis(500));
    kill_process(Pid::from_raw(victim).unwrap(), Signal::KILL).unwrap();
    let (doomed, spared) = (reply(doomed), reply(spared));
    assert_eq!(doomed.status, 500, "{doomed:?}");
    assert!(doomed.head.contains("x-amzn-errortype: serviceexception"), "{doomed:?}");
    assert_eq!((spared.status, &spared.body["who"]), (200, &json!("spared")), "{spared:?}");

    // A client that goes away while its function runs.
    drop(daemon.send("POST", path, r#"{"sleep": 1}"#));
    let warm = daemon.invoke("sleeper:1", &json!({ "still": "here" }));
    assert_eq!((warm.status, &warm.body["still"]), (200, &json!("here")), "{warm:?}");

    // A request that is cut off.
    drop(daemon.send_part("POST", path, r#"{"cut": "#, 100));
    drop(daemon.send_part("POST", "/2015-03-31/functions", r#"{"FunctionName": "#, 1 << 20));

    // The daemon in the middle of a request: its microVMs go with it, its functions stay.
    let lost = daemon.send("POST", path, r#"{"sleep": 100}"#);
    std::thread::sleep(Duration::from_millis(500));
    daemon.kill();
    drop(lost);
    world.assert_nothing_left();
    let daemon = Daemon::start(&world, &[]);
    let thawed = daemon.invoke("sleeper:1", &json!({ "again": 1 }));
    assert_eq!((thawed.status, &thawed.body["again"]), (200, &json!(1)), "{thawed:?}");
    assert_eq!(thawed.report()["start"], "thawed", "{thawed:?}");
    daemon.end();
}
