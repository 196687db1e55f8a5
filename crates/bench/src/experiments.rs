//! The papers' experiments, as far as the traces and this host reach: what is run, and what is made of it.
//!
//! Each has the name of its figure or table. What differs from the paper is the same for all of them: functions are
//! replayed by the player, the host has fewer processors, and the planners are those of one executor, so that they differ
//! in the restore alone.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::cache::Cache;
use crate::capacity::Capacities;
use crate::chart::{Bar, Chart, Line, Marks, Panel, number};
use crate::host::Host;
use crate::results::{Results, Row};

/// An experiment of a paper.
#[derive(Clone, Copy, Debug)]
pub struct Experiment {
    /// Its name on the command line and of its files: `pass-figure-9`.
    pub name: &'static str,
    /// Where it stands.
    pub source: &'static str,
    /// What it shows.
    pub title: &'static str,
    /// The planners, as they are written.
    pub planners: &'static [&'static str],
    /// The traces.
    pub traces: &'static [&'static str],
    /// The page cache before each run.
    pub cache: Cache,
    /// Whether the functions' own work between touches is replayed too.
    pub work: bool,
    /// Whether all that the guests hold free holds something. FaaSnap is shown of a guest that zeroes what it frees: its paper has one.
    pub unsanitised: bool,
    /// Whether the microVMs of a run are each of a snapshot of its own.
    pub different: bool,
    /// Whether the profiles are recorded on the input that is replayed, not on the function's other one.
    pub same_input: bool,
    /// How it is run.
    pub shape: Shape,
    /// The quantity that the paper shows.
    pub quantity: Quantity,
}

/// How an experiment is run.
#[derive(Clone, Copy, Debug)]
pub enum Shape {
    /// With so many microVMs at once, one number after the other.
    Concurrency(&'static [u32]),
    /// With so many microVMs at once, in memory cgroups of so many bytes, one limit after the other.
    Memory(u32, &'static [u64]),
    /// By filling a memory cgroup of so many bytes with microVMs.
    Capacity(u64),
}

/// What is shown of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantity {
    /// Request to last page, ms.
    Total,
    /// DRAM of a run, MiB.
    Dram,
    /// Time in page faults beside the time of the whole replay, ms.
    Faults,
}

impl Quantity {
    /// The quantity of a row, in its unit.
    #[must_use]
    pub fn of(self, row: &Row) -> Option<f64> {
        match self {
            Self::Total => Some(row.total_ms.median),
            Self::Dram => Some(row.batch_dram_bytes as f64 / f64::from(1 << 20)),
            Self::Faults => row.fault_ms.map(|faults| faults.median),
        }
    }

    /// Its name and unit.
    #[must_use]
    pub fn unit(self) -> &'static str {
        match self {
            Self::Total => "request to last page, ms",
            Self::Dram => "DRAM of all microVMs, MiB",
            Self::Faults => "time in page faults, ms",
        }
    }
}

const MIB: u64 = 1 << 20;
/// The systems that PASS compares, and firn's own.
const OF_PASS: &[&str] =
    &["firecracker", "vanilla_dax", "faasnap", "dram_cached", "pass", "pass_shared", "firn"];
const OF_FAASNAP: &[&str] = &["firecracker", "reap", "faasnap", "dram_cached"];
const OF_SNAPBPF: &[&str] = &[
    "firecracker:readahead=off",
    "firecracker:readahead=on",
    "reap",
    "faast",
    "faasnap",
    "snapbpf",
];
/// Of PASS table 4 and FaaSnap table 2.
const FUNCTIONS: &[&str] = &["compression-a", "image-a", "json-a", "pyaes-a"];
/// The functions of FaaSnap's figure 6 that traces are carried of.
const OF_FIGURE_6: &[&str] = &[
    "chameleon-a",
    "chameleon-b",
    "compression-a",
    "compression-b",
    "ffmpeg-a",
    "ffmpeg-b",
    "image-a",
    "image-b",
    "json-a",
    "json-b",
    "matmul-a",
    "matmul-b",
    "pagerank-a",
    "pagerank-b",
    "pyaes-a",
    "pyaes-b",
    "recognition-a",
    "recognition-b",
];
/// The functions of SnapBPF's figure 3 that traces are carried of.
const OF_FIGURE_3: &[&str] = &[
    "bert-a",
    "chameleon-a",
    "graph_bfs-a",
    "html_serving-a",
    "image-a",
    "json-a",
    "pyaes-a",
    "rnn-a",
];

/// All of them.
pub const EXPERIMENTS: &[Experiment] = &[
    Experiment {
        name: "pass-table-1",
        source: "PASS 2.2, table 1",
        title: "An ephemeral workload: time and memory",
        planners: &["firecracker", "faasnap", "dram_cached", "pass", "pass_shared", "firn"],
        traces: &["json-a"],
        cache: Cache::Cold,
        work: true,
        unsanitised: false,
        different: false,
        same_input: false,
        shape: Shape::Concurrency(&[1]),
        quantity: Quantity::Dram,
    },
    Experiment {
        name: "pass-table-5",
        source: "PASS 5.2, table 5, and 2.5, table 2",
        title: "Time in page faults",
        planners: OF_PASS,
        traces: &["json-a", "pyaes-a", "read-list-a"],
        cache: Cache::Cold,
        work: true,
        unsanitised: false,
        different: false,
        same_input: false,
        shape: Shape::Concurrency(&[1]),
        quantity: Quantity::Faults,
    },
    Experiment {
        name: "pass-figure-9",
        source: "PASS 5.2, figure 9",
        title: "Execution time by function",
        planners: OF_PASS,
        traces: FUNCTIONS,
        cache: Cache::Cold,
        work: true,
        unsanitised: false,
        different: false,
        same_input: false,
        shape: Shape::Concurrency(&[1]),
        quantity: Quantity::Total,
    },
    Experiment {
        name: "pass-figure-10",
        source: "PASS 5.2, figure 10",
        title: "Ephemeral workloads",
        planners: OF_PASS,
        traces: &["json-a", "read-list-a"],
        cache: Cache::Cold,
        work: true,
        unsanitised: false,
        different: false,
        same_input: false,
        shape: Shape::Concurrency(&[1]),
        quantity: Quantity::Total,
    },
    Experiment {
        name: "pass-figure-11",
        source: "PASS 5.3, figure 11",
        title: "Execution time at a concurrency of 32",
        planners: &["vanilla_dax", "faasnap", "pass", "pass_shared", "firn"],
        traces: FUNCTIONS,
        cache: Cache::Cold,
        work: true,
        unsanitised: false,
        different: false,
        same_input: false,
        shape: Shape::Concurrency(&[32]),
        quantity: Quantity::Total,
    },
    Experiment {
        name: "pass-figure-12",
        source: "PASS 5.3, figure 12",
        title: "Execution time by concurrency",
        planners: &["vanilla_dax", "faasnap", "pass", "pass_shared", "firn"],
        traces: &["json-a"],
        cache: Cache::Cold,
        work: true,
        unsanitised: false,
        different: false,
        same_input: false,
        shape: Shape::Concurrency(&[2, 4, 8, 16, 32, 64]),
        quantity: Quantity::Total,
    },
    Experiment {
        name: "pass-figure-13",
        source: "PASS 5.3, figure 13",
        title: "Execution time of 32 requests by memory",
        planners: &["vanilla_dax", "firecracker", "faasnap", "pass", "pass_shared", "firn"],
        traces: &["json-a"],
        cache: Cache::Cold,
        work: true,
        unsanitised: false,
        different: false,
        same_input: false,
        shape: Shape::Memory(32, &[2048 * MIB, 1024 * MIB, 512 * MIB, 256 * MIB, 128 * MIB]),
        quantity: Quantity::Total,
    },
    Experiment {
        name: "pass-figure-14",
        source: "PASS 5.3, figure 14",
        title: "Maximum concurrency",
        planners: &[
            "vanilla_dax",
            "firecracker",
            "faasnap",
            "dram_cached",
            "pass",
            "pass_shared",
            "firn",
        ],
        traces: &["json-a"],
        cache: Cache::Cold,
        work: false,
        unsanitised: false,
        different: false,
        same_input: false,
        shape: Shape::Capacity(256 * MIB),
        quantity: Quantity::Total,
    },
    Experiment {
        name: "faasnap-figure-6",
        source: "FaaSnap 6.2, figure 6",
        title: "Execution time, recorded on the other input",
        planners: OF_FAASNAP,
        traces: OF_FIGURE_6,
        cache: Cache::Cold,
        work: true,
        unsanitised: true,
        different: false,
        same_input: false,
        shape: Shape::Concurrency(&[1]),
        quantity: Quantity::Total,
    },
    Experiment {
        name: "faasnap-figure-7",
        source: "FaaSnap 6.2, figure 7",
        title: "Synthetic functions",
        planners: OF_FAASNAP,
        traces: &["hello-a", "read-list-a", "mmap-a"],
        cache: Cache::Cold,
        work: true,
        unsanitised: true,
        different: false,
        same_input: true,
        shape: Shape::Concurrency(&[1]),
        quantity: Quantity::Total,
    },
    Experiment {
        name: "faasnap-figure-10",
        source: "FaaSnap 6.6, figure 10, the same snapshot",
        title: "Bursts",
        planners: OF_FAASNAP,
        traces: &["hello-a", "json-a"],
        cache: Cache::Cold,
        work: true,
        unsanitised: true,
        different: false,
        same_input: false,
        shape: Shape::Concurrency(&[1, 4, 16, 64]),
        quantity: Quantity::Total,
    },
    Experiment {
        name: "faasnap-figure-10-different",
        source: "FaaSnap 6.6, figure 10, different snapshots",
        title: "Bursts of different functions",
        planners: OF_FAASNAP,
        traces: &["hello-a", "json-a"],
        cache: Cache::Cold,
        work: true,
        unsanitised: true,
        different: true,
        same_input: false,
        shape: Shape::Concurrency(&[1, 4, 16, 64]),
        quantity: Quantity::Total,
    },
    Experiment {
        name: "snapbpf-figure-3a",
        source: "SnapBPF 4, figure 3a",
        title: "Latency of one instance",
        planners: &["reap", "faasnap", "snapbpf"],
        traces: OF_FIGURE_3,
        cache: Cache::Cold,
        work: true,
        unsanitised: true,
        different: false,
        same_input: true,
        shape: Shape::Concurrency(&[1]),
        quantity: Quantity::Total,
    },
    Experiment {
        name: "snapbpf-figure-3b",
        source: "SnapBPF 4, figure 3b",
        title: "Latency of 10 instances",
        planners: OF_SNAPBPF,
        traces: OF_FIGURE_3,
        cache: Cache::Cold,
        work: true,
        unsanitised: true,
        different: false,
        same_input: true,
        shape: Shape::Concurrency(&[10]),
        quantity: Quantity::Total,
    },
    Experiment {
        name: "snapbpf-figure-3c",
        source: "SnapBPF 4, figure 3c",
        title: "Memory of 10 instances",
        planners: OF_SNAPBPF,
        traces: OF_FIGURE_3,
        cache: Cache::Cold,
        work: true,
        unsanitised: true,
        different: false,
        same_input: true,
        shape: Shape::Concurrency(&[10]),
        quantity: Quantity::Dram,
    },
];

/// What an experiment found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// The experiment's name.
    pub name: String,
    /// Where it stands.
    pub source: String,
    /// What it shows.
    pub title: String,
    /// What its picture shows.
    pub quantity: Quantity,
    /// Where it was measured.
    pub host: Host,
    /// Whether all that the guests held free held something, FaaSnap's excepted.
    #[serde(default)]
    pub unsanitised: bool,
    /// Sessions by their place on the scale: microVMs, or a limit of memory.
    pub sessions: Vec<Place>,
    /// Budgets that were filled.
    pub capacities: Option<Capacities>,
    /// What was not measured, with the reason.
    pub left_out: BTreeMap<String, String>,
}

/// What was measured at one place of the scale.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Place {
    /// Its name.
    pub name: String,
    /// Rows of all planners that got through.
    pub rows: Vec<Row>,
}

impl Outcome {
    /// Takes what a session found.
    pub fn add(&mut self, place: &str, results: Results) {
        let left_out = results.left_out.into_iter().map(|left| (left.planner, left.reason));
        self.left_out.extend(left_out);
        match self.sessions.iter_mut().find(|session| session.name == place) {
            Some(session) => session.rows.extend(results.results),
            None => {
                let name = place.to_owned();
                self.sessions.push(Place { name, rows: results.results });
            }
        }
    }

    /// A picture: bars where there is one place, else lines over the places.
    #[must_use]
    pub fn draw(&self) -> String {
        if let Some(capacities) = &self.capacities {
            return capacities.draw();
        }
        let mut traces: Vec<&str> = Vec::new();
        for row in self.sessions.iter().flat_map(|session| &session.rows) {
            if !traces.contains(&row.trace.as_str()) {
                traces.push(&row.trace);
            }
        }
        let panels = traces.into_iter().map(|trace| match &self.sessions[..] {
            [session] => self.bars(trace, session),
            sessions => self.lines(trace, sessions),
        });
        Chart {
            title: format!("{} ({})", self.title, self.source),
            legend: match self.quantity {
                Quantity::Faults => vec!["in page faults".to_owned(), "the rest".to_owned()],
                Quantity::Total | Quantity::Dram => Vec::new(),
            },
            remark: "medians".to_owned(),
            panels: panels.collect(),
            foot: self.host.line(),
        }
        .svg()
    }

    fn bars(&self, trace: &str, session: &Place) -> Panel {
        let rows = session.rows.iter().filter(|row| row.trace == trace);
        let bars = rows.map(|row| {
            let value = self.quantity.of(row).unwrap_or_default();
            let rest = row.total_ms.median - value;
            let parts = match self.quantity {
                Quantity::Faults => vec![(0, value), (1, rest.max(0.0))],
                Quantity::Total | Quantity::Dram => vec![(0, value)],
            };
            let whisker = (self.quantity == Quantity::Total)
                .then_some((row.total_ms.median, row.total_ms.p95));
            Bar { name: row.planner.clone(), parts, whisker, value: number(value) }
        });
        let (title, unit) = (trace.to_owned(), self.quantity.unit().to_owned());
        Panel { title, unit, marks: Marks::Bars(bars.collect()) }
    }

    fn lines(&self, trace: &str, sessions: &[Place]) -> Panel {
        let mut planners: Vec<&str> = Vec::new();
        for row in sessions.iter().flat_map(|session| &session.rows) {
            if row.trace == trace && !planners.contains(&row.planner.as_str()) {
                planners.push(&row.planner);
            }
        }
        let lines = planners.into_iter().map(|planner| {
            let values = sessions.iter().map(|session| {
                let mut rows = session.rows.iter();
                let row = rows.find(|row| row.planner == planner && row.trace == trace);
                row.and_then(|row| self.quantity.of(row))
            });
            Line { name: planner.to_owned(), values: values.collect() }
        });
        let places = sessions.iter().map(|session| session.name.clone()).collect();
        let title = format!("{trace}: {}", self.quantity.unit());
        let unit = "by place".to_owned();
        Panel { title, unit, marks: Marks::Lines(places, lines.collect()) }
    }
}

#[cfg(test)]
#[path = "experiments_tests.rs"]
mod tests;
