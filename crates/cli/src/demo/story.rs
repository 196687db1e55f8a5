//! One function's way: booted, asked, frozen, ended, thawed again and again in new processes.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use thiserror::Error;

use firn_base::now_ns;
use firn_memory::page_cache;

use crate::clock;
use crate::output;

/// The kinds of thaw that are shown: name, planner, whether the page cache holds the image before.
const KINDS: [(&str, &str, bool); 3] = [
    ("thaw, cold cache", "firecracker", false),
    ("thaw, cold cache, no read-ahead", "firecracker:readahead=off", false),
    ("thaw, image cached", "firecracker", true),
];

/// Why a story broke off.
#[derive(Debug, Error)]
pub(crate) enum StoryError {
    #[error("reading {path}")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path} is no JSON")]
    NotJson { path: PathBuf, source: serde_json::Error },
    #[error("starting `{command}`")]
    Start { command: String, source: io::Error },
    #[error("`{command}` failed ({status}): {message}")]
    Failed { command: String, status: ExitStatus, message: String },
    #[error("`{command}` gave an answer that is not as expected: {text}")]
    Output { command: String, text: String, source: serde_json::Error },
    #[error("{step}: the answer is wrong: {found} instead of {expected}")]
    WrongAnswer { step: String, found: Value, expected: Value },
    #[error("the page cache of {0} does not empty: it is on a file system that lives there")]
    NotCold(PathBuf),
}

/// What is measured of one start, in the order of its passing: name and ns.
type Parts = Vec<(String, u64)>;

/// One column of the table.
#[derive(Debug, Serialize)]
pub(super) struct Start {
    /// What kind of start.
    pub(super) name: String,
    /// Its parts, ns; medians where there were several starts.
    pub(super) parts: Parts,
    /// Request in to correct answer out, ns.
    pub(super) total_ns: u64,
    /// Guest pages that KVM maps at the end.
    pub(super) guest_pages: Option<u64>,
    /// Faults that KVM resolved.
    pub(super) kvm_faults: Option<u64>,
    /// Bytes read from storage.
    pub(super) read_bytes: Option<u64>,
    /// Guest memory in DRAM, of this microVM alone.
    pub(super) private_bytes: Option<u64>,
    /// Guest memory in DRAM that others can share.
    pub(super) shared_bytes: Option<u64>,
}

/// All of one function.
#[derive(Debug, Serialize)]
pub(super) struct Story {
    /// The function.
    pub(super) function: String,
    /// Its freeze: parts and total, ns.
    pub(super) freeze: Parts,
    /// Bytes that the snapshot takes on disk.
    pub(super) snapshot_bytes: u64,
    /// Number of thaws of each kind.
    pub(super) thaws: u32,
    /// The cold boot first, then each kind of thaw.
    pub(super) starts: Vec<Start>,
}

/// Where a story is told.
pub(super) struct Stage<'a> {
    pub(super) executable: &'a Path,
    pub(super) function: PathBuf,
    pub(super) work: &'a Path,
    pub(super) thaws: u32,
}

#[derive(Deserialize)]
struct Booted {
    start_ns: u64,
    boot_ns: u64,
    load_ns: u64,
}

#[derive(Deserialize)]
struct Invoked {
    answer: Option<Value>,
}

#[derive(Deserialize)]
struct Frozen {
    prepare_ns: u64,
    pause_ns: u64,
    save_ns: u64,
    image_ns: u64,
    overlay_ns: u64,
    sync_ns: u64,
    publish_ns: u64,
    total_ns: u64,
    disk_bytes: u64,
}

#[derive(Deserialize)]
struct Thawed {
    times: BTreeMap<String, Option<u64>>,
    kvm: Kvm,
    guest_pages: u64,
    read_bytes: u64,
    private_bytes: u64,
    shared_bytes: u64,
    outcome: Invoked,
}

#[derive(Deserialize)]
struct Kvm {
    page_faults: u64,
}

impl Stage<'_> {
    pub(super) fn tell(&self, name: &str) -> Result<Story, StoryError> {
        let microvm = format!("demo-{name}-{}", std::process::id());
        let snapshot = self.work.join(name);

        let begin = now_ns();
        output::note(&format!("{name}: booting a microVM and loading the function"));
        let booted: Booted = self.firn(&[
            "boot",
            "--json",
            "--detach",
            "--name",
            &microvm,
            &self.function.display().to_string(),
        ])?;
        let sent = now_ns();
        let invoked: Invoked =
            self.firn(&["invoke", "--json", &microvm, &self.event("input-a.json")])?;
        let answered = now_ns();
        self.check("input A after the boot", invoked.answer, "expected-a.json")?;
        let boot = Start {
            name: "cold boot".to_owned(),
            parts: vec![
                ("start the monitor".to_owned(), booted.start_ns),
                ("boot Linux".to_owned(), booted.boot_ns),
                ("load the function".to_owned(), booted.load_ns),
                ("first response".to_owned(), answered - sent),
            ],
            total_ns: answered - begin,
            guest_pages: None,
            kvm_faults: None,
            read_bytes: None,
            private_bytes: None,
            shared_bytes: None,
        };

        output::note(&format!("{name}: freezing it, and ending the microVM"));
        let frozen: Frozen =
            self.firn(&["freeze", "--json", &microvm, &snapshot.display().to_string()])?;

        let mut starts = vec![boot];
        for (kind, planner, cached) in KINDS {
            starts.push(self.thaw(name, &snapshot, kind, planner, cached)?);
        }
        Ok(Story {
            function: name.to_owned(),
            freeze: vec![
                ("prepare the guest".to_owned(), frozen.prepare_ns),
                ("pause and save".to_owned(), frozen.pause_ns + frozen.save_ns),
                ("write memory and disk".to_owned(), frozen.image_ns + frozen.overlay_ns),
                ("seal".to_owned(), frozen.sync_ns + frozen.publish_ns),
                ("total".to_owned(), frozen.total_ns),
            ],
            snapshot_bytes: frozen.disk_bytes,
            thaws: self.thaws,
            starts,
        })
    }

    fn thaw(
        &self,
        name: &str,
        snapshot: &Path,
        kind: &str,
        planner: &str,
        cached: bool,
    ) -> Result<Start, StoryError> {
        output::note(&format!("{name}: {} x {kind}, each in a new process", self.thaws));
        let mut thawed = Vec::new();
        for number in 1..=self.thaws {
            self.set_cache(snapshot, cached)?;
            let one: Thawed = self.firn(&[
                "thaw",
                "--json",
                "--planner",
                planner,
                "--invoke",
                &self.event("input-b.json"),
                &snapshot.display().to_string(),
            ])?;
            let step = format!("input B after thaw {number}");
            self.check(&step, one.outcome.answer.clone(), "expected-b.json")?;
            thawed.push(one);
        }
        let time = |part: &str| {
            median(thawed.iter().map(|one| one.times.get(part).copied().flatten().unwrap_or(0)))
        };
        let parts = [
            ("process start", "process_start_ns"),
            ("load", "load_ns"),
            ("plan", "plan_ns"),
            ("execute", "execute_ns"),
            ("resume", "resume_ns"),
            ("identify", "identify_ns"),
            ("first response", "invoke_ns"),
        ];
        Ok(Start {
            name: kind.to_owned(),
            parts: parts.map(|(name, key)| (name.to_owned(), time(key))).to_vec(),
            total_ns: time("total_ns"),
            guest_pages: Some(median(thawed.iter().map(|one| one.guest_pages))),
            kvm_faults: Some(median(thawed.iter().map(|one| one.kvm.page_faults))),
            read_bytes: Some(median(thawed.iter().map(|one| one.read_bytes))),
            private_bytes: Some(median(thawed.iter().map(|one| one.private_bytes))),
            shared_bytes: Some(median(thawed.iter().map(|one| one.shared_bytes))),
        })
    }

    /// Puts the snapshot's image into the page cache, or makes sure that none of it is there.
    fn set_cache(&self, snapshot: &Path, cached: bool) -> Result<(), StoryError> {
        let path = snapshot.join("memory.img");
        let failed = |source| StoryError::Read { path: path.clone(), source };
        let image = File::open(&path).map_err(failed)?;
        if cached {
            let len = image.metadata().map_err(failed)?.len();
            page_cache::preload(&image, 0..len).map_err(failed)?;
        } else if !page_cache::evict(&image).map_err(failed)?.is_cold() {
            return Err(StoryError::NotCold(path));
        }
        Ok(())
    }

    fn event(&self, file: &str) -> String {
        format!("@{}", self.function.join(file).display())
    }

    fn check(&self, step: &str, found: Option<Value>, expected: &str) -> Result<(), StoryError> {
        let path = self.function.join(expected);
        let text =
            fs::read(&path).map_err(|source| StoryError::Read { path: path.clone(), source })?;
        let expected: Value =
            serde_json::from_slice(&text).map_err(|source| StoryError::NotJson { path, source })?;
        let found = found.unwrap_or(Value::Null);
        if found == expected {
            return Ok(());
        }
        Err(StoryError::WrongAnswer { step: step.to_owned(), found, expected })
    }

    /// Runs a command of firn's in a new process, from now on; its answer is one JSON object.
    fn firn<T: DeserializeOwned>(&self, arguments: &[&str]) -> Result<T, StoryError> {
        let command = format!("firn {}", arguments.join(" "));
        let output = Command::new(self.executable)
            .args(arguments)
            .env(clock::REQUEST_VARIABLE, now_ns().to_string())
            .output()
            .map_err(|source| StoryError::Start { command: command.clone(), source })?;
        if !output.status.success() {
            let message = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return Err(StoryError::Failed { command, status: output.status, message });
        }
        serde_json::from_slice(&output.stdout).map_err(|source| StoryError::Output {
            command,
            text: String::from_utf8_lossy(&output.stdout).into_owned(),
            source,
        })
    }
}

/// The middle one of some values; of an even number of them, the upper of the two in the middle.
fn median(values: impl Iterator<Item = u64>) -> u64 {
    let mut values: Vec<u64> = values.collect();
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or(0)
}

#[cfg(test)]
#[path = "story_tests.rs"]
mod tests;
