//! How many microVMs a memory budget carries (PASS 5.3, "Maximum Concurrency", figure 14).
//!
//! MicroVMs of one snapshot are started one after the other in a memory cgroup, and none is ended. Each replays its trace
//! and checks every page that it touches; who has done so and lives is counted. The first that does not get that far
//! ends the count: the kernel kills a process of the group when it cannot give it memory, and a pool refuses a replica when
//! it is full. What a pool holds was filled by its manager, outside the group: it is a budget of its own.

use std::ffi::OsString;
use std::io::BufRead;
use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::batch::{BatchError, HELD, Interrupt, Member, Player, Processes};
use crate::cgroup::{CgroupError, GroupUsage, MemoryLimit};
use crate::chart::{Bar, Chart, Marks, Panel};
use crate::host::Host;
use crate::results::LeftOut;

/// What is filled up.
#[derive(Clone, Debug)]
pub struct Capacity<'a> {
    /// The `firn` that each microVM is a process of.
    pub program: &'a Path,
    /// What names the snapshot to `firn thaw`.
    pub snapshot: &'a [OsString],
    /// The planner, as it is written.
    pub planner: &'a str,
    /// What the microVMs may have together, in bytes.
    pub memory: u64,
    /// No more than so many are started.
    pub most: u32,
    /// How long one may take to its last page.
    pub patience: Duration,
}

/// What a budget carried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Carried {
    /// MicroVMs that had replayed their trace and lived, all at once.
    pub microvms: u32,
    /// What the group was charged with when the last of them had.
    pub usage: GroupUsage,
    /// Why there were no more; `None` where no more were asked for.
    pub end: Option<String>,
}

/// Budgets filled up by several planners.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Capacities {
    /// Where it was measured.
    pub host: Host,
    /// What the microVMs had together, in bytes.
    pub memory: u64,
    /// One for each planner on each trace.
    pub results: Vec<CapacityRow>,
    /// Planners that this host cannot run.
    pub left_out: Vec<LeftOut>,
}

/// What a planner makes of a budget.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CapacityRow {
    /// The planner, with all its options.
    pub planner: String,
    /// The trace.
    pub trace: String,
    /// How many there were, and what they took.
    #[serde(flatten)]
    pub carried: Carried,
    /// Bytes of the pool that they used, where there is one.
    pub pool_bytes: Option<u64>,
    /// Bytes of DRAM in copies that the pool's manager lent them, outside the cgroup.
    #[serde(default)]
    pub copy_bytes: Option<u64>,
}

impl Capacities {
    /// A bar for each planner: microVMs that the budget carried.
    #[must_use]
    pub fn draw(&self) -> String {
        let mut traces: Vec<&str> = self.results.iter().map(|row| row.trace.as_str()).collect();
        traces.dedup();
        let panel = |trace: &str| {
            let rows = self.results.iter().filter(|row| row.trace == trace);
            let bars = rows.map(|row| Bar {
                name: row.planner.clone(),
                parts: vec![(0, f64::from(row.carried.microvms))],
                whisker: None,
                value: match &row.carried.end {
                    Some(_) => row.carried.microvms.to_string(),
                    None => format!("{}, no more were started", row.carried.microvms),
                },
            });
            let unit = "microVMs at once".to_owned();
            Panel { title: trace.to_owned(), unit, marks: Marks::Bars(bars.collect()) }
        };
        Chart {
            title: format!("MicroVMs that {} MiB carry", self.memory >> 20),
            legend: Vec::new(),
            remark: "memory of a cgroup around all of them; a pool is a budget of its own"
                .to_owned(),
            panels: traces.into_iter().map(panel).collect(),
            foot: self.host.line(),
        }
        .svg()
    }
}

/// Why nothing was counted.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CapacityError {
    /// Memory is not limited.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// A process could not be started.
    #[error(transparent)]
    Batch(#[from] BatchError),
}

impl Capacity<'_> {
    /// Fills the budget up. `started` is called with the number of microVMs that live; `full` at the end, while all of
    /// them do.
    ///
    /// # Errors
    ///
    /// [`CapacityError`]; all that was started has been ended.
    pub fn fill<T>(
        &self,
        interrupt: &Interrupt,
        mut started: impl FnMut(u32),
        full: impl FnOnce() -> T,
    ) -> Result<(Carried, T), CapacityError> {
        let limit = MemoryLimit::enter(self.memory)?;
        let mut processes = Processes::new(interrupt);
        let mut carried = Carried { microvms: 0, usage: limit.usage()?, end: None };
        for number in 1..=self.most {
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
            // The kernel may have taken any of them, or be about to: then it looks alive, and its memory is gone.
            let dead = processes.members.iter_mut().position(Member::has_ended);
            if let Some(dead) = dead.and_then(|dead| u32::try_from(dead).ok()) {
                let died = || format!("microVM {} was killed for want of memory", dead + 1);
                carried.end.get_or_insert_with(died);
            } else if limit.kills()? > 0 {
                carried.end.get_or_insert_with(|| "one was killed for want of memory".to_owned());
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

    /// Waits until one has touched its last page; why it has not, where it does not.
    fn wait(&self, member: &mut Member) -> Result<Option<String>, CapacityError> {
        let patience = Timespec::try_from(self.patience).ok();
        let mut stdout = [PollFd::new(member.stdout.get_ref(), PollFlags::IN)];
        let number = member.number;
        let failed = |source| BatchError::Start { member: number, source };
        if poll(&mut stdout, patience.as_ref()).map_err(|e| failed(e.into()))? == 0 {
            let seconds = self.patience.as_secs();
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
