//! How many ready clones of each snapshot to keep: a forecast from arrivals.
//!
//! A snapshot's *peak* is the largest number of requests that needed a new microVM within one
//! [`WINDOW`]: that many are likely to be needed together again. It halves in each [`HALF_LIFE`]
//! without such a burst. The clones of all snapshots share a number of bytes, which goes to the
//! clones of the largest value: the arrivals of the snapshot, halved at the same pace, times the
//! likelihood that a burst reaches this clone, for each byte that it takes.

use std::collections::VecDeque;
use std::time::Duration;

/// Arrivals within this time count as a burst: a start that comes later can use what was made in
/// the place of an earlier one.
pub(crate) const WINDOW: Duration = Duration::from_secs(1);
/// The time in which a forecast halves.
pub(crate) const HALF_LIFE: Duration = Duration::from_secs(600);
/// Bytes of a clone of a snapshot of which none was made so far.
pub(crate) const EXPECTED_BYTES: u64 = 16 << 20;
/// A forecast below this is none. One arrival counts for three half-lives.
const LEAST: f64 = 0.125;
/// Arrivals that are remembered of one window.
const MAX_BURST: usize = 1024;

/// The arrivals of each snapshot, by a key. Times are of any clock that does not go back.
#[derive(Debug)]
pub(crate) struct Forecast<K> {
    snapshots: Vec<Snapshot<K>>,
}

#[derive(Debug)]
struct Snapshot<K> {
    key: K,
    /// The arrivals of the last window, oldest first.
    recent: VecDeque<Duration>,
    peak: Decaying,
    arrivals: Decaying,
    /// Bytes of a clone.
    bytes: u64,
}

/// A number that halves in each half-life.
#[derive(Debug, Clone, Copy, Default)]
struct Decaying {
    value: f64,
    at: Duration,
}

impl Decaying {
    fn now(self, now: Duration) -> f64 {
        let elapsed = now.saturating_sub(self.at);
        self.value * (-elapsed.div_duration_f64(HALF_LIFE)).exp2()
    }

    fn set(&mut self, value: f64, now: Duration) {
        *self = Self { value, at: now };
    }
}

impl<K> Default for Forecast<K> {
    fn default() -> Self {
        Self { snapshots: Vec::new() }
    }
}

impl<K: Clone + PartialEq> Forecast<K> {
    /// Counts a request that needs a new microVM of a snapshot.
    pub(crate) fn arrived(&mut self, key: &K, now: Duration) {
        let at = self.snapshots.iter().position(|snapshot| snapshot.key == *key);
        let at = at.unwrap_or_else(|| {
            self.snapshots.push(Snapshot {
                key: key.clone(),
                recent: VecDeque::new(),
                peak: Decaying::default(),
                arrivals: Decaying::default(),
                bytes: EXPECTED_BYTES,
            });
            self.snapshots.len() - 1
        });
        let snapshot = &mut self.snapshots[at];
        snapshot.recent.push_back(now);
        let old = |first: &Duration| now.saturating_sub(*first) >= WINDOW;
        while snapshot.recent.len() > MAX_BURST || snapshot.recent.front().is_some_and(old) {
            snapshot.recent.pop_front();
        }
        let burst = snapshot.recent.len() as f64;
        snapshot.peak.set(snapshot.peak.now(now).max(burst), now);
        snapshot.arrivals.set(snapshot.arrivals.now(now) + 1.0, now);
    }

    /// Records what a clone takes.
    pub(crate) fn measured(&mut self, key: &K, bytes: u64) {
        let mut snapshots = self.snapshots.iter_mut();
        if let Some(snapshot) = snapshots.find(|snapshot| snapshot.key == *key) {
            snapshot.bytes = bytes;
        }
    }

    /// Forgets the snapshots that `gone` selects.
    pub(crate) fn forget(&mut self, gone: impl Fn(&K) -> bool) {
        self.snapshots.retain(|snapshot| !gone(&snapshot.key));
    }

    /// The number of clones to keep of each snapshot, in at most `budget` bytes together, the most
    /// valuable first. Forgets snapshots whose forecast has decayed.
    pub(crate) fn wanted(&mut self, now: Duration, budget: u64) -> Vec<(K, usize)> {
        self.snapshots.retain(|snapshot| snapshot.peak.now(now) >= LEAST);
        // The value for a byte of each clone: the first of a snapshot is the likeliest to be used.
        let mut clones: Vec<(f64, usize)> = Vec::new();
        for (at, snapshot) in self.snapshots.iter().enumerate() {
            let (peak, arrivals) = (snapshot.peak.now(now), snapshot.arrivals.now(now));
            let density = arrivals / snapshot.bytes.max(1) as f64;
            // The smallest number of at least the peak: a decayed peak of 1.2 keeps two.
            let before = (0u32..).map(f64::from).take_while(|before| *before < peak);
            clones.extend(before.map(|before| (density * (1.0 - before / peak), at)));
        }
        // Stable: of equal values the snapshot that came first.
        clones.sort_by(|(a, _), (b, _)| b.total_cmp(a));
        let mut counts: Vec<(usize, usize)> = Vec::new();
        let mut rest = budget;
        for (_, at) in clones {
            let Some(left) = rest.checked_sub(self.snapshots[at].bytes) else { continue };
            rest = left;
            match counts.iter_mut().find(|(found, _)| *found == at) {
                Some((_, count)) => *count += 1,
                None => counts.push((at, 1)),
            }
        }
        counts.into_iter().map(|(at, count)| (self.snapshots[at].key.clone(), count)).collect()
    }
}

#[cfg(test)]
#[path = "forecast_tests.rs"]
mod tests;
