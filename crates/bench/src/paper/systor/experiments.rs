//! The experiments of SYSTOR '22, and what the paper reports for them.

use serde::{Deserialize, Serialize};

use super::cell::{Cell, Time};
use super::results::smallest_and_largest;

/// An experiment of SYSTOR '22.
#[derive(Clone, Copy, Debug)]
pub struct SystorExperiment {
    /// Its name on the command line and of its files, such as `systor-figure-2`.
    pub name: &'static str,
    /// The paper, section and figure.
    pub source: &'static str,
    /// The subject of the figure.
    pub title: &'static str,
    /// The functions, as traces.
    pub functions: &'static [&'static str],
    /// The tiers.
    pub tiers: &'static [TierName],
    /// Numbers of microVMs at once, each of a snapshot of its own.
    pub microvms: &'static [u32],
    /// The kernel's read-ahead, off or on.
    pub readahead: &'static [bool],
    /// How its results are shown.
    pub view: View,
}

/// The tiers of the paper's table 1, and CXL memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TierName {
    /// DRAM.
    Dram,
    /// CXL memory, which the paper does not have.
    Cxl,
    /// Optane persistent memory.
    Dcpm,
    /// Optane NVMe.
    Nvme,
    /// SATA flash.
    Ssd,
}

/// How results are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum View {
    /// Cold and warm, with the parts of cold.
    Breakdown,
    /// Each part of cold, by tier.
    Parts,
    /// Cold by the number of microVMs.
    Cold,
    /// Warm by the number of microVMs.
    Warm,
    /// The class of each function.
    Classes,
    /// Working sets, and what is read from the medium.
    WorkingSets,
    /// Cold divided by warm.
    Slowdown,
}

/// The paper's classes of functions (table 3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Handled in less than 100 ms when warm (takeaway 2).
    Light,
    /// Between the others.
    Mid,
    /// More than 500 ms when warm (takeaway 4).
    Heavy,
}

impl std::fmt::Display for Class {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Light => "Light",
            Self::Mid => "Mid",
            Self::Heavy => "Heavy",
        })
    }
}

impl Class {
    /// All of them, from the shortest.
    pub(super) const ALL: [Self; 3] = [Self::Light, Self::Mid, Self::Heavy];

    /// The class of a function by its warm latency. The paper names no limits in table 3; these are
    /// those of its takeaways 2 and 4.
    #[must_use]
    pub fn of_warm(ms: f64) -> Self {
        match ms {
            _ if ms < 100.0 => Self::Light,
            _ if ms > 500.0 => Self::Heavy,
            _ => Self::Mid,
        }
    }
}

/// No tier of the experiments has the name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no tier of the experiments: use {known}", known = TierName::ALL.map(TierName::name).join(", "))]
pub struct UnknownTier(String);

impl std::str::FromStr for TierName {
    type Err = UnknownTier;

    fn from_str(name: &str) -> Result<Self, UnknownTier> {
        let found = Self::ALL.into_iter().find(|tier| tier.name() == name);
        found.ok_or_else(|| UnknownTier(name.to_owned()))
    }
}

impl TierName {
    /// All of them, from the fastest.
    pub(super) const ALL: [Self; 5] = [Self::Dram, Self::Cxl, Self::Dcpm, Self::Nvme, Self::Ssd];

    /// Whether it is emulated by a disk over memory.
    pub(super) fn is_disk(self) -> bool {
        matches!(self, Self::Nvme | Self::Ssd)
    }

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Dram => "dram",
            Self::Cxl => "cxl",
            Self::Dcpm => "dcpm",
            Self::Nvme => "nvme",
            Self::Ssd => "ssd",
        }
    }
}

/// A function of the paper, with its rows of tables 3 and 4.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PaperFunction {
    pub(crate) trace: &'static str,
    pub(crate) class: Class,
    /// Working set, MB.
    pub(crate) working_set: f64,
    /// Share of its pages that are only read, per cent.
    pub(crate) read_only: f64,
    /// Reads served by persistent memory, MB.
    pub(crate) dcpm_reads: f64,
}

const fn function(
    trace: &'static str,
    class: Class,
    working_set: f64,
    read_only: f64,
    dcpm_reads: f64,
) -> PaperFunction {
    PaperFunction { trace, class, working_set, read_only, dcpm_reads }
}

pub(crate) const PAPER_FUNCTIONS: [PaperFunction; 10] = [
    function("hello-a2", Class::Light, 9.5, 70.0, 7.7),
    function("lr_serving-a2", Class::Light, 13.0, 68.0, 11.0),
    function("pyaes-a2", Class::Light, 10.0, 67.0, 8.7),
    function("chameleon-a2", Class::Mid, 16.0, 60.0, 15.0),
    function("cnn_serving-a2", Class::Mid, 49.0, 44.0, 76.0),
    function("image_rotate-a2", Class::Mid, 32.0, 44.0, 34.0),
    function("json_serdes-a2", Class::Mid, 45.0, 32.0, 50.0),
    function("matmul_fb-a2", Class::Heavy, 18.0, 44.0, 18.0),
    function("video_processing-a2", Class::Heavy, 51.0, 43.0, 59.0),
    function("lr_training-a2", Class::Heavy, 101.0, 23.0, 185.0),
];

/// The paper's row of a function.
pub(crate) fn paper_function(trace: &str) -> Option<&'static PaperFunction> {
    PAPER_FUNCTIONS.iter().find(|function| function.trace == trace)
}

const ALL: &[&str] = &[
    "hello-a2",
    "lr_serving-a2",
    "pyaes-a2",
    "chameleon-a2",
    "cnn_serving-a2",
    "image_rotate-a2",
    "json_serdes-a2",
    "matmul_fb-a2",
    "video_processing-a2",
    "lr_training-a2",
];
/// One function of each class.
const ONE_EACH: &[&str] = &["hello-a2", "json_serdes-a2", "matmul_fb-a2"];
const TIERS: &[TierName] = &TierName::ALL;
const OF_PAPER: &[TierName] = &[TierName::Dcpm, TierName::Nvme, TierName::Ssd];
const BUFFERED: &[TierName] = &[TierName::Nvme, TierName::Ssd];
const SCALE: &[u32] = &[1, 2, 4, 8, 16, 32];
const OFF: &[bool] = &[false];

pub(crate) const FIGURE_2: SystorExperiment = SystorExperiment {
    name: "systor-figure-2",
    source: "SYSTOR '22 4.1, figure 2",
    title: "Cold and warm invocations by tier",
    functions: ALL,
    tiers: TIERS,
    microvms: &[1],
    readahead: OFF,
    view: View::Breakdown,
};
pub(crate) const FIGURE_3: SystorExperiment = SystorExperiment {
    name: "systor-figure-3",
    source: "SYSTOR '22 4.1.1, figure 3",
    title: "Parts of a cold invocation by tier",
    functions: ALL,
    tiers: TIERS,
    microvms: &[1],
    readahead: OFF,
    view: View::Parts,
};
pub(crate) const TABLE_3: SystorExperiment = SystorExperiment {
    name: "systor-table-3",
    source: "SYSTOR '22 4.1, table 3",
    title: "Classes of functions",
    functions: ALL,
    tiers: TIERS,
    microvms: &[1],
    readahead: OFF,
    view: View::Classes,
};
pub(crate) const TABLE_4: SystorExperiment = SystorExperiment {
    name: "systor-table-4",
    source: "SYSTOR '22 4.1.1, table 4",
    title: "Working sets, and reads of the medium",
    functions: ALL,
    tiers: TIERS,
    microvms: &[1],
    readahead: OFF,
    view: View::WorkingSets,
};
pub(crate) const TABLE_5: SystorExperiment = SystorExperiment {
    name: "systor-table-5",
    source: "SYSTOR '22 4.1.2, table 5",
    title: "Cold divided by warm",
    functions: ALL,
    tiers: TIERS,
    microvms: &[1],
    readahead: OFF,
    view: View::Slowdown,
};
pub(crate) const FIGURE_4: SystorExperiment = SystorExperiment {
    name: "systor-figure-4",
    source: "SYSTOR '22 4.2.1, figure 4",
    title: "Cold invocations by the number of microVMs",
    functions: ALL,
    tiers: OF_PAPER,
    microvms: SCALE,
    readahead: OFF,
    view: View::Cold,
};
pub(crate) const FIGURE_5: SystorExperiment = SystorExperiment {
    name: "systor-figure-5",
    source: "SYSTOR '22 4.2.1, figure 5",
    title: "Cold invocations by the number of microVMs, one function of each class",
    functions: ONE_EACH,
    tiers: OF_PAPER,
    microvms: SCALE,
    readahead: OFF,
    view: View::Cold,
};
pub(crate) const FIGURE_6: SystorExperiment = SystorExperiment {
    name: "systor-figure-6",
    source: "SYSTOR '22 4.2.2, figure 6",
    title: "Warm invocations by the number of microVMs",
    functions: ONE_EACH,
    tiers: OF_PAPER,
    microvms: SCALE,
    readahead: OFF,
    view: View::Warm,
};
pub(crate) const FIGURE_7: SystorExperiment = SystorExperiment {
    name: "systor-figure-7",
    source: "SYSTOR '22 4.3, figure 7",
    title: "Cold invocations with read-ahead",
    functions: ONE_EACH,
    tiers: BUFFERED,
    microvms: SCALE,
    readahead: &[false, true],
    view: View::Cold,
};

/// A statement of the paper: times of one tier divided by those of another, for the functions of a
/// class.
pub(crate) struct Claim {
    /// The experiments that it belongs to.
    views: &'static [View],
    classes: &'static [Class],
    over: Side,
    under: Side,
    /// The paper's smallest and largest ratio.
    pub(crate) paper: (f64, f64),
}

#[derive(Clone, Copy)]
struct Side {
    tier: TierName,
    time: Time,
    readahead: bool,
}

const fn side(tier: TierName, time: Time) -> Side {
    Side { tier, time, readahead: false }
}

const fn claim(
    views: &'static [View],
    classes: &'static [Class],
    time: Time,
    tiers: (TierName, TierName),
    paper: (f64, f64),
) -> Claim {
    Claim { views, classes, over: side(tiers.0, time), under: side(tiers.1, time), paper }
}

const fn slowdown(class: &'static [Class], tier: TierName, paper: (f64, f64)) -> Claim {
    let (over, under) = (side(tier, Time::Cold), side(tier, Time::Warm));
    Claim { views: &[View::Slowdown], classes: class, over, under, paper }
}

const LIGHT: &[Class] = &[Class::Light];
const MID: &[Class] = &[Class::Mid];
const HEAVY: &[Class] = &[Class::Heavy];
const EVERY: &[Class] = &[Class::Light, Class::Mid, Class::Heavy];
const SSD_NVME: (TierName, TierName) = (TierName::Ssd, TierName::Nvme);
const NVME_DCPM: (TierName, TierName) = (TierName::Nvme, TierName::Dcpm);
const DCPM_NVME: (TierName, TierName) = (TierName::Dcpm, TierName::Nvme);
const DCPM_DRAM: (TierName, TierName) = (TierName::Dcpm, TierName::Dram);

/// What the paper reports in sections 4.1 and 4.2, and in table 5.
pub(crate) const CLAIMS: &[Claim] = &[
    claim(&[View::Breakdown], LIGHT, Time::Cold, SSD_NVME, (5.0, 6.0)),
    claim(&[View::Breakdown], MID, Time::Cold, SSD_NVME, (3.2, 4.7)),
    claim(&[View::Breakdown], HEAVY, Time::Cold, SSD_NVME, (1.25, 1.51)),
    claim(&[View::Breakdown], LIGHT, Time::Cold, NVME_DCPM, (2.3, 2.4)),
    claim(&[View::Breakdown], MID, Time::Cold, NVME_DCPM, (1.68, 1.94)),
    claim(&[View::Breakdown], HEAVY, Time::Cold, NVME_DCPM, (1.09, 1.10)),
    claim(&[View::Breakdown], LIGHT, Time::Warm, DCPM_DRAM, (1.0, 1.24)),
    claim(&[View::Breakdown], MID, Time::Warm, DCPM_DRAM, (1.0, 1.04)),
    claim(&[View::Breakdown], HEAVY, Time::Warm, DCPM_DRAM, (1.0, 1.04)),
    claim(&[View::Parts], EVERY, Time::Connecting, SSD_NVME, (4.5, 6.3)),
    claim(&[View::Parts], EVERY, Time::Connecting, NVME_DCPM, (2.5, 3.0)),
    claim(&[View::Parts], LIGHT, Time::Executing, SSD_NVME, (5.6, 6.9)),
    claim(&[View::Parts], MID, Time::Executing, SSD_NVME, (2.8, 4.0)),
    claim(&[View::Parts], HEAVY, Time::Executing, SSD_NVME, (1.15, 1.41)),
    claim(&[View::Parts], LIGHT, Time::Executing, NVME_DCPM, (2.0, 2.7)),
    claim(&[View::Parts], MID, Time::Executing, NVME_DCPM, (1.6, 1.85)),
    claim(&[View::Parts], HEAVY, Time::Executing, NVME_DCPM, (1.04, 1.09)),
    claim(&[View::Cold], LIGHT, Time::Cold, SSD_NVME, (5.2, 8.2)),
    claim(&[View::Cold], MID, Time::Cold, SSD_NVME, (3.2, 7.5)),
    claim(&[View::Cold], HEAVY, Time::Cold, SSD_NVME, (1.3, 2.0)),
    claim(&[View::Cold], LIGHT, Time::Cold, NVME_DCPM, (2.1, 2.8)),
    claim(&[View::Cold], MID, Time::Cold, NVME_DCPM, (1.0, 2.0)),
    claim(&[View::Cold], HEAVY, Time::Cold, NVME_DCPM, (1.01, 1.97)),
    claim(&[View::Warm], LIGHT, Time::Warm, SSD_NVME, (1.0, 4.0)),
    claim(&[View::Warm], LIGHT, Time::Warm, DCPM_NVME, (1.1, 3.7)),
    claim(&[View::Warm], MID, Time::Warm, DCPM_NVME, (0.65, 1.35)),
    claim(&[View::Warm], HEAVY, Time::Warm, DCPM_NVME, (0.95, 1.05)),
    slowdown(LIGHT, TierName::Dcpm, (6.3, 9.0)),
    slowdown(LIGHT, TierName::Nvme, (9.4, 17.4)),
    slowdown(LIGHT, TierName::Ssd, (19.4, 29.4)),
    slowdown(MID, TierName::Dcpm, (1.6, 4.0)),
    slowdown(MID, TierName::Nvme, (2.5, 7.5)),
    slowdown(MID, TierName::Ssd, (6.6, 17.8)),
    slowdown(HEAVY, TierName::Dcpm, (1.05, 1.1)),
    slowdown(HEAVY, TierName::Nvme, (1.13, 1.18)),
    slowdown(HEAVY, TierName::Ssd, (1.44, 1.77)),
    Claim {
        views: &[View::Cold],
        classes: LIGHT,
        over: Side { tier: TierName::Ssd, time: Time::Cold, readahead: true },
        under: side(TierName::Ssd, Time::Cold),
        paper: (1.0, 10.0),
    },
];

impl Claim {
    /// The claims for a view.
    pub(crate) fn of(view: View) -> impl Iterator<Item = &'static Self> {
        CLAIMS.iter().filter(move |claim| claim.views.contains(&view))
    }

    /// The smallest and the largest ratio of the measured functions and numbers of microVMs.
    pub(crate) fn measured(&self, cells: &[Cell]) -> Option<(f64, f64)> {
        let of_class = |cell: &&Cell| {
            paper_function(&cell.row.trace).is_some_and(|f| self.classes.contains(&f.class))
        };
        let on = |cell: &Cell, side: Side| {
            cell.tier == side.tier.name() && cell.readahead == side.readahead
        };
        let ratios = cells.iter().filter(of_class).filter(|cell| on(cell, self.over));
        let ratios = ratios.filter_map(|over| {
            let mut others = cells.iter().filter(|cell| on(cell, self.under));
            let under = others
                .find(|cell| cell.row.trace == over.row.trace && cell.microvms == over.microvms)?;
            let ratio = over.median(self.over.time)? / under.median(self.under.time)?;
            ratio.is_finite().then_some(ratio)
        });
        smallest_and_largest(ratios)
    }

    /// The claim in words.
    pub(crate) fn text(&self) -> String {
        let classes: Vec<String> = self.classes.iter().map(Class::to_string).collect();
        let name = |side: Side| {
            let readahead = if side.readahead { " with read-ahead" } else { "" };
            format!("{} on {}{readahead}", side.time, side.tier.name())
        };
        format!("{}: {} / {}", classes.join(", "), name(self.over), name(self.under))
    }
}
