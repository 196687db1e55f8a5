//! What an experiment of players replays, and the quantity that it shows.

use serde::{Deserialize, Serialize};

use crate::cache::Cache;
use crate::thaw::Row;
use crate::tier::Throttle;

/// An experiment in which planners thaw players that replay traces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replays {
    /// The part of the experiment, where it has several: its files are `NAME-PART`. Empty for the
    /// first one.
    pub part: &'static str,
    /// The planners, as `NAME[:KEY=VALUE,...]`.
    pub planners: &'static [&'static str],
    /// The traces.
    pub traces: &'static [&'static str],
    /// The page cache before each run.
    pub cache: Cache,
    /// Where the snapshots are.
    pub medium: Medium,
    /// Whether the recorded work between touches is replayed too.
    pub work: bool,
    /// Whether the pages that the guests held free have content. FaaSnap is always measured on
    /// sanitised guests, as in its paper.
    pub unsanitised: bool,
    /// Whether each microVM of a run is of a snapshot of its own.
    pub different: bool,
    /// The traces whose profile is recorded on the replayed input. Those of the others are recorded
    /// on the function's other input.
    pub same_input: &'static [&'static str],
    /// Whether each microVM serves a second, warm invocation after the first.
    pub warm: bool,
    /// How it runs.
    pub shape: Shape,
    /// The quantity that the paper shows.
    pub quantity: Quantity,
    /// What differs from the paper in this experiment alone, in sentences.
    pub remarks: &'static [&'static str],
}

impl Replays {
    /// One microVM of no trace with a cold page cache, and its time. Experiments name what differs.
    pub(super) const ONE: Self = Self {
        part: "",
        planners: &[],
        traces: &[],
        cache: Cache::Cold,
        medium: Medium::Any,
        work: true,
        unsanitised: false,
        different: false,
        same_input: &[],
        warm: false,
        shape: Shape::Concurrency(&[1]),
        quantity: Quantity::Total,
        remarks: &[],
    };

    /// Whether another part measures the same, and shows a different quantity of it.
    pub(super) fn measures_as(&self, other: &Self) -> bool {
        let Self { part, quantity, remarks, .. } = *self;
        let touches = [self, other].map(|replays| replays.quantity.times_touches());
        let more = [self, other].map(|replays| {
            [Quantity::Programs, Quantity::KernelFaults].map(|more| replays.quantity == more)
        });
        touches[0] == touches[1]
            && more[0] == more[1]
            && Self { part, quantity, remarks, ..*other } == *self
    }
}

/// The medium of an experiment's snapshots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// [`PaperConfig::directory`](super::PaperConfig::directory), whatever it is.
    Any,
    /// The same, which must be on a DAX file system.
    Dax,
    /// The directory for temporary files, which must have a page cache.
    PageCache,
}

/// How an experiment runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// With these numbers of microVMs at once, one after the other.
    Concurrency(&'static [u32]),
    /// With a number of microVMs at once, in memory cgroups of these sizes in bytes, one after the
    /// other.
    Memory(u32, &'static [u64]),
    /// By filling memory cgroups of these sizes in bytes with microVMs, one after the other.
    Capacity(&'static [u64]),
    /// With one microVM, from an emulated disk with these limits, one after the other.
    Storage(&'static [Storage]),
    /// With one microVM, on inputs of other sizes than that of the profile, one after the other.
    /// The traces are named without their inputs.
    Sizes,
}

/// An emulated disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Storage {
    /// Its name.
    pub name: &'static str,
    /// Its limits.
    pub limits: Throttle,
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
    /// Setting the microVM up, and the invocation, ms.
    Parts,
    /// How many touches took how long.
    FaultTimes,
    /// What was fetched ahead of the guest, and what the guest waited for, ms.
    Fetch,
    /// What was fetched ahead of the guest, and how many page faults KVM had, where times are not
    /// performance.
    FetchCounts,
    /// Time divided by that of the first planner, inverted.
    SpeedUp,
    /// Cost of the BPF programs, ms.
    Programs,
    /// Time in the kernel's functions for page faults, ms.
    KernelFaults,
    /// The number of microVMs that a budget carries.
    Carried,
    /// The price of a microVM's memory.
    Price,
}

impl Quantity {
    /// The quantity of a row, in its unit.
    pub(super) fn of(self, row: &Row) -> Option<f64> {
        match self {
            Self::Dram => Some(row.batch_dram_bytes as f64 / f64::from(1 << 20)),
            Self::Faults | Self::Fetch => row.fault_ms.map(|faults| faults.median),
            Self::FetchCounts => Some(row.kvm_page_faults as f64),
            Self::Parts => Some(row.start_to_resume_ms.median),
            _ => Some(row.total_ms.median),
        }
    }

    /// Its name and unit.
    pub(super) fn unit(self) -> &'static str {
        match self {
            Self::Dram => "DRAM of all microVMs, MiB",
            Self::Faults | Self::Fetch => "time in page faults, ms",
            Self::Parts => "setup and invocation, ms",
            Self::FetchCounts => "page faults of KVM",
            Self::FaultTimes => "touches of a microVM by their time",
            Self::SpeedUp => "time of the first planner divided by its own",
            Self::Programs | Self::KernelFaults => "time, ms",
            Self::Carried => "microVMs at once",
            Self::Price => "price of a microVM",
            Self::Total => "request to last page, ms",
        }
    }

    /// The parts of a bar that a picture distinguishes.
    pub(super) fn parts(self) -> &'static [&'static str] {
        match self {
            Self::Faults | Self::Fetch => &["in page faults", "other time"],
            Self::Parts => &["setup", "invocation"],
            _ => &[],
        }
    }

    /// Whether the guests measure the time of their touches.
    pub(super) fn times_touches(self) -> bool {
        matches!(self, Self::Faults | Self::FaultTimes | Self::Fetch | Self::FetchCounts)
    }
}
