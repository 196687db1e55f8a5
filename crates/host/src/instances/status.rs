//! What the daemon is doing, as one document: for `firn top`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::fleet::Fleet;
use super::members::Doing;

/// What a daemon is doing.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DaemonStatus {
    /// How long it has been running, ns.
    pub uptime_ns: u64,
    /// DRAM.
    pub memory: MemoryStatus,
    /// Processes.
    pub monitors: MonitorsStatus,
    /// Requests that wait for a microVM.
    pub queued: usize,
    /// Versions with microVMs, or with requests in the last ten minutes, by name.
    pub versions: Vec<VersionStatus>,
}

/// DRAM of all microVMs together, in bytes.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct MemoryStatus {
    /// What they may take.
    pub limit: u64,
    /// What they are booked for that is each one's own.
    pub private_booked: u64,
    /// What they are booked for that is shared.
    pub shared_booked: u64,
    /// What they take that is each one's own, as measured within the last second.
    pub private: u64,
    /// What they take that is shared, as measured: once for each version.
    pub shared: u64,
}

/// Processes that run microVMs.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct MonitorsStatus {
    /// How many there may be.
    pub limit: usize,
    /// How many there are, those that start and end included.
    pub running: usize,
    /// Those that are started and empty; they count towards no limit.
    pub standby: usize,
}

/// One version of a function.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct VersionStatus {
    /// The function.
    pub function: String,
    /// `$LATEST`, or a number.
    pub version: String,
    /// MicroVMs that boot or thaw.
    pub starting: usize,
    /// MicroVMs that are made to be frozen.
    pub publishing: usize,
    /// MicroVMs that serve a request.
    pub busy: usize,
    /// MicroVMs that wait for one.
    pub idle: usize,
    /// MicroVMs that end.
    pub ending: usize,
    /// DRAM of its microVMs that is each one's own, bytes.
    pub private: u64,
    /// DRAM that its microVMs share, bytes.
    pub shared: u64,
    /// Requests that have ended.
    pub requests: u64,
    /// Requests whose function failed.
    pub function_errors: u64,
    /// Requests that were turned away.
    pub throttled: u64,
    /// Requests that failed for another reason.
    pub failed: u64,
    /// Requests for which a microVM was booted.
    pub cold: u64,
    /// Requests for which one was thawed.
    pub thawed: u64,
    /// Requests that found one.
    pub warm: u64,
    /// Request in to answer out, of the last 256 requests, by `cold`, `thawed` and `warm`.
    pub latency: BTreeMap<String, Latency>,
}

/// How long requests took.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Latency {
    /// Of how many.
    pub count: usize,
    /// The median, ns.
    pub p50_ns: u64,
    /// What 99 of 100 did not exceed, ns.
    pub p99_ns: u64,
}

impl VersionStatus {
    fn of(function: &str, version: &str) -> Self {
        Self {
            function: function.to_owned(),
            version: version.to_owned(),
            starting: 0,
            publishing: 0,
            busy: 0,
            idle: 0,
            ending: 0,
            private: 0,
            shared: 0,
            requests: 0,
            function_errors: 0,
            throttled: 0,
            failed: 0,
            cold: 0,
            thawed: 0,
            warm: 0,
            latency: BTreeMap::new(),
        }
    }
}

impl Fleet {
    /// What is going on.
    pub(crate) fn status(&self) -> DaemonStatus {
        let state = self.lock();
        let mut versions: BTreeMap<(&str, &str, Uuid), VersionStatus> = BTreeMap::new();
        for member in state.members.iter() {
            let key = (member.function.as_str(), member.version.as_str(), member.revision);
            let status = versions.entry(key).or_insert_with(|| VersionStatus::of(key.0, key.1));
            *match member.doing {
                Doing::Starting => &mut status.starting,
                Doing::Publishing => &mut status.publishing,
                Doing::Busy => &mut status.busy,
                Doing::Idle => &mut status.idle,
                Doing::Ending => &mut status.ending,
            } += 1;
            status.private += member.usage.private;
            status.shared = status.shared.max(member.usage.shared);
        }
        for (revision, tally) in state.tallies.iter() {
            let key = (tally.function.as_str(), tally.version.as_str(), *revision);
            let status = versions.entry(key).or_insert_with(|| VersionStatus::of(key.0, key.1));
            let counts = tally.counts;
            status.requests = counts.requests;
            status.function_errors = counts.function_errors;
            status.throttled = counts.throttled;
            status.failed = counts.failed;
            (status.cold, status.thawed, status.warm) = (counts.cold, counts.thawed, counts.warm);
            status.latency = tally.latencies();
        }
        let versions: Vec<VersionStatus> = versions.into_values().collect();
        DaemonStatus {
            uptime_ns: firn_base::ns_since(self.begun),
            memory: MemoryStatus {
                limit: self.limits.memory,
                private_booked: state.ledger.private_bytes(),
                shared_booked: state.ledger.shared_bytes(),
                private: versions.iter().map(|version| version.private).sum(),
                shared: versions.iter().map(|version| version.shared).sum(),
            },
            monitors: MonitorsStatus {
                limit: self.limits.monitors,
                running: state.ledger.monitors(),
                standby: self.launcher.standbys.len(),
            },
            queued: state.waiting.len(),
            versions,
        }
    }
}
