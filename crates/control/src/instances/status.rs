//! The daemon's status document, which `firn top` displays.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The status of a daemon.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DaemonStatus {
    /// Time since the daemon started, ns.
    pub uptime_ns: u64,
    /// Memory of all microVMs.
    pub memory: MemoryStatus,
    /// Processes that run microVMs.
    pub monitors: MonitorsStatus,
    /// Requests that wait for a microVM.
    pub queued: usize,
    /// Versions with microVMs, or with requests in the last ten minutes, sorted by name.
    pub versions: Vec<VersionStatus>,
}

/// Memory (DRAM) of all microVMs together, bytes.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct MemoryStatus {
    /// The limit.
    pub limit: u64,
    /// Reserved memory that microVMs do not share.
    #[serde(rename = "private_booked")]
    pub private_reserved: u64,
    /// Reserved memory that microVMs share.
    #[serde(rename = "shared_booked")]
    pub shared_reserved: u64,
    /// Used memory that microVMs do not share, measured within the last second.
    pub private: u64,
    /// Used memory that microVMs share, counted once per version.
    pub shared: u64,
}

/// Processes that run microVMs.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct MonitorsStatus {
    /// The limit.
    pub limit: usize,
    /// Running processes, including those that start or end.
    pub running: usize,
    /// Standby processes, which do not count towards the limit.
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
    /// MicroVMs that boot to be frozen.
    pub publishing: usize,
    /// MicroVMs that serve a request.
    pub busy: usize,
    /// MicroVMs that wait for a request.
    pub idle: usize,
    /// MicroVMs that end.
    pub ending: usize,
    /// Memory that its microVMs do not share, bytes.
    pub private: u64,
    /// Memory that its microVMs share, bytes.
    pub shared: u64,
    /// Requests that have ended.
    pub requests: u64,
    /// Requests whose function failed.
    pub function_errors: u64,
    /// Requests that the daemon refused for lack of capacity.
    pub throttled: u64,
    /// Requests that failed in the daemon.
    pub failed: u64,
    /// Requests that booted a microVM.
    pub cold: u64,
    /// Requests that thawed a microVM.
    pub thawed: u64,
    /// Requests that found an idle microVM.
    pub warm: u64,
    /// Latency of the last 256 requests, from arrival to answer; the keys are `cold`, `thawed` and
    /// `warm`.
    pub latency: BTreeMap<String, Latency>,
}

/// A distribution of latencies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Latency {
    /// The number of requests.
    pub count: usize,
    /// The median, ns.
    pub p50_ns: u64,
    /// The 99th percentile, ns.
    pub p99_ns: u64,
}

impl VersionStatus {
    pub(super) fn new(function: &str, version: &str) -> Self {
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
