//! How many microVMs a memory budget carries (PASS 5.3, "Maximum Concurrency", figure 14).
//!
//! MicroVMs of one snapshot start one after the other in a memory cgroup, and all keep running.
//! Each replays its trace and checks every page that it touches; a microVM that has done so and
//! still runs is counted. The first microVM that does not get that far ends the count: the kernel
//! kills a process of the group when it cannot give it memory, and a full pool refuses a replica.
//! The pool's manager filled the pool outside the group, so the pool is a budget of its own.

mod fill;

use std::error::Error as StdError;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use firn_base::format_bytes;
use firn_memory::planners::{pack, parse};
use firn_pool::ClientError;
use firn_run::cgroup::CgroupError;

use crate::batch::BatchError;
use crate::cgroup::GroupUsage;
use crate::harness::Harness;
use crate::host::Host;
use crate::picture::chart::{Bar, Chart, Marks, Panel};
use crate::players::{LeftOut, PlayersConfig, PlayersError, PoolPlayers, PoolUsage, Prepared};
use crate::text::table;
use fill::Fill;

/// A measurement of how many microVMs a budget carries.
#[derive(Clone, Debug, Default)]
pub struct CapacityConfig {
    /// The players and planners.
    pub players: PlayersConfig,
    /// The budget.
    pub budget: Budget,
}

/// A budget for microVMs.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// Memory of all microVMs together, in bytes.
    pub memory: u64,
    /// The highest number of microVMs that are started.
    pub most: u32,
    /// The longest time from a microVM's start to its last page.
    pub patience: Duration,
}

impl Default for Budget {
    fn default() -> Self {
        Self { memory: 256 << 20, most: 200, patience: Duration::from_secs(60) }
    }
}

/// What a budget carried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Carried {
    /// MicroVMs that had replayed their trace and ran at the same time.
    pub microvms: u32,
    /// Memory that was charged to the group when the last of them had replayed its trace.
    pub usage: GroupUsage,
    /// Why there were no more; `None` if the highest number was reached.
    pub end: Option<String>,
}

/// Budgets that were filled by several planners.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Capacities {
    /// The host, the medium and the build.
    pub host: Host,
    /// Memory of all microVMs together, in bytes.
    pub memory: u64,
    /// One for each planner on each trace.
    pub results: Vec<CapacityRow>,
    /// Planners that were not measured.
    pub left_out: Vec<LeftOut>,
}

/// What a budget carried of one planner on one trace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CapacityRow {
    /// The planner, with all its options.
    pub planner: String,
    /// The trace.
    pub trace: String,
    /// The number of microVMs, and their memory.
    #[serde(flatten)]
    pub carried: Carried,
    /// The numbers of microVMs, ascending, if they were counted several times: `carried` is the
    /// median.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub counts: Vec<u32>,
    /// Bytes of the pool that they used, if there is a pool.
    pub pool_bytes: Option<u64>,
    /// Bytes of DRAM in copies that the pool's manager lent to them, outside the cgroup.
    #[serde(default)]
    pub copy_bytes: Option<u64>,
}

/// Why a budget was not filled.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FillError {
    /// The pool's manager returned an error.
    #[error(transparent)]
    Pool(#[from] ClientError),
    /// The file that a planner maps cannot be packed.
    #[error("cannot pack the file of {planner}")]
    Pack {
        /// The planner.
        planner: String,
        /// The reason.
        source: Box<dyn StdError + Send + Sync>,
    },
    /// The microVMs of one planner on one trace could not be counted.
    #[error("cannot count the microVMs of {planner} on {trace}")]
    Capacity {
        /// The planner.
        planner: String,
        /// The trace.
        trace: String,
        /// The reason.
        source: CapacityError,
    },
}

/// Why the microVMs of one planner could not be counted.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CapacityError {
    /// Memory cannot be limited.
    #[error("cannot limit memory")]
    Cgroup(#[from] CgroupError),
    /// A process could not be started.
    #[error(transparent)]
    Batch(#[from] BatchError),
}

/// Why there are no capacities.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CapacitiesError {
    /// There are no players to measure.
    #[error(transparent)]
    Players(#[from] PlayersError),
    /// A budget was not filled.
    #[error(transparent)]
    Fill(#[from] FillError),
}

impl CapacityConfig {
    /// Freezes the players, fills the budget with microVMs of each player by each planner in turn,
    /// and removes them.
    ///
    /// # Errors
    ///
    /// [`CapacitiesError`]; no microVM is left running.
    pub fn run(&self, harness: &Harness<'_>) -> Result<Capacities, CapacitiesError> {
        let mut pool = self.players.connect(harness.progress)?;
        let prepared = self.players.prepare(pool.as_mut(), 1, 1, harness)?;
        Ok(fill(&self.budget, &prepared, pool.as_mut(), harness)?)
    }
}

/// Fills a budget with microVMs of each player by each planner in turn.
pub(crate) fn fill(
    budget: &Budget,
    prepared: &Prepared,
    mut pool: Option<&mut PoolPlayers<'_>>,
    harness: &Harness<'_>,
) -> Result<Capacities, FillError> {
    let Harness { program, interrupt, progress } = harness;
    let mut results = Vec::new();
    for player in &prepared.players {
        for subject in &prepared.subjects {
            let (planner, trace) = (subject.planner.clone(), player.trace.clone());
            if subject.packs {
                // Planners of one kind share one file, which may be packed for another of them.
                let pack = || Ok(pack(&player.snapshot, &*parse(&planner)?)?);
                pack().map_err(|source| FillError::Pack { planner: planner.clone(), source })?;
            }
            let snapshot = player.place(subject);
            let mut in_pool = pool.as_deref_mut().filter(|_| subject.in_pool);
            if let Some(pool) = &mut in_pool {
                pool.settle()?;
            }
            let step = format!("{planner} on {trace}");
            progress.begin(u64::from(budget.most));
            let filled = Fill { program, snapshot, planner: &planner, budget }.run(
                interrupt,
                |microvms| progress.advance(u64::from(microvms), &step),
                || in_pool.map(PoolPlayers::usage).transpose(),
            );
            progress.end();
            let (carried, usage) = filled.map_err(|source| {
                let (planner, trace) = (planner.clone(), trace.clone());
                FillError::Capacity { planner, trace, source }
            })?;
            let usage = usage?.map(|PoolUsage { pool_bytes, copy_bytes }| (pool_bytes, copy_bytes));
            let (pool_bytes, copy_bytes) = usage.unzip();
            let counts = Vec::new();
            results.push(CapacityRow { planner, trace, carried, counts, pool_bytes, copy_bytes });
        }
    }
    let (host, left_out) = (prepared.host.clone(), prepared.left_out.clone());
    Ok(Capacities { host, memory: budget.memory, results, left_out })
}

impl CapacityRow {
    /// The number of microVMs: the median of several counts, with the smallest and the largest if
    /// they differ.
    pub(crate) fn number(&self) -> String {
        let microvms = self.carried.microvms;
        match self.counts.as_slice() {
            [least, .., most] if least != most => format!("{microvms} ({least} to {most})"),
            _ => microvms.to_string(),
        }
    }
}

impl Capacities {
    /// The median of each row of several [fills](fill()) of one budget, of an even number the lower
    /// one; `None` of none.
    pub(crate) fn median_of(fills: &[Self]) -> Option<Self> {
        let mut median = fills.first()?.clone();
        for (index, row) in median.results.iter_mut().enumerate() {
            let mut rows: Vec<_> =
                fills.iter().filter_map(|fill| fill.results.get(index)).collect();
            rows.sort_by_key(|row| row.carried.microvms);
            let counts = rows.iter().map(|row| row.carried.microvms).collect();
            if let Some(middle) = rows.get((rows.len() - 1) / 2) {
                *row = CapacityRow { counts, ..(*middle).clone() };
            }
        }
        Some(median)
    }

    /// The traces, in the order of the rows.
    pub(crate) fn traces(&self) -> Vec<&str> {
        let mut traces: Vec<&str> = self.results.iter().map(|row| row.trace.as_str()).collect();
        traces.dedup();
        traces
    }

    /// The part of one trace.
    pub(crate) fn of_trace(&self, trace: &str) -> Self {
        let rows = self.results.iter().filter(|row| row.trace == trace);
        let (host, left_out) = (self.host.clone(), self.left_out.clone());
        Self { host, memory: self.memory, results: rows.cloned().collect(), left_out }
    }

    /// A picture as SVG, with one bar for each planner: the number of microVMs that the budget
    /// carried.
    #[must_use]
    pub fn draw(&self) -> String {
        let traces = self.traces();
        let panel = |trace: &str| {
            let rows = self.results.iter().filter(|row| row.trace == trace);
            let bars = rows.map(|row| Bar {
                name: row.planner.clone(),
                parts: vec![(0, f64::from(row.carried.microvms))],
                whisker: None,
                value: match &row.carried.end {
                    Some(_) => row.number(),
                    None => format!("{}, no more were started", row.number()),
                },
            });
            let unit = "microVMs at once".to_owned();
            Panel { title: trace.to_owned(), unit, marks: Marks::Bars(bars.collect()) }
        };
        Chart {
            title: format!("MicroVMs that {} MiB carry", self.memory >> 20),
            legend: Vec::new(),
            remarks: vec![
                "memory of a cgroup around all of them; a pool is a budget of its own".to_owned(),
            ],
            columns: 1,
            panels: traces.into_iter().map(panel).collect(),
            foot: self.host.line(),
        }
        .svg()
    }

    /// A table, with the host and the meaning of the columns.
    #[must_use]
    pub fn text(&self) -> String {
        const HEAD: [&str; 9] = [
            "planner",
            "trace",
            "microVMs",
            "charged",
            "anonymous",
            "page cache",
            "copies",
            "pool",
            "end",
        ];
        let row = |row: &CapacityRow| {
            let Carried { microvms, usage, end } = &row.carried;
            vec![
                row.planner.clone(),
                row.trace.clone(),
                microvms.to_string(),
                format_bytes(usage.total),
                format_bytes(usage.anonymous),
                format_bytes(usage.page_cache),
                row.copy_bytes.map_or(String::new(), format_bytes),
                row.pool_bytes.map_or(String::new(), format_bytes),
                end.clone().unwrap_or_else(|| "the limit of --most".to_owned()),
            ]
        };
        let rows: Vec<Vec<String>> = self.results.iter().map(row).collect();
        let mut lines = vec![self.host.line(), table(&HEAD, &rows)];
        lines.push(format!(
            "microVMs: those that had replayed their trace and ran at the same time, in a cgroup of {}; charged: memory charged to that \
             cgroup, including the kernel's tables, when the last of them had; copies: DRAM of the copies that the pool's manager lent \
             to them, and pool: bytes of the pool that they used, both outside the budget",
            format_bytes(self.memory)
        ));
        for left_out in &self.left_out {
            lines.push(format!("left out: {}: {}", left_out.planner, left_out.reason));
        }
        lines.join("\n")
    }
}
