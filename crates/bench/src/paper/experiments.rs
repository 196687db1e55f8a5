//! The list of the papers' experiments. Each has the name of its figure or table.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::cache::Cache;
use crate::thaw::Row;

/// An experiment of a paper.
#[derive(Clone, Copy, Debug)]
pub struct Experiment {
    /// Its name on the command line and of its files, such as `pass-figure-9`.
    pub name: &'static str,
    /// The paper, section and figure.
    pub source: &'static str,
    /// The subject of the figure.
    pub title: &'static str,
    /// The planners, as `NAME[:KEY=VALUE,...]`.
    pub planners: &'static [&'static str],
    /// The traces.
    pub traces: &'static [&'static str],
    /// The page cache before each run.
    pub cache: Cache,
    /// Whether the recorded work between touches is replayed too.
    pub work: bool,
    /// Whether the pages that the guests held free have content. FaaSnap is always measured on
    /// sanitised guests, as in its paper.
    pub unsanitised: bool,
    /// Whether each microVM of a run is of a snapshot of its own.
    pub different: bool,
    /// Whether profiles are recorded on the replayed input. Otherwise they are recorded on the
    /// function's other input.
    pub same_input: bool,
    /// How it runs.
    pub shape: Shape,
    /// The quantity that the paper shows.
    pub quantity: Quantity,
}

/// How an experiment runs.
#[derive(Clone, Copy, Debug)]
pub enum Shape {
    /// With these numbers of microVMs at once, one after the other.
    Concurrency(&'static [u32]),
    /// With a number of microVMs at once, in memory cgroups of these sizes in bytes, one after the
    /// other.
    Memory(u32, &'static [u64]),
    /// By filling a memory cgroup of this size in bytes with microVMs.
    Capacity(u64),
}

/// The quantity that a picture shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantity {
    /// Request to last page, ms.
    Total,
    /// DRAM of a run, MiB.
    Dram,
    /// Time in page faults, and the rest of the replay, ms.
    Faults,
}

impl Quantity {
    /// The quantity of a row, in its unit.
    pub(super) fn of(self, row: &Row) -> Option<f64> {
        match self {
            Self::Total => Some(row.total_ms.median),
            Self::Dram => Some(row.batch_dram_bytes as f64 / f64::from(1 << 20)),
            Self::Faults => row.fault_ms.map(|faults| faults.median),
        }
    }

    /// Its name and unit.
    pub(super) fn unit(self) -> &'static str {
        match self {
            Self::Total => "request to last page, ms",
            Self::Dram => "DRAM of all microVMs, MiB",
            Self::Faults => "time in page faults, ms",
        }
    }
}

const MIB: u64 = 1 << 20;
/// The systems that PASS compares, and `firn`.
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
/// The functions of PASS table 4 and FaaSnap table 2.
const FUNCTIONS: &[&str] = &["compression-a", "image-a", "json-a", "pyaes-a"];
/// The functions of FaaSnap's figure 6 for which there are traces.
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
/// The functions of SnapBPF's figure 3 for which there are traces.
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

/// All experiments.
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

/// There is no experiment of this name.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("no experiment has the name {0:?}; `firn bench paper` lists the names")]
pub struct UnknownExperiment(String);

/// Finds experiments by their names; `all` selects every one.
///
/// # Errors
///
/// [`UnknownExperiment`] at the first unknown name.
pub fn find(names: &[String]) -> Result<Vec<&'static Experiment>, UnknownExperiment> {
    let mut found = Vec::new();
    for name in names {
        let before = found.len();
        found.extend(EXPERIMENTS.iter().filter(|e| name == "all" || e.name == name));
        if found.len() == before {
            return Err(UnknownExperiment(name.clone()));
        }
    }
    Ok(found)
}
