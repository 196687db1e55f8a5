//! What versions' requests came to lately, for people who watch.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::status::Latency;
use crate::functions::Version;
use crate::metrics::{Ending, StartKind};

/// How many of the last requests latencies are told of.
const RECENT: usize = 256;

/// How long a version is told of after its last request.
const LINGER: Duration = Duration::from_secs(600);

/// By revision.
#[derive(Debug, Default)]
pub(super) struct Tallies(HashMap<Uuid, Tally>);

/// One version's requests.
#[derive(Debug)]
pub(super) struct Tally {
    pub(super) function: String,
    pub(super) version: String,
    pub(super) counts: Counts,
    recent: VecDeque<(StartKind, u64)>,
    last: Instant,
}

/// Requests, by what became of them and by how they found a microVM.
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

impl Tallies {
    /// Counts a request that has ended: how it found a microVM, and how long it took.
    pub(super) fn count(
        &mut self,
        version: &Version,
        ending: Ending,
        taken: Option<(StartKind, u64)>,
    ) {
        let tally = self.0.entry(version.revision).or_insert_with(|| Tally {
            function: version.function.clone(),
            version: version.version.clone(),
            counts: Counts::default(),
            recent: VecDeque::new(),
            last: Instant::now(),
        });
        tally.last = Instant::now();
        let counts = &mut tally.counts;
        counts.requests += 1;
        match ending {
            Ending::answered => {}
            Ending::function_error => counts.function_errors += 1,
            Ending::throttled => counts.throttled += 1,
            Ending::failed => counts.failed += 1,
        }
        if let Some((start, ns)) = taken {
            match start {
                StartKind::cold => counts.cold += 1,
                StartKind::thawed => counts.thawed += 1,
                StartKind::warm => counts.warm += 1,
            }
            tally.recent.push_back((start, ns));
            if tally.recent.len() > RECENT {
                tally.recent.pop_front();
            }
        }
    }

    /// Forgets versions that nobody asked for lately.
    pub(super) fn sweep(&mut self) {
        self.0.retain(|_, tally| tally.last.elapsed() < LINGER);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&Uuid, &Tally)> {
        self.0.iter()
    }
}

impl Tally {
    /// Latencies by how the requests found a microVM.
    pub(super) fn latencies(&self) -> BTreeMap<String, Latency> {
        let mut sorted: BTreeMap<&'static str, Vec<u64>> = BTreeMap::new();
        for (start, ns) in &self.recent {
            sorted.entry(start.name()).or_default().push(*ns);
        }
        let latency = |(name, ns): (&str, Vec<u64>)| Some((name.to_owned(), latency(ns)?));
        sorted.into_iter().filter_map(latency).collect()
    }
}

/// The smallest values that half, and 99 of 100, are not above.
fn latency(mut ns: Vec<u64>) -> Option<Latency> {
    ns.sort_unstable();
    let rank = |percent: usize| ns.get((ns.len() * percent).div_ceil(100).checked_sub(1)?).copied();
    Some(Latency { count: ns.len(), p50_ns: rank(50)?, p99_ns: rank(99)? })
}

#[cfg(test)]
#[path = "tally_tests.rs"]
mod tests;
