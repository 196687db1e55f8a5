//! Filling one memory cgroup with microVMs of one player by one planner.

use std::path::Path;

use firn_base::error_chain;
use firn_run::StartError;

use super::{Budget, CapacityError, Carried};
use crate::batch::{Batch, Instance, Interrupt, Player, in_one_group};
use crate::cgroup::MemoryLimit;
use crate::players::Place;

/// MicroVMs to fill a budget with.
pub(super) struct Fill<'a> {
    /// The `firn-monitor` program: each microVM is a process of it.
    pub(super) program: &'a Path,
    pub(super) snapshot: Place<'a>,
    /// The planner with its options.
    pub(super) planner: &'a str,
    pub(super) budget: &'a Budget,
}

impl Fill<'_> {
    /// Fills the budget. `started` is called with the number of running microVMs after each start,
    /// and `full` at the end, while all of them still run. All microVMs have ended when this
    /// returns.
    pub(super) fn run<T>(
        &self,
        interrupt: &Interrupt,
        mut started: impl FnMut(u32),
        full: impl FnOnce() -> T,
    ) -> Result<(Carried, T), CapacityError> {
        let limit = MemoryLimit::enter(self.budget.memory)?;
        let jail = in_one_group();
        let mut batch = Batch::new(interrupt);
        let mut carried = Carried { microvms: 0, usage: limit.usage()?, end: None };
        for number in 1..=self.budget.most {
            interrupt.check()?;
            let Self { program, snapshot, planner, .. } = *self;
            let (preloaded, faults) = (false, false);
            let player = Player {
                program,
                snapshot,
                planner,
                preloaded,
                faults,
                input: None,
                warm: false,
                unchecked: false,
                jail: &jail,
            };
            batch.start(player, number, None)?;
            if let Some(instance) = batch.instances.back_mut() {
                carried.end = self.wait(instance);
            }
            interrupt.check()?;
            let usage = limit.usage()?;
            // The kernel may have killed any of them. A process that it is about to kill still
            // looks alive, so its count of kills is checked too.
            let dead = batch.instances.iter_mut().position(Instance::has_ended);
            if let Some(dead) = dead.and_then(|dead| u32::try_from(dead).ok()) {
                let died = || format!("microVM {} was killed: out of memory", dead + 1);
                carried.end.get_or_insert_with(died);
            } else if limit.kills()? > 0 {
                carried.end.get_or_insert_with(|| "a microVM was killed: out of memory".to_owned());
            }
            if carried.end.is_some() {
                break;
            }
            carried.microvms = number;
            carried.usage = usage;
            started(number);
        }
        Ok((carried, full()))
    }

    /// Waits until a microVM has touched its last page. Returns the reason if it does not get that
    /// far.
    fn wait(&self, instance: &mut Instance) -> Option<String> {
        let number = instance.number;
        let ended = instance.wait_until_held(Some(self.budget.patience))?;
        Some(match ended {
            Err(StartError::TimedOut(seconds)) => {
                format!(
                    "microVM {number} had not replayed its trace after {seconds} s (--patience)"
                )
            }
            Err(error) => format!("microVM {number} failed: {}", error_chain(error)),
            Ok(_) => format!("microVM {number} ended by itself"),
        })
    }
}
