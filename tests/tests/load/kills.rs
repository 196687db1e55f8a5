//! Kills processes at random.

use std::sync::atomic::Ordering;
use std::time::Duration;

use firn_tests::World;
use rustix::process::{Pid, Signal, kill_process};

use crate::{BETWEEN_KILLS, Life};

/// Kills one process after every [`BETWEEN_KILLS`] requests.
pub(crate) struct Killer {
    state: u64,
    only_monitors: bool,
}

impl Killer {
    pub(crate) fn new(seed: u64) -> Self {
        Self { state: seed, only_monitors: false }
    }

    pub(crate) fn of_monitors(seed: u64) -> Self {
        Self { state: seed, only_monitors: true }
    }

    /// Kills until the requests have ended. One kill of 25 hits the daemon, two the pool's manager.
    pub(crate) fn run(mut self, world: &World, life: &Life<'_>) {
        let mut at = life.ended.load(Ordering::SeqCst) + BETWEEN_KILLS;
        while !life.stop.load(Ordering::SeqCst) {
            if life.ended.load(Ordering::SeqCst) < at {
                std::thread::sleep(Duration::from_millis(2));
                continue;
            }
            at += BETWEEN_KILLS;
            life.kills.fetch_add(1, Ordering::SeqCst);
            match if self.only_monitors { 3 } else { self.draw(25) } {
                0 => life.restart(),
                1 | 2 => self.kill_one(world, "pool"),
                _ => self.kill_one(world, "monitor"),
            }
        }
    }

    /// Kills one of the processes that run a command of firn, if there is one.
    fn kill_one(&mut self, world: &World, command: &str) {
        let runs = |process: &i32| {
            let words = std::fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
            words.split(|byte| *byte == 0).nth(1) == Some(command.as_bytes())
        };
        let found: Vec<i32> = world.processes().into_iter().filter(runs).collect();
        if !found.is_empty() {
            let victim = found[self.draw(found.len())];
            // It may have ended meanwhile.
            let _ = kill_process(Pid::from_raw(victim).unwrap(), Signal::KILL);
        }
    }

    /// A number below `limit`, by splitmix64.
    fn draw(&mut self, limit: usize) -> usize {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((mixed ^ (mixed >> 31)) % limit as u64).unwrap()
    }
}
