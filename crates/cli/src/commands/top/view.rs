//! The displayed values: a daemon's status, and its rates since the previous status.

use std::time::Instant;

use serde::Serialize;

use firn_base::{format_bytes, format_milliseconds};
use firn_control::{DaemonStatus, VersionStatus};

use crate::output::table;

/// The columns of the table.
pub(super) const HEAD: [&str; 15] = [
    "function",
    "version",
    "start",
    "busy",
    "idle",
    "req/s",
    "cold",
    "thawed",
    "warm",
    "errors",
    "429",
    "p50 thawed",
    "p50 warm",
    "private",
    "shared",
];

/// The difference of two statuses of a daemon.
#[derive(Debug, Serialize)]
pub(super) struct View {
    endpoint: String,
    /// Finished requests per second of all versions.
    requests_per_second: f64,
    #[serde(flatten)]
    status: DaemonStatus,
    /// Finished requests per second of each version, in the order of `versions`.
    version_requests_per_second: Vec<f64>,
}

impl View {
    /// The view of `status`, with rates since `before`.
    pub(super) fn of(
        endpoint: &str,
        before: Option<&(DaemonStatus, Instant)>,
        status: DaemonStatus,
    ) -> Self {
        let seconds = before.map_or(1.0, |(_, at)| at.elapsed().as_secs_f64());
        let earlier = |version: &VersionStatus| {
            let Some((before, _)) = before else { return version.requests };
            let same = |old: &&VersionStatus| {
                (&old.function, &old.version) == (&version.function, &version.version)
            };
            before.versions.iter().find(same).map_or(0, |old| old.requests)
        };
        let rate = |version: &VersionStatus| {
            // The counters of a restarted daemon start at zero.
            let count = version.requests.saturating_sub(earlier(version));
            f64::from(u32::try_from(count).unwrap_or(u32::MAX)) / seconds.max(1e-3)
        };
        let rates: Vec<f64> = status.versions.iter().map(rate).collect();
        Self {
            endpoint: endpoint.to_owned(),
            requests_per_second: rates.iter().sum(),
            status,
            version_requests_per_second: rates,
        }
    }

    /// A summary of the daemon, in two lines.
    pub(super) fn summary(&self) -> [String; 2] {
        let DaemonStatus { uptime_ns, memory, monitors, queued, .. } = &self.status;
        let seconds = uptime_ns / 1_000_000_000;
        [
            format!(
                "firn at {}, up {}:{:02}:{:02}; {:.1} requests/s, {queued} waiting; {} of {} microVMs, {} standby monitors",
                self.endpoint,
                seconds / 3600,
                seconds / 60 % 60,
                seconds % 60,
                self.requests_per_second,
                monitors.running,
                monitors.limit,
                monitors.standby,
            ),
            format!(
                "DRAM: {} private, {} shared; reserved {} private and {} shared, of {}",
                format_bytes(memory.private),
                format_bytes(memory.shared),
                format_bytes(memory.private_reserved),
                format_bytes(memory.shared_reserved),
                format_bytes(memory.limit),
            ),
        ]
    }

    /// The rows of the table, busiest version first.
    pub(super) fn rows(&self) -> Vec<Vec<String>> {
        let rates = &self.version_requests_per_second;
        let mut versions: Vec<_> = self.status.versions.iter().zip(rates).collect();
        versions.sort_by(|(_, one), (_, other)| other.total_cmp(one));
        versions.into_iter().map(|(version, rate)| row(version, *rate)).collect()
    }

    /// Summary and table as text.
    pub(super) fn text(&self) -> String {
        let [first, second] = self.summary();
        format!("{first}\n{second}\n{}", table(&HEAD, &self.rows()))
    }
}

fn row(version: &VersionStatus, rate: f64) -> Vec<String> {
    let median = |start: &str| {
        version
            .latency
            .get(start)
            .map(|latency| format_milliseconds(latency.p50_ns))
            .unwrap_or_default()
    };
    vec![
        version.function.clone(),
        version.version.clone(),
        (version.starting + version.publishing).to_string(),
        version.busy.to_string(),
        version.idle.to_string(),
        format!("{rate:.1}"),
        version.cold.to_string(),
        version.thawed.to_string(),
        version.warm.to_string(),
        (version.function_errors + version.failed).to_string(),
        version.throttled.to_string(),
        median("thawed"),
        median("warm"),
        format_bytes(version.private),
        format_bytes(version.shared),
    ]
}

#[cfg(test)]
#[path = "view_tests.rs"]
mod tests;
