//! The results of an experiment: JSON, a table and a picture.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::kernel_faults::KernelFaults;
use super::programs::Programs;
use super::replays::Quantity;
use crate::capacity::Capacities;
use crate::cost::{Costs, Prices};
use crate::host::Host;
use crate::thaw::{Noise, Results, Row};
use crate::traces::{LoadTraceError, load};

/// The prices of a GB in PASS (5.3, "Cost-effectiveness"), USD: DDR4, Optane, SATA SSD.
const PRICES: Prices = Prices { dram: 16.61, pool: 7.85, storage: 0.35 };

/// The results of an experiment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// The version of this form: [`RESULTS_VERSION`](crate::RESULTS_VERSION).
    #[serde(default)]
    pub version: u32,
    /// The experiment's name.
    pub name: String,
    /// The paper, section and figure.
    pub source: String,
    /// The subject of the figure.
    pub title: String,
    /// The quantity that its picture shows.
    pub quantity: Quantity,
    /// The host, the medium and the build.
    pub host: Host,
    /// The size of the pool's medium in bytes, if there is a pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool_size: Option<u64>,
    /// Whether the pages that the guests held free had content, except in FaaSnap's guests.
    #[serde(default)]
    pub unsanitised: bool,
    /// The seed of the random order in which the planners had their turns.
    #[serde(default)]
    pub order: u64,
    /// The command, without its directories.
    #[serde(default)]
    pub command: String,
    /// How much was measured.
    #[serde(default)]
    pub settings: Settings,
    /// The traces that are complete, with their planners.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub measured: Vec<String>,
    /// What differs from the paper in this experiment alone.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub remarks: Vec<String>,
    /// Sessions by their place on the scale: the number of microVMs, the memory limit or the disk.
    pub sessions: Vec<Place>,
    /// Budgets that were filled, in an experiment that fills them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub budgets: Vec<Capacities>,
    /// What the memory of each budget's microVMs costs, in an experiment that prices it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub costs: Vec<Priced>,
    /// The cost of BPF programs, in an experiment that measures it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub programs: Vec<Programs>,
    /// The time in the kernel's page faults, in an experiment that measures it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kernel_faults: Vec<KernelFaults>,
    /// The planners that were not measured, with the reasons.
    pub left_out: BTreeMap<String, String>,
}

/// How much an experiment measures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// Runs of each planner on each trace.
    pub runs: u32,
    /// The largest number of microVMs at once, if it is limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub most: Option<u32>,
    /// Whether there is a pool for the planners that map snapshots from one.
    pub pool: bool,
}

/// The costs of a budget's microVMs with one price of the pool's medium.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Priced {
    /// Memory of all microVMs together, in bytes.
    pub memory: u64,
    /// The medium that the pool is priced as.
    pub pool_as: String,
    /// The prices, and the costs of each planner.
    #[serde(flatten)]
    pub costs: Costs,
}

/// The results at one place on the scale.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Place {
    /// Its name.
    pub name: String,
    /// Rows of all planners that did not fail.
    pub rows: Vec<Row>,
    /// The noise: a planner that was measured twice.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub noise: Vec<Noise>,
}

impl Outcome {
    /// Whether `new`, in which nothing is measured yet, may go on with these results: they have the
    /// same settings, and were measured by the same build on the same host and medium. `emulated`
    /// is whether the experiment makes its medium.
    pub(super) fn continues_as(&self, new: &Self, emulated: bool) -> bool {
        let medium = if emulated { &self.host.medium } else { &new.host.medium };
        let host = Host { medium: medium.clone(), ..new.host.clone() };
        (self.version, self.settings, &self.host) == (new.version, new.settings, &host)
    }

    /// Takes over what an earlier run measured.
    pub(super) fn continue_from(&mut self, earlier: Self) {
        self.host = earlier.host;
        self.pool_size = earlier.pool_size;
        self.order = earlier.order;
        self.measured = earlier.measured;
        self.sessions = earlier.sessions;
        self.budgets = earlier.budgets;
        self.programs = earlier.programs;
        self.kernel_faults = earlier.kernel_faults;
        self.left_out.extend(earlier.left_out);
    }

    /// Adds a place without results, if it has none.
    pub(super) fn add_place(&mut self, name: &str) {
        if self.sessions.iter().all(|session| session.name != name) {
            let (rows, noise) = (Vec::new(), Vec::new());
            self.sessions.push(Place { name: name.to_owned(), rows, noise });
        }
    }

    /// Adds what a budget carried.
    pub(super) fn add_budget(&mut self, filled: Capacities) {
        match self.budgets.iter_mut().find(|budget| budget.memory == filled.memory) {
            Some(budget) => {
                budget.results.extend(filled.results);
                budget.left_out.extend(filled.left_out);
            }
            None => self.budgets.push(filled),
        }
    }

    /// Prices the memory of each budget's microVMs, with the pool as persistent memory and as DRAM.
    pub(super) fn price(&mut self) -> Result<(), LoadTraceError> {
        for budget in &self.budgets {
            for (pool_as, pool) in [("Optane", PRICES.pool), ("DRAM", PRICES.dram)] {
                let prices = Prices { pool, ..PRICES };
                let mut costs = Costs { prices, costs: Vec::new() };
                for trace in budget.traces() {
                    // A dense snapshot is as large as its guest.
                    let storage = load(trace)?.trace.layout().total_bytes();
                    costs.costs.extend(Costs::of(&budget.of_trace(trace), prices, storage).costs);
                }
                let (memory, pool_as) = (budget.memory, pool_as.to_owned());
                self.costs.push(Priced { memory, pool_as, costs });
            }
        }
        Ok(())
    }

    /// Gives rows the name of another trace.
    pub(super) fn rename_trace(&mut self, from: &str, to: &str) {
        for place in &mut self.sessions {
            let rows = place.rows.iter_mut().map(|row| &mut row.trace);
            let noise = place.noise.iter_mut().map(|noise| &mut noise.trace);
            rows.chain(noise).filter(|trace| *trace == from).for_each(|trace| to.clone_into(trace));
        }
    }

    /// Adds the results of a session.
    pub(super) fn add(&mut self, place: &str, results: Results) {
        let left_out = results.left_out.into_iter().map(|left| (left.planner, left.reason));
        self.left_out.extend(left_out);
        let Results { results: mut rows, noise, .. } = results;
        rows.retain(|row| !row.is_repeated());
        match self.sessions.iter_mut().find(|session| session.name == place) {
            Some(session) => {
                session.rows.extend(rows);
                session.noise.extend(noise);
            }
            None => self.sessions.push(Place { name: place.to_owned(), rows, noise }),
        }
    }
}
