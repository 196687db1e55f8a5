//! Counts and latencies of recent requests per revision, for the status document.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::status::Latency;
use crate::functions::Version;
use crate::metrics::{Outcome, StartKind};

/// The number of requests whose latencies are kept per revision.
const RECENT: usize = 256;

/// How long a revision is kept after its last request.
const RETENTION: Duration = Duration::from_secs(600);

/// Statistics by revision.
#[derive(Debug, Default)]
pub(super) struct RequestStats(HashMap<Uuid, RevisionStats>);

/// Requests of one revision.
#[derive(Debug)]
pub(super) struct RevisionStats {
    pub(super) function: String,
    pub(super) version: String,
    pub(super) counts: Counts,
    recent: VecDeque<(StartKind, u64)>,
    last: Instant,
}

/// Numbers of requests, by outcome and by the way they got a microVM.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Counts {
    pub(super) requests: u64,
    pub(super) function_errors: u64,
    pub(super) throttled: u64,
    pub(super) failed: u64,
    pub(super) cold: u64,
    pub(super) thawed: u64,
    pub(super) warm: u64,
}

impl RequestStats {
    /// Counts a request that has ended. `latency` is how it got a microVM, and its latency in ns.
    pub(super) fn count(
        &mut self,
        version: &Version,
        outcome: Outcome,
        latency: Option<(StartKind, u64)>,
    ) {
        let stats = self.0.entry(version.revision).or_insert_with(|| RevisionStats {
            function: version.function.clone(),
            version: version.version.clone(),
            counts: Counts::default(),
            recent: VecDeque::new(),
            last: Instant::now(),
        });
        stats.last = Instant::now();
        let counts = &mut stats.counts;
        counts.requests += 1;
        match outcome {
            Outcome::answered => {}
            Outcome::function_error => counts.function_errors += 1,
            Outcome::throttled => counts.throttled += 1,
            Outcome::failed => counts.failed += 1,
        }
        if let Some((start, ns)) = latency {
            match start {
                StartKind::cold => counts.cold += 1,
                StartKind::thawed => counts.thawed += 1,
                StartKind::warm => counts.warm += 1,
            }
            stats.recent.push_back((start, ns));
            if stats.recent.len() > RECENT {
                stats.recent.pop_front();
            }
        }
    }

    /// Drops revisions without recent requests.
    pub(super) fn sweep(&mut self) {
        self.0.retain(|_, stats| stats.last.elapsed() < RETENTION);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&Uuid, &RevisionStats)> {
        self.0.iter()
    }
}

impl RevisionStats {
    /// Latencies by the way the requests got a microVM.
    pub(super) fn latencies(&self) -> BTreeMap<String, Latency> {
        let mut sorted: BTreeMap<&'static str, Vec<u64>> = BTreeMap::new();
        for (start, ns) in &self.recent {
            sorted.entry(start.name()).or_default().push(*ns);
        }
        let latency = |(name, ns): (&str, Vec<u64>)| Some((name.to_owned(), latency(ns)?));
        sorted.into_iter().filter_map(latency).collect()
    }
}

/// The median and the 99th percentile, by the nearest-rank method.
fn latency(mut ns: Vec<u64>) -> Option<Latency> {
    ns.sort_unstable();
    let rank = |percent: usize| ns.get((ns.len() * percent).div_ceil(100).checked_sub(1)?).copied();
    Some(Latency { count: ns.len(), p50_ns: rank(50)?, p99_ns: rank(99)? })
}

#[cfg(test)]
#[path = "request_stats_tests.rs"]
mod tests;
