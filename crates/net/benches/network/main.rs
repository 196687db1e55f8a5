//! The proxy beside passt: throughput, processor time, latency and memory.
//!
//! Each engine is a process of its own that speaks QEMU's stream protocol (a frame after its length
//! in 4 bytes, big-endian) over a socket pair. The same threads carry the frames between that
//! socket and a tap device, behind which is a Linux kernel in a network namespace: the guest. Only
//! the engine's process is in its processor time and memory.
//!
//! `make bench-network`, or `cargo bench -p firn-net --bench network -- --passt PROGRAM [--json
//! FILE] [--runs N] [--ms N] [--parts throughput,latency,memory] [--only TEXT]`, as root.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a measurement that cannot go on fails")]

mod engine;
mod host;
mod latency;
mod memory;
#[path = "../../tests/linux/namespace.rs"]
mod namespace;
mod process;
mod pump;
mod stats;
mod subject;
#[path = "../../tests/linux/tap.rs"]
mod tap;
mod throughput;

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use rustix::process::{Resource, getrlimit, setrlimit};
use serde_json::json;

use crate::subject::Engines;

/// What is measured.
struct Settings {
    engines: Engines,
    json: Option<PathBuf>,
    runs: usize,
    /// How long a run of the throughput is.
    time: Duration,
    parts: String,
    /// The rows of the throughput whose names have this, such as `from guest`.
    only: String,
}

impl Settings {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Self {
        let mut settings = Self {
            engines: Engines { passt: "passt".into() },
            json: None,
            runs: 7,
            time: Duration::from_secs(2),
            parts: "throughput,latency,memory".into(),
            only: String::new(),
        };
        while let Some(name) = arguments.next() {
            // cargo adds it.
            if name == "--bench" {
                continue;
            }
            let value = arguments.next().unwrap_or_else(|| panic!("{name} needs a value"));
            match name.as_str() {
                "--passt" => settings.engines.passt = value,
                "--json" => settings.json = Some(value.into()),
                "--runs" => settings.runs = value.parse().unwrap(),
                "--ms" => settings.time = Duration::from_millis(value.parse().unwrap()),
                "--only" => settings.only = value,
                "--parts" => settings.parts = value,
                _ => panic!("{name} is not an option"),
            }
        }
        settings
    }

    fn has(&self, part: &str) -> bool {
        self.parts.split(',').any(|name| name == part)
    }
}

/// A line on standard output.
fn print(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

fn main() {
    let mut arguments = std::env::args().skip(1).peekable();
    match arguments.peek().map(String::as_str) {
        Some(engine::ROLE) => return engine::run(arguments.skip(1)),
        Some(memory::ENGINES_ROLE) => return memory::idle_engines(arguments.skip(1)),
        Some(memory::FLOWS_ROLE) => return memory::idle_flows(arguments.skip(1)),
        _ => {}
    }
    let settings = Settings::parse(arguments);
    // Each flow has one descriptor here and in its guest's process, and up to two in its engine.
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).unwrap();
    let mut results = json!({
        "host": host::describe(),
        "passt": settings.engines.passt_version(),
        "runs": settings.runs,
        "run_s": settings.time.as_secs_f64(),
    });
    if settings.has("throughput") {
        results["throughput"] = throughput::measure(&settings).into();
    }
    if settings.has("latency") {
        results["latency"] = latency::measure(&settings).into();
    }
    if settings.has("memory") {
        results["memory"] = memory::measure(&settings);
    }
    if let Some(path) = &settings.json {
        std::fs::write(path, format!("{results}\n")).unwrap();
    }
}
