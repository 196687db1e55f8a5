//! Ready clones: microVMs that are restored before their request, as many as are likely to be
//! requested together.

use std::time::{Duration, Instant};

use firn_run::{Making, StartError};
use parking_lot::Mutex;

use super::forecast::Forecast;

/// How long after a request nothing is made: the processors belong to starts.
const PAUSE: Duration = Duration::from_millis(100);

/// The ready clones, at most `bytes` of them. `K` selects a snapshot and how it is thawed, `C` is a
/// clone.
#[derive(Debug)]
pub(crate) struct ReadyClones<K, C> {
    bytes: u64,
    epoch: Instant,
    state: Mutex<State<K, C>>,
    /// Held while clones are made: one at a time.
    making: Mutex<()>,
}

#[derive(Debug)]
struct State<K, C> {
    forecast: Forecast<K>,
    clones: Vec<Ready<K, C>>,
    /// Snapshots of which the last clones had no copy, and how many.
    without_copy: Vec<(K, u32)>,
    last_arrival: Option<Duration>,
    /// Changes whenever a snapshot is forgotten: a clone whose making began before is not kept.
    forgotten: u64,
    closed: bool,
}

#[derive(Debug)]
struct Ready<K, C> {
    key: K,
    clone: C,
    bytes: u64,
}

/// How clones are made.
pub(crate) trait Make<K, C> {
    /// Makes one. Blocks.
    fn make(&self, key: &K) -> Result<(C, Making), StartError>;
}

/// A clone that waits.
pub(crate) trait Waiting {
    /// Whether its process runs.
    fn is_alive(&mut self) -> bool;
}

impl<K: Clone + PartialEq, C: Waiting> ReadyClones<K, C> {
    /// None yet; at most `bytes` later. 0 is never any.
    pub(crate) fn new(bytes: u64) -> Self {
        let state = State {
            forecast: Forecast::default(),
            clones: Vec::new(),
            without_copy: Vec::new(),
            last_arrival: None,
            forgotten: 0,
            closed: false,
        };
        Self { bytes, epoch: Instant::now(), state: Mutex::new(state), making: Mutex::new(()) }
    }

    /// Whether there can be any.
    pub(crate) fn is_on(&self) -> bool {
        self.bytes > 0
    }

    /// Counts a request, and takes a clone for it, if one is ready.
    pub(crate) fn take(&self, key: &K) -> Option<C> {
        // Dropped after the lock is released, because it waits for processes to end.
        let mut ended = Vec::new();
        let mut state = self.state.lock();
        let now = self.epoch.elapsed();
        state.last_arrival = Some(now);
        state.forecast.arrived(key, now);
        while let Some(at) = state.clones.iter().position(|ready| ready.key == *key) {
            let mut ready = state.clones.swap_remove(at);
            if ready.clone.is_alive() {
                return Some(ready.clone);
            }
            ended.push(ready);
        }
        None
    }

    /// Ends the clones that `gone` selects, and keeps none of them until the next request.
    pub(crate) fn forget(&self, gone: impl Fn(&K) -> bool) {
        let mut state = self.state.lock();
        state.forgotten += 1;
        state.forecast.forget(&gone);
        state.without_copy.retain(|(key, _)| !gone(key));
        let ended: Vec<_> = state.clones.extract_if(.., |ready| gone(&ready.key)).collect();
        drop(state);
        // Waits for processes to end.
        drop(ended);
    }

    /// Ends what is not wanted any more, and makes what is missing, until a request comes. Returns
    /// at once if another thread makes clones. A making that fails is tried again after the next
    /// request.
    pub(crate) fn fill(&self, maker: &impl Make<K, C>) {
        let Some(_making) = self.making.try_lock().filter(|_| self.is_on()) else { return };
        loop {
            let (missing, ended, forgotten) = {
                let mut state = self.state.lock();
                let now = self.epoch.elapsed();
                let (missing, ended) = state.compare(now, self.bytes);
                let busy = state.last_arrival.is_some_and(|last| now - last < PAUSE);
                let missing = missing.filter(|_| !busy && !state.closed);
                (missing, ended, state.forgotten)
            };
            drop(ended);
            let Some(key) = missing else { return };
            let made = maker.make(&key);
            let mut state = self.state.lock();
            match made {
                // The snapshot may be another one by now, or all clones have been ended.
                _ if state.forgotten != forgotten || state.closed => {}
                Ok((clone, making)) => {
                    state.forecast.measured(&key, making.dram_bytes);
                    if state.lacks_copy(&key, &making) {
                        // The pool's manager makes one until the next call.
                        drop(state);
                        drop(clone);
                        return;
                    }
                    state.clones.push(Ready { key, clone, bytes: making.dram_bytes });
                }
                Err(error) => {
                    let error: &dyn std::error::Error = &error;
                    tracing::warn!(error, "cannot make a ready clone");
                    // Until its next request, so that the others have theirs.
                    state.forecast.forget(|failed| *failed == key);
                }
            }
        }
    }

    /// Ends all clones; no more are made.
    pub(crate) fn end(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        let clones = std::mem::take(&mut state.clones);
        drop(state);
        drop(clones);
    }

    /// The number of clones, and their bytes.
    pub(crate) fn usage(&self) -> (usize, u64) {
        let state = self.state.lock();
        (state.clones.len(), state.clones.iter().map(|ready| ready.bytes).sum())
    }
}

impl<K: Clone + PartialEq, C: Waiting> State<K, C> {
    /// A snapshot that lacks a clone, and the clones that are to end: those that have ended by
    /// themselves, and those that are not wanted.
    fn compare(&mut self, now: Duration, bytes: u64) -> (Option<K>, Vec<Ready<K, C>>) {
        let mut wanted = self.forecast.wanted(now, bytes);
        let unwanted = |ready: &mut Ready<K, C>| {
            let room = wanted.iter_mut().find(|(key, count)| *key == ready.key && *count > 0);
            match room {
                Some((_, count)) if ready.clone.is_alive() => {
                    *count -= 1;
                    false
                }
                _ => true,
            }
        };
        let ended = self.clones.extract_if(.., unwanted).collect();
        let missing = wanted.into_iter().find(|(_, count)| *count > 0).map(|(key, _)| key);
        (missing, ended)
    }

    /// Whether a clone is not kept, because it has no copy and the next one may have one.
    fn lacks_copy(&mut self, key: &K, making: &Making) -> bool {
        let before = self.without_copy.iter_mut().find(|(found, _)| found == key);
        if making.no_copy.is_none() {
            self.without_copy.retain(|(found, _)| found != key);
            return false;
        }
        match before {
            Some((_, count)) => {
                *count += 1;
                *count < Making::LIMIT
            }
            None => {
                self.without_copy.push((key.clone(), 1));
                true
            }
        }
    }
}

#[cfg(test)]
#[path = "ready_tests.rs"]
mod tests;
