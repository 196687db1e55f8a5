//! Every function of `guest/functions`, frozen and thawed on the image that it names: its answers on both inputs are those that were computed
//! outside of a microVM. `make test-workloads` runs this here or in the lab; it needs all images. `FIRN_FUNCTIONS` names the folder.
//!
//! With `--test-threads=1`: tests share this computer's memory.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test that cannot go on fails; one that takes minutes says how long it took"
)]

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use firn_host::{Function, FunctionSettings};
use firn_tests::World;
use serde_json::Value;

/// Seconds that a request may take. Each takes less than 60 in the lab on a computer that does nothing else, and many times that on a busy one.
const LIMIT: &str = "900";
/// Seconds that a boot, and then the loading of a function, may take: libraries of hundreds of megabytes are read under emulation.
const LOAD_LIMIT: &str = "900";

fn folder() -> PathBuf {
    std::env::var_os("FIRN_FUNCTIONS").map_or_else(|| "guest/functions".into(), PathBuf::from)
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Whether an answer is the expected one: equal, but for the numbers that may be off by so much.
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

#[track_caller]
fn answers(name: &str) {
    let folder = folder().join(name).canonicalize().unwrap();
    let function = Function::from_path(&folder).unwrap();
    let world = World::default();
    let begin = Instant::now();
    let boot = world.firn(["boot", "--name", "first", "--time-limit", LOAD_LIMIT]).arg(&folder);
    let mut first = boot.start().ready();
    let loaded = begin.elapsed();
    world.firn(["freeze", "first", "snapshot"]).run().ok();
    first.end().ok();
    let frozen = begin.elapsed();
    for input in ["a", "b"] {
        let event = format!("@{}", folder.join(format!("input-{input}.json")).display());
        let thaw = world.firn(["thaw", "--time-limit", LIMIT, "--invoke", &event, "snapshot"]);
        let answer = thaw.run().json();
        let expected = json(&folder.join(format!("expected-{input}.json")));
        assert!(
            fits(&answer, &expected, function.settings()),
            "{name}, input {input}: {answer} is not {expected}"
        );
    }
    println!(
        "{name}: loaded after {} s, frozen after {} s, answered twice after {} s",
        loaded.as_secs(),
        frozen.as_secs(),
        begin.elapsed().as_secs()
    );
}

macro_rules! workloads {
    ($($name:ident: $folder:literal),* $(,)?) => {
        const NAMES: &[&str] = &[$($folder),*];
        $(#[test] fn $name() { answers($folder) })*
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
fn none_is_left_out() {
    let mut found: Vec<_> = fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    found.sort();
    assert_eq!(found, NAMES);
}
