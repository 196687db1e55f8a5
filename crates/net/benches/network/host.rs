//! The description of the host in results.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};

/// Processors, memory, kernel and the commit of this build.
pub(crate) fn describe() -> Value {
    let file = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let processors = file("/proc/cpuinfo");
    let name = |key: &str| {
        let line = processors.lines().find(|line| line.starts_with(key))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let memory = file("/proc/meminfo");
    let kib = memory.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok());
    let is_guest = processors.contains(" hypervisor ");
    json!({
        "machine": name("model name"),
        "cpus": std::thread::available_parallelism().map_or(0, usize::from),
        "memory_bytes": kib.map(|kib| kib << 10),
        "kernel": file("/proc/sys/kernel/osrelease").trim(),
        "virtual_machine": is_guest,
        "load": file("/proc/loadavg").trim(),
        "commit": commit(),
    })
}

/// The commit of the sources, with `+changes` if they differ from it.
fn commit() -> Option<String> {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let commit = git(&["rev-parse", "--short=12", "HEAD"])?;
    let changes = git(&["status", "--porcelain", "--untracked-files=no"])?;
    Some(if changes.is_empty() { commit } else { commit + "+changes" })
}
