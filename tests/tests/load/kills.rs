//! Kills processes at random.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::Life;

/// How many requests end between two kills.
const BETWEEN: usize = 25;

/// A kind of process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Monitor,
    /// The pool's manager.
    Manager,
    Daemon,
}

/// Kills processes in rounds: each has the same kinds, in a random order.
pub(crate) struct Killer {
    seed: u64,
    /// How many of each kind are killed at least.
    least: usize,
    /// How many of each kind are killed in a round.
    round: BTreeMap<Kind, usize>,
    killed: Mutex<BTreeMap<Kind, usize>>,
}

impl Killer {
    pub(crate) fn new(seed: u64, least: usize, round: &[(Kind, usize)]) -> Self {
        let round = round.iter().copied().collect();
        Self { seed, least, round, killed: Mutex::default() }
    }

    /// How many processes of each kind were killed.
    pub(crate) fn killed(&self) -> BTreeMap<Kind, usize> {
        self.killed.lock().unwrap().clone()
    }

    /// Whether enough processes of each kind were killed.
    pub(crate) fn is_done(&self) -> bool {
        let killed = self.killed();
        self.round.keys().all(|kind| killed.get(kind).is_some_and(|count| *count >= self.least))
    }

    /// Kills one process after every [`BETWEEN`] requests, until the requests have ended.
    pub(crate) fn run(&self, life: &Life<'_>) {
        let stopped = || life.stop.load(Ordering::SeqCst);
        let pause = || std::thread::sleep(Duration::from_millis(2));
        let mut random = Random(self.seed);
        while !stopped() {
            pause();
            let kinds = self.round.iter().flat_map(|(kind, count)| vec![*kind; *count]);
            let mut round: Vec<Kind> = kinds.collect();
            while !round.is_empty() {
                let kind = round.swap_remove(random.below(round.len()));
                let at = life.ended.load(Ordering::SeqCst) + BETWEEN;
                while life.ended.load(Ordering::SeqCst) < at && !stopped() {
                    pause();
                }
                // There may be none of the kind right now.
                while !stopped() && !kill(kind, life, &mut random) {
                    pause();
                }
                if stopped() {
                    return;
                }
                *self.killed.lock().unwrap().entry(kind).or_default() += 1;
            }
        }
    }
}

/// Kills the pool's manager, which has to run.
pub(crate) fn kill_manager(life: &Life<'_>) {
    assert!(kill(Kind::Manager, life, &mut Random(1)));
}

/// Kills a process of a kind. Returns false if there is none.
fn kill(kind: Kind, life: &Life<'_>, random: &mut Random) -> bool {
    let command = match kind {
        Kind::Daemon => {
            life.restart();
            return true;
        }
        Kind::Manager => "pool",
        Kind::Monitor => "monitor",
    };
    let found = life.house.world.processes_of(command);
    // It may have ended meanwhile.
    !found.is_empty()
        && kill_process(Pid::from_raw(found[random.below(found.len())]).unwrap(), Signal::KILL)
            .is_ok()
}

/// Random numbers, by splitmix64.
struct Random(u64);

impl Random {
    /// A number below `limit`.
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((mixed ^ (mixed >> 31)) % limit as u64).unwrap()
    }
}
