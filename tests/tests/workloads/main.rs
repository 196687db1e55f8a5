//! Every function of `guest/functions`, served by the daemon on the image that it names. Its
//! answers on both inputs equal those computed outside of a microVM. `make test-workloads`
//! runs it here or in the lab; it needs all images. `FIRN_FUNCTIONS` names the folder,
//! `FIRN_OWN_IMAGE` an image with a user's own packages.
//!
//! With `--test-threads=1`: tests share this computer's memory.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test that cannot go on fails; a test that takes minutes prints its duration"
)]

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use firn_run::{Function, FunctionSettings};
use firn_tests::{Daemon, World, zip_of_files};
use serde_json::{Value, json};

/// Limit in seconds for a boot, the loading of a function, and a request: libraries of hundreds of
/// megabytes are read under emulation. A request takes less than 60 in the lab on a computer that
/// is otherwise idle, and many times that on a busy one.
const LIMIT: u64 = 900;

fn folder() -> PathBuf {
    std::env::var_os("FIRN_FUNCTIONS").map_or_else(|| "guest/functions".into(), PathBuf::from)
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Whether an answer equals the expected one, within the tolerances for numbers.
fn fits(answer: &Value, expected: &Value, settings: &FunctionSettings) -> bool {
    let (Some(answer), Some(expected)) = (answer.as_object(), expected.as_object()) else {
        return answer == expected;
    };
    answer.len() == expected.len()
        && expected.iter().all(|(key, right)| match settings.tolerance.get(key) {
            None => answer.get(key) == Some(right),
            Some(most) => {
                let given = answer.get(key).and_then(Value::as_f64);
                given
                    .zip(right.as_f64())
                    .is_some_and(|(given, right)| (given - right).abs() <= *most)
            }
        })
}

/// A function, and its folder.
#[track_caller]
fn function(name: &str) -> (Function, PathBuf) {
    let folder = folder().join(name).canonicalize().unwrap();
    (Function::from_path(&folder).unwrap(), folder)
}

#[track_caller]
fn check(function: &Function, folder: &Path, input: &str, answer: &Value) {
    let expected = read(&folder.join(format!("expected-{input}.json")));
    assert!(
        fits(answer, &expected, function.settings()),
        "{}, input {input}: {answer} is not {expected}",
        function.name()
    );
}

/// An event that brings its own media instead of a seed: input A's video, which the function has
/// made when it was loaded, or a PNG of 68 bytes.
fn brought(name: &str) -> Option<Value> {
    const PNG: &str = "iVBORw0KGgoAAAANSUhEUgAAAAMAAAACCAYAAACddGYaAAAAC0lEQVR4nGNgwAUAABoAAbw84EEAAAAASUVORK5CYII=";
    match name {
        "ffmpeg" | "video_processing" => {
            Some(json!({ "file": "/tmp/video-1-7.avi", "frames": 12 }))
        }
        "image" | "image-diff" | "image_rotate" | "recognition" | "cnn_serving" => {
            Some(json!({ "base64": PNG }))
        }
        _ => None,
    }
}

/// Serves a function through AWS Lambda's API: publishes it with SnapStart, and thaws it for the
/// first request.
#[track_caller]
fn served(name: &str) {
    let (function, folder) = function(name);
    let settings = function.settings();
    let files = function.files().iter().map(|(path, bytes)| (path.as_str(), bytes.as_slice()));
    let world = World::default();
    let begin = Instant::now();
    let daemon = Daemon::start(&world, &["--standby", "1"]);
    let image = settings.image.as_ref().map_or("base", |image| image.as_str());
    let more = json!({
        "Code": { "ZipFile": STANDARD.encode(zip_of_files(files)) }, "Handler": function.handler(),
        "MemorySize": settings.memory_mib.unwrap_or(256), "Timeout": LIMIT,
        "Environment": { "Variables": { "FIRN_IMAGE": image } },
    });
    let created = daemon.create(name, "handler.py", "", &more);
    assert_eq!(created.status, 201, "{created:?}");
    let settled = daemon.settled(name);
    assert_eq!(settled.body["State"], "Active", "{settled:?}");
    let frozen = begin.elapsed();
    let mut answered = Vec::new();
    for (input, start) in [("a", "thawed"), ("b", "warm")] {
        let event = read(&folder.join(format!("input-{input}.json")));
        let reply = daemon.invoke(&format!("{name}:1"), &event);
        assert_eq!(reply.status, 200, "{name}, input {input}: {reply:?}");
        check(&function, &folder, input, &reply.body);
        assert_eq!(reply.report()["start"], start, "{reply:?}");
        answered.push(begin.elapsed().as_secs());
    }
    if let Some(event) = brought(name) {
        let body = daemon.invoke(&format!("{name}:1"), &event).body;
        if event["file"].is_string() {
            check(&function, &folder, "a", &body);
        } else {
            assert_eq!(body["bytes"], 68, "{name}: {body}");
        }
    }
    println!(
        "{name}: frozen after {} s, answered after {} s and {} s",
        frozen.as_secs(),
        answered[0],
        answered[1]
    );
}

/// Boots and freezes a function without the daemon, and thaws it for each request.
#[track_caller]
fn served_without_the_daemon(name: &str) {
    let (function, folder) = function(name);
    let limit = LIMIT.to_string();
    let world = World::default();
    let begin = Instant::now();
    let boot = world.firn(["boot", "--name", "first", "--time-limit", &limit]).arg(&folder);
    let mut first = boot.start().ready();
    let loaded = begin.elapsed();
    world.firn(["freeze", "first", "snapshot"]).run().ok();
    first.end().ok();
    let frozen = begin.elapsed();
    for input in ["a", "b"] {
        let event = format!("@{}", folder.join(format!("input-{input}.json")).display());
        let thaw = world.firn(["thaw", "--time-limit", &limit, "--invoke", &event, "snapshot"]);
        check(&function, &folder, input, &thaw.run().json());
    }
    println!(
        "{name}, without the daemon: loaded after {} s, frozen after {} s, answered twice after {} s",
        loaded.as_secs(),
        frozen.as_secs(),
        begin.elapsed().as_secs()
    );
}

macro_rules! workloads {
    ($($name:ident: $folder:literal),* $(,)?) => {
        const NAMES: &[&str] = &[$($folder),*];
        $(#[test] fn $name() { served($folder) })*
    };
}

workloads! {
    bert: "bert",
    chameleon: "chameleon",
    cnn_serving: "cnn_serving",
    compression: "compression",
    ffmpeg: "ffmpeg",
    graph_bfs: "graph_bfs",
    hello: "hello",
    html_serving: "html_serving",
    image: "image",
    image_diff: "image-diff",
    image_rotate: "image_rotate",
    json_small: "json",
    json_serdes: "json_serdes",
    lr_serving: "lr_serving",
    lr_training: "lr_training",
    matmul: "matmul",
    matmul_fb: "matmul_fb",
    mmap: "mmap",
    pagerank: "pagerank",
    pyaes: "pyaes",
    read_list: "read-list",
    recognition: "recognition",
    rnn: "rnn",
    video_processing: "video_processing",
}

#[test]
fn every_function_has_a_test() {
    let mut found: Vec<_> = fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    found.sort();
    assert_eq!(found, NAMES);
}

#[test]
fn one_function_of_each_image_runs_without_the_daemon() {
    for name in ["chameleon", "lr_serving", "matmul_fb", "video_processing"] {
        served_without_the_daemon(name);
    }
}

#[test]
fn a_function_uses_the_packages_of_its_image() {
    let image = std::env::var("FIRN_OWN_IMAGE").expect("make test-workloads sets it");
    let world = World::default();
    let daemon = Daemon::start(&world, &["--root", &image]);
    daemon.publish("own", include_str!("../../functions/own_image/handler.py"));
    let reply = daemon.invoke("own:1", &json!({ "yaml": "a: [1, two]" }));
    assert_eq!((reply.status, &reply.body), (200, &json!({ "a": [1, "two"] })), "{reply:?}");
}
