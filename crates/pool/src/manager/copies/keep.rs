//! Copy sets last: they are stored in the annexes of their snapshots, and read back by the next
//! manager.
//!
//! A background thread stores the sets that changed, soon after the first change and then at most
//! every ten seconds; the manager stores all of them when it ends. A manager that is killed loses
//! what was learnt since. Nothing waits for a store, and a store that fails loses the prediction,
//! not the snapshot.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use firn_base::{PAGE_SIZE, PageRange};

use super::{Copies, CopySet, Key, Shared, State};
use crate::learnt::{self, Learnt, LearntSet};
use crate::pool::{ListedExtent, Pin, Role, read_annex};
use crate::runs::normal;

/// Minimum time between two stores.
const INTERVAL: Duration = Duration::from_secs(10);

impl Copies {
    /// Makes copies of the stored sets of all snapshots, as far as the arena has room: those of the
    /// snapshots that were started last.
    pub(in super::super) fn prepare(&self) {
        for name in self.shared.pool.names() {
            if let Ok(pin) = self.shared.pool.pin(&name) {
                self.shared.recall(&pin);
            }
        }
        let mut state = self.shared.state();
        let unused = state.sets.iter().filter(|(_, set)| set.requested == 0);
        let mut unused: Vec<(u64, Key)> =
            unused.map(|(key, set)| (set.last_start, key.clone())).collect();
        unused.sort_unstable();
        for (_, key) in unused {
            state.now += 1;
            let now = state.now;
            if let Some(set) = state.sets.get_mut(&key) {
                set.requested = now;
            }
        }
        self.shared.wake(state);
    }

    /// Stores all sets that differ from what is stored.
    pub(in super::super) fn store_all(&self) {
        let all = self.shared.state().sets.keys().map(|(generation, _)| *generation).collect();
        self.shared.store(all);
    }

    /// What is learnt about a listed snapshot.
    pub(in super::super) fn learnt(&self, listed: &ListedExtent) -> Vec<Learnt> {
        if listed.role != Role::Snapshot {
            return Vec::new();
        }
        let known = self.shared.state().learnt(listed.extent.generation);
        let sets = known.map(|(_, sets)| sets).unwrap_or_else(|| {
            let (medium, pool) = (self.shared.pool.shared_medium(), self.shared.pool.facts().uuid);
            let stored = read_annex(&*medium, pool, &listed.extent);
            stored.map(|content| learnt::decode(&content)).unwrap_or_default()
        });
        sets.into_iter().map(LearntSet::listed).collect()
    }
}

impl Shared {
    /// Reads the stored sets of a pinned snapshot, once.
    pub(super) fn recall(&self, pin: &Pin) {
        let generation = pin.extent().generation;
        if self.state().recalled.contains(&generation) {
            return;
        }
        let stored = pin.annex().map(|content| learnt::decode(&content)).unwrap_or_default();
        let mut state = self.state();
        state.recalled.insert(generation);
        for LearntSet { key, runs, state: client, starts, last_start } in stored {
            let key = (generation, key);
            // Another start may have read it, too, and changed it.
            if state.sets.contains_key(&key) {
                continue;
            }
            state.make_room_for_set();
            state.now += 1;
            let set = CopySet {
                name: pin.name().to_owned(),
                runs: within(pin, runs),
                state: client,
                revision: state.now,
                starts,
                last_start,
                ..CopySet::default()
            };
            state.sets.insert(key, set);
        }
    }

    /// Stores the sets of snapshots, by generation, where they differ from what is stored.
    fn store(&self, generations: BTreeSet<u64>) {
        let _one = self.storing.lock();
        for generation in generations {
            let Some((name, sets)) = self.state().learnt(generation) else { continue };
            let pin = self.pool.pin(&name).ok();
            let Some(pin) = pin.filter(|pin| pin.extent().generation == generation) else {
                continue;
            };
            let content = learnt::encode(&sets);
            if pin.annex().as_ref() != Some(&content) {
                // The medium failed. The next start learns anew; the next transition reports it.
                let _ = pin.set_annex(&content);
            }
        }
    }
}

impl State {
    /// The name and the sets of a snapshot, the last requested first; `None` if it has none.
    fn learnt(&self, generation: u64) -> Option<(String, Vec<LearntSet>)> {
        let mut sets: Vec<_> = self.sets.iter().filter(|(key, _)| key.0 == generation).collect();
        sets.sort_unstable_by_key(|(key, set)| (std::cmp::Reverse(set.requested), &key.1));
        let name = sets.first()?.1.name.clone();
        let learnt = sets.into_iter().map(|(key, set)| LearntSet {
            key: key.1.clone(),
            runs: set.runs.clone(),
            state: set.state.clone(),
            starts: set.starts,
            last_start: set.last_start,
        });
        Some((name, learnt.collect()))
    }
}

/// The pages of a snapshot's guest memory.
pub(super) fn within(pin: &Pin, runs: Vec<PageRange>) -> Vec<PageRange> {
    normal(runs, pin.extent().guest_bytes / PAGE_SIZE)
}

/// Stores changed sets until the arena ends.
pub(super) fn store_changes(shared: &Shared) {
    let mut state = shared.state();
    while !state.ended {
        let changed = std::mem::take(&mut state.changed);
        if changed.is_empty() {
            shared.learnt.wait(&mut state);
            continue;
        }
        drop(state);
        shared.pace.pauses().yield_to_starts();
        shared.store(changed);
        let next = Instant::now() + INTERVAL;
        state = shared.state();
        shared.learnt.wait_while_until(&mut state, |state| !state.ended, next);
    }
}

#[cfg(test)]
#[path = "keep_tests.rs"]
mod tests;
