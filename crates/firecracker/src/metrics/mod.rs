//! Metrics: a line of JSON at each flush, to the file or named pipe of the configuration.
//!
//! They have Firecracker's names, and values of this process; what cannot happen in firn is 0.
//! Counts and sums are those since the last flush, times are the last ones, and the shortest and
//! longest times are those since the start. They are flushed when a microVM was started, every
//! minute from then on, on request and at the end.

mod groups;
mod requests;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use firn_vmm::{Counters, Handle};
use parking_lot::Mutex;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use thiserror::Error;
use tokio::sync::{Notify, oneshot};

use self::groups::{Group, Key};
pub(crate) use self::requests::Counter;
use crate::logger;

/// The time between two flushes.
const PERIOD: Duration = Duration::from_secs(60);

/// Where the metrics go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MetricsConfig {
    /// The file or named pipe.
    pub(crate) metrics_path: String,
}

/// A time that the metrics have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Latency {
    /// `PUT /snapshot/create` of a full snapshot.
    FullCreateSnapshot,
    /// The same of a diff snapshot.
    DiffCreateSnapshot,
    /// `PUT /snapshot/load`.
    LoadSnapshot,
    /// `PATCH /vm` to `Paused`.
    PauseVm,
    /// `PATCH /vm` to `Resumed`.
    ResumeVm,
}

impl Latency {
    const ALL: [Self; 5] = [
        Self::FullCreateSnapshot,
        Self::DiffCreateSnapshot,
        Self::LoadSnapshot,
        Self::PauseVm,
        Self::ResumeVm,
    ];

    /// Its name, and that of the part that is the microVM's own thread's.
    const fn names(self) -> [&'static str; 2] {
        match self {
            Self::FullCreateSnapshot => ["full_create_snapshot", "vmm_full_create_snapshot"],
            Self::DiffCreateSnapshot => ["diff_create_snapshot", "vmm_diff_create_snapshot"],
            Self::LoadSnapshot => ["load_snapshot", "vmm_load_snapshot"],
            Self::PauseVm => ["pause_vm", "vmm_pause_vm"],
            Self::ResumeVm => ["resume_vm", "vmm_resume_vm"],
        }
    }
}

/// Why the metrics are not set up or not flushed.
#[derive(Debug, Error)]
pub(crate) enum MetricsError {
    /// They have a file already.
    #[error("the metrics have a file already: it cannot be changed")]
    Again,
    /// The file cannot be opened.
    #[error("metrics_path is not valid: cannot open {path}")]
    Open {
        /// The file.
        path: String,
        /// The system's error.
        source: io::Error,
    },
    /// The file cannot be written.
    #[error("cannot write the metrics")]
    Write(#[source] io::Error),
}

/// When the start of this process began, by the process that started it, or when this one had read
/// its arguments, µs.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StartTimes {
    /// CLOCK_MONOTONIC.
    pub(crate) wall: u64,
    /// CLOCK_PROCESS_CPUTIME_ID.
    pub(crate) cpu: u64,
    /// CPU time that the other process used.
    pub(crate) parent_cpu: u64,
}

impl StartTimes {
    /// The time of a clock.
    pub(crate) fn now(clock: ClockId) -> u64 {
        let time = clock_gettime(clock);
        let us = time.tv_sec.saturating_mul(1_000_000).saturating_add(time.tv_nsec / 1000);
        u64::try_from(us).unwrap_or_default()
    }
}

/// The metrics of this process. All clones are the same.
#[derive(Clone, Default)]
pub(crate) struct Metrics(Arc<Mutex<Inner>>);

#[derive(Default)]
struct Inner {
    /// A microVM was started.
    started: Arc<Notify>,
    file: Option<File>,
    /// The end of a line that the file has not taken.
    rest: Vec<u8>,
    /// Requests, and those that failed.
    counts: BTreeMap<Counter, (u64, u64)>,
    latencies: BTreeMap<&'static str, u64>,
    /// µs that the start took, by the clock and of the processor.
    startup: [u64; 2],
    /// Requests with fields that have a new name.
    deprecated: u64,
    /// Exchanges of the files of drives, by their ids, and those that failed.
    updates: BTreeMap<String, (u64, u64)>,
    /// Flushes that failed.
    failures: u64,
    /// The microVM, while it runs.
    microvm: Option<Handle>,
    /// What it had done when it was last asked.
    devices: Counters,
    /// What was flushed.
    flushed: BTreeMap<Key, u64>,
}

impl Metrics {
    /// Counts a request.
    pub(crate) fn count(&self, counter: Counter, failed: bool) {
        let mut inner = self.0.lock();
        let (count, fails) = inner.counts.entry(counter).or_default();
        *count += 1;
        *fails += u64::from(failed);
    }

    /// Counts a request with fields that have a new name.
    pub(crate) fn count_deprecated(&self) {
        self.0.lock().deprecated += 1;
    }

    /// Counts an exchange of a drive's file.
    pub(crate) fn count_update(&self, drive: &str, failed: bool) {
        let mut inner = self.0.lock();
        let (count, fails) = inner.updates.entry(drive.to_owned()).or_default();
        *(if failed { fails } else { count }) += 1;
    }

    /// Notes how long something took, and its part in the microVM's own thread.
    pub(crate) fn took(&self, latency: Latency, time: Duration, own: Duration) {
        let latencies = &mut self.0.lock().latencies;
        latencies.extend(latency.names().into_iter().zip([time, own].map(groups::micros)));
    }

    /// Counts what a microVM does.
    pub(crate) fn watch(&self, microvm: Handle) {
        let mut inner = self.0.lock();
        inner.microvm = Some(microvm);
        inner.started.notify_one();
    }

    /// Notes what a microVM had done when it ended.
    pub(crate) fn ended(&self, devices: Counters) {
        let mut inner = self.0.lock();
        inner.microvm = None;
        inner.devices = devices;
    }

    /// Notes how long the start of this process took, which ends now.
    pub(crate) fn started(&self, times: StartTimes) {
        let wall = StartTimes::now(ClockId::Monotonic).saturating_sub(times.wall);
        let cpu = StartTimes::now(ClockId::ProcessCPUTime).saturating_sub(times.cpu);
        self.0.lock().startup = [wall, cpu.saturating_add(times.parent_cpu)];
    }

    /// Sets the file.
    pub(crate) fn configure(&self, config: &MetricsConfig) -> Result<(), MetricsError> {
        let mut inner = self.0.lock();
        if inner.file.is_some() {
            return Err(MetricsError::Again);
        }
        let path = &config.metrics_path;
        let file = logger::open_output(path.as_ref());
        let file = file.map_err(|source| MetricsError::Open { path: path.clone(), source })?;
        inner.file = Some(file);
        Ok(())
    }

    /// Flushes when a microVM was started, and every minute from then on. Requests do not wait for
    /// the microVM.
    pub(crate) async fn keep_flushing(self) -> Infallible {
        let started = self.0.lock().started.clone();
        started.notified().await;
        loop {
            let (sender, devices) = oneshot::channel();
            match self.microvm() {
                // It may have ended.
                Some(microvm) => drop(microvm.post(|it| drop(sender.send(it.counters())))),
                None => drop(sender),
            }
            // The next one may succeed.
            let _ = self.write(devices.await.ok());
            tokio::time::sleep(PERIOD).await;
        }
    }

    /// Writes a line, if there is a file.
    pub(crate) fn flush(&self) -> Result<(), MetricsError> {
        let devices = self.microvm().and_then(|microvm| microvm.call(|it| it.counters()).ok());
        self.write(devices)
    }

    /// The microVM, if there is a file for what it counts.
    fn microvm(&self) -> Option<Handle> {
        let inner = self.0.lock();
        inner.file.as_ref().and(inner.microvm.clone())
    }

    /// The same after `devices` were asked, if they answered.
    fn write(&self, devices: Option<Counters>) -> Result<(), MetricsError> {
        let mut inner = self.0.lock();
        // One that has ended in the meantime has left later ones.
        if let Some(devices) = devices.filter(|_| inner.microvm.is_some()) {
            inner.devices = devices;
        }
        if inner.file.is_none() {
            return Ok(());
        }
        let (line, totals) = inner.line();
        let written = inner.write(line.as_bytes());
        match written {
            Ok(()) => inner.flushed = totals,
            Err(_) => inner.failures += 1,
        }
        written.map_err(MetricsError::Write)
    }
}

impl Inner {
    /// Writes a line to the file, if there is one. A pipe may take a part of it, and gets the rest
    /// before the next line.
    fn write(&mut self, line: &[u8]) -> io::Result<()> {
        let Some(mut file) = self.file.as_ref() else { return Ok(()) };
        let rest = std::mem::take(&mut self.rest);
        let written = if rest.is_empty() { 0 } else { file.write(&rest).unwrap_or(0) };
        if written < rest.len() {
            self.rest = rest[written..].to_vec();
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let written = file.write(line)?;
        self.rest = line[written..].to_vec();
        Ok(())
    }

    /// A line, and the counts that it brings the metrics to.
    fn line(&self) -> (String, BTreeMap<Key, u64>) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        let mut line = Map::from_iter([("utc_timestamp_ms".to_owned(), now.into())]);
        let mut totals = BTreeMap::new();
        let since = |total: u64, key: &Key| {
            total.saturating_sub(self.flushed.get(key).copied().unwrap_or(0))
        };
        for group in self.groups() {
            let members = group.to_json(&mut totals, since);
            if let Value::Object(all) = line.entry(group.name).or_insert_with(|| json!({})) {
                all.extend(members);
            }
        }
        (format!("{}\n", Value::from(line)), totals)
    }

    fn groups(&self) -> Vec<Group> {
        let [wall, cpu] = self.startup;
        let api_server = Group::new(
            "api_server",
            &[
                // Requests are carried out by the thread that answers them.
                ("sync_response_fails", 0),
                ("sync_vmm_send_timeout_count", 0),
            ],
        );
        let latencies = Latency::ALL.into_iter().flat_map(Latency::names);
        let latencies =
            latencies.map(|name| (name, self.latencies.get(name).copied().unwrap_or(0)));
        let missed = logger::missed();
        let mut groups = vec![
            api_server.with_values([
                ("process_startup_time_us", wall),
                ("process_startup_time_cpu_us", cpu),
            ]),
            Group::new("latencies_us", &[]).with_values(latencies),
            Group::new(
                "logger",
                &[
                    ("missed_metrics_count", self.failures),
                    ("metrics_fails", self.failures),
                    ("missed_log_count", missed),
                    ("log_fails", missed),
                ],
            ),
            Group::new(
                "deprecated_api",
                &[
                    ("deprecated_http_api_calls", self.deprecated),
                    ("deprecated_cmd_line_api_calls", 0),
                ],
            ),
        ];
        groups.extend(Counter::ALL.map(|counter| {
            let (count, fails) = self.counts.get(&counter).copied().unwrap_or_default();
            Group::of_requests(counter, count, fails)
        }));
        groups.extend(groups::of_microvm(&self.devices, &self.updates));
        groups
    }
}

#[cfg(test)]
mod tests;
