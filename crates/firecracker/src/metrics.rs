//! Metrics: a line of JSON at each flush, to the file or named pipe of the configuration.
//!
//! They have Firecracker's names, and values of this process; what firn does not count is absent.
//! Counts are those since the last flush, times are the last ones. They are flushed every minute,
//! on request and at the end.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use thiserror::Error;

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

/// What is counted of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the names of the requests")]
pub(crate) enum Counter {
    GetInstance,
    GetVersion,
    GetMachineConfig,
    GetMmds,
    PutActions,
    PutBootSource,
    PutDrive,
    PutLogger,
    PutMachineConfig,
    PutMetrics,
    PutNetwork,
    PutMmds,
    PutVsock,
    PutSerial,
    PatchDrive,
    PatchNetwork,
    PatchMachineConfig,
    PatchMmds,
}

impl Counter {
    /// Its group, and its name there.
    const fn place(self) -> (&'static str, &'static str) {
        match self {
            Self::GetInstance => ("get_api_requests", "instance_info"),
            Self::GetVersion => ("get_api_requests", "vmm_version"),
            Self::GetMachineConfig => ("get_api_requests", "machine_cfg"),
            Self::GetMmds => ("get_api_requests", "mmds"),
            Self::PutActions => ("put_api_requests", "actions"),
            Self::PutBootSource => ("put_api_requests", "boot_source"),
            Self::PutDrive => ("put_api_requests", "drive"),
            Self::PutLogger => ("put_api_requests", "logger"),
            Self::PutMachineConfig => ("put_api_requests", "machine_cfg"),
            Self::PutMetrics => ("put_api_requests", "metrics"),
            Self::PutNetwork => ("put_api_requests", "network"),
            Self::PutMmds => ("put_api_requests", "mmds"),
            Self::PutVsock => ("put_api_requests", "vsock"),
            Self::PutSerial => ("put_api_requests", "serial"),
            Self::PatchDrive => ("patch_api_requests", "drive"),
            Self::PatchNetwork => ("patch_api_requests", "network"),
            Self::PatchMachineConfig => ("patch_api_requests", "machine_cfg"),
            Self::PatchMmds => ("patch_api_requests", "mmds"),
        }
    }

    const ALL: [Self; 18] = [
        Self::GetInstance,
        Self::GetVersion,
        Self::GetMachineConfig,
        Self::GetMmds,
        Self::PutActions,
        Self::PutBootSource,
        Self::PutDrive,
        Self::PutLogger,
        Self::PutMachineConfig,
        Self::PutMetrics,
        Self::PutNetwork,
        Self::PutMmds,
        Self::PutVsock,
        Self::PutSerial,
        Self::PatchDrive,
        Self::PatchNetwork,
        Self::PatchMachineConfig,
        Self::PatchMmds,
    ];
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
    const fn name(self) -> &'static str {
        match self {
            Self::FullCreateSnapshot => "full_create_snapshot",
            Self::DiffCreateSnapshot => "diff_create_snapshot",
            Self::LoadSnapshot => "load_snapshot",
            Self::PauseVm => "pause_vm",
            Self::ResumeVm => "resume_vm",
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

/// The times that the process which started this one passed on, µs.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StartTimes {
    /// CLOCK_MONOTONIC, when it began.
    pub(crate) wall: Option<u64>,
    /// CLOCK_PROCESS_CPUTIME_ID, when it began.
    pub(crate) cpu: Option<u64>,
    /// CPU time that it used.
    pub(crate) parent_cpu: Option<u64>,
}

/// The metrics of this process. All clones are the same.
#[derive(Clone, Default)]
pub(crate) struct Metrics(Arc<Mutex<Inner>>);

#[derive(Default)]
struct Inner {
    file: Option<File>,
    /// Requests, and those that failed.
    counts: BTreeMap<Counter, (u64, u64)>,
    latencies: BTreeMap<&'static str, u64>,
    startup: Map<String, Value>,
}

impl Metrics {
    /// Counts a request.
    pub(crate) fn count(&self, counter: Counter, failed: bool) {
        let mut inner = self.0.lock();
        let (count, fails) = inner.counts.entry(counter).or_default();
        *count += 1;
        *fails += u64::from(failed);
    }

    /// Notes how long something took.
    pub(crate) fn took(&self, latency: Latency, time: Duration) {
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.0.lock().latencies.insert(latency.name(), us);
    }

    /// Notes how long the start of this process took, which ends now.
    pub(crate) fn started(&self, times: StartTimes) {
        let now = |clock| {
            let time = clock_gettime(clock);
            let us = time.tv_sec.saturating_mul(1_000_000).saturating_add(time.tv_nsec / 1000);
            u64::try_from(us).unwrap_or_default()
        };
        let mut inner = self.0.lock();
        if let Some(began) = times.wall {
            let us = now(ClockId::Monotonic).saturating_sub(began);
            inner.startup.insert("process_startup_time_us".to_owned(), us.into());
        }
        if let Some(began) = times.cpu {
            let own = now(ClockId::ProcessCPUTime).saturating_sub(began);
            let us = own.saturating_add(times.parent_cpu.unwrap_or_default());
            inner.startup.insert("process_startup_time_cpu_us".to_owned(), us.into());
        }
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

    /// Flushes every minute.
    pub(crate) async fn keep_flushing(self) -> Infallible {
        loop {
            tokio::time::sleep(PERIOD).await;
            // The next one may succeed.
            let _ = self.flush();
        }
    }

    /// Writes a line, if there is a file.
    pub(crate) fn flush(&self) -> Result<(), MetricsError> {
        let mut inner = self.0.lock();
        let Some(mut file) = inner.file.as_ref() else { return Ok(()) };
        let line = format!("{}\n", inner.line());
        file.write_all(line.as_bytes()).map_err(MetricsError::Write)?;
        inner.counts.clear();
        Ok(())
    }
}

impl Inner {
    fn line(&self) -> Value {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        let mut line = Map::from_iter([("utc_timestamp_ms".to_owned(), now.into())]);
        line.insert("api_server".to_owned(), self.startup.clone().into());
        for counter in Counter::ALL {
            let (group, name) = counter.place();
            let (count, fails) = self.counts.get(&counter).copied().unwrap_or_default();
            let group = line.entry(group).or_insert_with(|| json!({}));
            group[format!("{name}_count")] = count.into();
            if counter >= Counter::PutActions {
                group[format!("{name}_fails")] = fails.into();
            }
        }
        line.insert("latencies_us".to_owned(), json!(self.latencies));
        line.insert("logger".to_owned(), json!({ "missed_log_count": logger::take_missed() }));
        line.into()
    }
}
