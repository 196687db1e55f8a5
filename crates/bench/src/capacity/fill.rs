//! Filling one memory cgroup with microVMs of one player by one planner.

use std::ffi::OsString;
use std::io::BufRead;
use std::path::Path;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{Budget, CapacityError, Carried};
use crate::batch::{BatchError, HELD, Interrupt, Member, Player, Processes};
use crate::cgroup::MemoryLimit;

/// MicroVMs to fill a budget with.
pub(super) struct Fill<'a> {
    /// The `firn` program: each microVM is a process of it.
    pub(super) program: &'a Path,
    /// The arguments that name the snapshot to `firn thaw`.
    pub(super) snapshot: &'a [OsString],
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
        let mut processes = Processes::new(interrupt);
        let mut carried = Carried { microvms: 0, usage: limit.usage()?, end: None };
        for number in 1..=self.budget.most {
            interrupt.check()?;
            let Self { program, snapshot, planner, .. } = *self;
            let (preloaded, faults) = (false, false);
            let player = Player { program, snapshot, planner, preloaded, faults };
            processes.start(player, number)?;
            if let Some(member) = processes.members.back_mut() {
                carried.end = self.wait(member)?;
            }
            interrupt.check()?;
            let usage = limit.usage()?;
            // The kernel may have killed any of them. A process that it is about to kill still
            // looks alive, so its count of kills is checked too.
            let dead = processes.members.iter_mut().position(Member::has_ended);
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
    fn wait(&self, member: &mut Member) -> Result<Option<String>, CapacityError> {
        let patience = self.budget.patience;
        let timeout = Timespec::try_from(patience).ok();
        let mut stdout = [PollFd::new(member.stdout.get_ref(), PollFlags::IN)];
        let number = member.number;
        let failed = |source| BatchError::Start { member: number, source };
        if poll(&mut stdout, timeout.as_ref()).map_err(|e| failed(e.into()))? == 0 {
            let seconds = patience.as_secs();
            return Ok(Some(format!(
                "microVM {number} had not replayed its trace after {seconds} s"
            )));
        }
        member.stdout.read_line(&mut member.printed).map_err(failed)?;
        if member.printed == HELD {
            return Ok(None);
        }
        Ok(Some(match member.report() {
            Err(error) => error.to_string(),
            Ok(_) => format!("microVM {number} ended by itself"),
        }))
    }
}
