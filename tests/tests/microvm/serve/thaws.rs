//! A version is thawed with the planner that its function names, or booted if the thaw fails.

use std::io::Read;
use std::net::TcpStream;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use firn_tests::{BlockedLoader, Daemon, World, zip_of};
use memchr::memmem;
use serde_json::{Value, json};

use super::{SLEEPER, adds_up, kill, process, processes, refused};

/// A custom runtime: fetches requests one after another, and replies to them. It streams some of
/// its answers.
const BOOTSTRAP: &str = r#"#!/usr/bin/python3 -u
import json, os, time, urllib.request

api = "http://" + os.environ["AWS_LAMBDA_RUNTIME_API"] + "/2018-06-01/runtime/"
begun = os.environ["AWS_LAMBDA_INITIALIZATION_TYPE"]
if begun == "snap-start":
    urllib.request.urlopen(api + "restore/next").read()


def parts(mode):
    if mode == "/page":
        yield json.dumps({"statusCode": 201, "headers": {"x-own": "1"}}).encode() + bytes(8)
    yield b'{"first":1,'
    if mode == "wait":
        time.sleep(3600)
    yield b'"second":2}'


while True:
    with urllib.request.urlopen(api + "invocation/next") as request:
        event = json.load(request)
        name = request.headers["Lambda-Runtime-Aws-Request-Id"]
    mode = event.get("stream", event.get("rawPath"))
    if mode:
        kind = "application/vnd.awslambda.http-integration-response" if mode == "/page" else "text/x"
        headers = {"Lambda-Runtime-Function-Response-Mode": "streaming", "Content-Type": kind}
        # A body without a length is sent in chunks.
        post = urllib.request.Request(api + "invocation/" + name + "/response", parts(mode), headers)
        urllib.request.urlopen(post)
        continue
    with open("/opt/share/text") as file:
        answer = {"own": event, "handler": os.environ["_HANDLER"], "begun": begun, "layer": file.read()}
    urllib.request.urlopen(api + "invocation/" + name + "/response", json.dumps(answer).encode())
"#;

#[test]
fn a_thaw_uses_the_functions_planner_and_a_boot_replaces_a_failed_thaw() {
    let world = World::default();
    let daemon = Daemon::start(&world, &["--standby", "0"]);
    let zip = STANDARD.encode(zip_of("share/text", "of a layer"));
    let layer = json!({ "Content": { "ZipFile": zip } });
    let layer = daemon.ask("POST", "/2018-10-31/layers/text/versions", &layer);
    assert_eq!(layer.status, 201, "{layer:?}");
    let own = json!({
        "Runtime": "provided.al2023", "Handler": "any", "Layers": [layer.body["LayerVersionArn"]],
        "Code": { "ZipFile": STANDARD.encode(zip_of("bootstrap", BOOTSTRAP)) }, "Timeout": 900,
        "Environment": { "Variables": { "FIRN_PLANNER": "dram_cached", "FIRN_RESTORE_HOOK": "true" } },
    });
    let created = daemon.create("own", "bootstrap", "", &own);
    assert_eq!(created.status, 201, "{created:?}");
    let settled = daemon.settled("own");
    assert_eq!(settled.body["State"], "Active", "{settled:?}");
    let answer = |begun: &str| json!({ "own": { "a": 1 }, "handler": "any", "begun": begun, "layer": "of a layer" });

    let thawed = daemon.invoke("own:1", &json!({ "a": 1 }));
    assert_eq!((thawed.status, &thawed.body), (200, &answer("snap-start")), "{thawed:?}");
    let report = thawed.report();
    assert_eq!(report["start"], "thawed", "{report}");
    assert_eq!(report["thaw"]["planner"], "dram_cached", "{report}");
    assert_eq!((&report["thaw_failed"], &report["standby"]), (&json!(false), &json!(false)));

    // Snapshots that are damaged or missing are never used.
    let snapshots = world.file("daemon/snapshots");
    let snapshot = std::fs::read_dir(&snapshots).unwrap().next().unwrap().unwrap().path();
    answers_stream(&daemon, process(&report));
    for damage in ["changed", "gone"] {
        if damage == "changed" {
            let file = snapshot.join("snapshot.firn");
            let mut bytes = std::fs::read(&file).unwrap();
            bytes[1000] ^= 0x10;
            std::fs::write(&file, bytes).unwrap();
        } else {
            std::fs::remove_dir_all(&snapshot).unwrap();
        }
        let cold = daemon.invoke("own:1", &json!({ "a": 1 }));
        assert_eq!((cold.status, &cold.body), (200, &answer("on-demand")), "{damage}: {cold:?}");
        let report = cold.report();
        assert_eq!((&report["start"], &report["thaw_failed"]), (&json!("cold"), &json!(true)));
        adds_up(&report);
        processes(&world, "monitor").into_iter().for_each(kill);
    }
    let log = daemon.end();
    let frozen = log.lines().find(|line| line.contains("frozen")).unwrap_or_default();
    assert!(frozen.contains("dram_cached"), "{log}");
    let warnings: Vec<&str> = log.lines().filter(|line| line.contains("booting instead")).collect();
    assert_eq!(warnings.len(), 2, "{log}");
    assert!(warnings.iter().all(|line| line.contains("snapshots/own-1-")), "{warnings:#?}");
}

/// Invokes the function `own`, which streams its answers, in a process that is killed at last.
fn answers_stream(daemon: &Daemon, process: i32) {
    let whole = json!({ "first": 1, "second": 2 });
    let invoked = daemon.invoke("own:1", &json!({ "stream": "whole" }));
    assert_eq!((invoked.status, &invoked.body), (200, &whole), "{invoked:?}");

    let alias = json!({ "Name": "live", "FunctionVersion": "1" });
    let alias = daemon.ask("POST", "/2015-03-31/functions/own/aliases", &alias);
    assert_eq!(alias.status, 201, "{alias:?}");
    let url = function_url(daemon, "own", Some("live"));
    let page = text(daemon.send("GET", &format!("{url}page"), ""));
    let (head, body) = page.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 201") && head.contains("\r\nx-own: 1"), "{page}");
    assert_eq!(body, "B\r\n{\"first\":1,\r\nB\r\n\"second\":2}\r\n0\r\n\r\n", "{page}");

    // This function does not end by itself: what the client has read was sent before.
    let path = "/2021-11-15/functions/own/response-streaming-invocations?Qualifier=1";
    let mut stream = daemon.send("POST", path, r#"{"stream":"wait"}"#);
    let mut read = Vec::new();
    while memmem::find(&read, b"{\"first\":1,").is_none() {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        read.extend(byte);
    }
    assert!(memmem::find(&read, b"PayloadChunk").is_some());
    kill(process);
    let rest = text(stream);
    assert!(rest.contains("InvokeComplete") && rest.contains("ServiceException"), "{rest}");
    assert!(!rest.contains("second"), "{rest}");
}

/// Gives a function, or its alias, a URL that everyone may use and that streams.
#[track_caller]
pub(super) fn function_url(daemon: &Daemon, function: &str, alias: Option<&str>) -> String {
    let qualifier = alias.map(|alias| format!("?Qualifier={alias}")).unwrap_or_default();
    let permission = json!({
        "StatementId": "all", "Action": "lambda:InvokeFunctionUrl", "Principal": "*",
        "FunctionUrlAuthType": "NONE",
    });
    let config = json!({ "AuthType": "NONE", "InvokeMode": "RESPONSE_STREAM" });
    let asked = [
        (format!("/2015-03-31/functions/{function}/policy{qualifier}"), permission),
        (format!("/2021-10-31/functions/{function}/url{qualifier}"), config),
    ]
    .map(|(path, body)| daemon.ask("POST", &path, &body));
    assert!(asked.iter().all(|reply| reply.status == 201), "{asked:?}");
    asked[1].body["FunctionUrl"].as_str().unwrap().to_owned()
}

/// The rest of a reply.
pub(super) fn text(mut stream: TcpStream) -> String {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A version whose planner needs a recording is active once its snapshot has one. FaaSnap's loader
/// runs concurrently with the guest: a request is served while storage blocks the loader.
#[test]
fn a_request_is_served_while_the_loader_runs() {
    let world = World::default();
    let daemon = Daemon::start(&world, &["--standby", "1"]);
    let planner = json!({ "Environment": { "Variables": { "FIRN_PLANNER": "faasnap" } } });
    assert_eq!(daemon.create("own", "handler.py", SLEEPER, &planner).status, 201);
    let waits = loop {
        let path = "/2015-03-31/functions/own/configuration?Qualifier=1";
        let version = daemon.ask("GET", path, &Value::Null).body;
        assert_eq!(version["State"], "Pending", "{version}");
        let reason = version["StateReason"].as_str().unwrap();
        if reason.starts_with("waits for a recording of ") {
            break reason.to_owned();
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    assert!(waits.contains("faasnap:merge=32 needs"), "{waits}");
    let early = daemon.invoke("own:1", &json!({}));
    refused(&early, 409, "SnapStartNotReadyException");
    let snapshots = world.file("daemon/snapshots");
    let snapshot = std::fs::read_dir(&snapshots).unwrap().next().unwrap().unwrap().path();
    assert!(waits.contains(&snapshot.display().to_string()), "{waits}");
    let event = json!({ "a": 1 });
    let record = world.firn(["profile", "record", "--part", "groups", "--invoke"]);
    record.arg(event.to_string()).arg(&snapshot).run().ok();
    world.firn(["profile", "pack", "--planner", "faasnap"]).arg(&snapshot).run().ok();
    let settled = daemon.settled("own");
    assert_eq!(settled.body["State"], "Active", "{settled:?}");

    let held = BlockedLoader::of(&snapshot.join("loading-set.img"));
    let answer = daemon.invoke("own:1", &event);
    assert_eq!((answer.status, &answer.body), (200, &event), "{answer:?}");
    let report = answer.report();
    assert_eq!(
        (&report["start"], &report["standby"]),
        (&json!("thawed"), &json!(true)),
        "{report}"
    );
    assert_eq!(report["thaw"]["planner"], "faasnap:merge=32", "{report}");
    assert_eq!(report["thaw"]["loader"]["done"], false, "{report}");
    assert!(held.holds());
    adds_up(&report);
    drop(held);
    let warm = daemon.invoke("own:1", &event).report();
    assert_eq!(warm["start"], "warm", "{warm}");
    daemon.end();
}
