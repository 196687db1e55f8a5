//! SYSTOR '22: snapshots on several tiers of storage, cold and warm.
//!
//! Every experiment is a set of cells: a function on a tier, with a number of microVMs, each of a
//! snapshot of its own. Cells that several experiments share are measured once. All tiers of a
//! function are measured in one session: each run has all of them, in an order of its own, so that
//! a change of the host's load affects every tier.

mod cell;
mod experiments;
#[cfg(test)]
mod page;
mod pictures;
mod results;
mod study;
mod tiers;

use firn_base::{PAGE_SIZE, format_bytes};
use firn_memory::trace::Trace;
use thiserror::Error;

pub use cell::{Cell, Time, Times};
pub use experiments::{Class, SystorExperiment, TierName, UnknownTier, View};
pub(super) use experiments::{
    FIGURE_2, FIGURE_3, FIGURE_4, FIGURE_5, FIGURE_6, FIGURE_7, TABLE_3, TABLE_4, TABLE_5,
};
pub use results::SystorOutcome;
pub use tiers::{GuestFault, MemoryParameters, Parameters, Realisation, TierUse};

use study::Study;
pub(super) use tiers::available;
use tiers::{ActivateError, ActiveTier, Media};

use super::{EXPERIMENTS, Way, command};
use crate::batch::BatchError;
use crate::harness::Harness;
use crate::host::HostError;
use crate::thaw::random_order;
use crate::tier::Tier;
use crate::traces::{LoadTraceError, load};

/// DRAM of a microVM beside its image: its monitor, page tables, and the player's lists.
const MONITOR: u64 = 8 << 20;
/// Guests at once, at most, that check the delays of a tier.
const PROVED_READERS: u32 = 4;

/// How the experiments run.
#[derive(Clone, Debug)]
pub struct SystorConfig {
    /// Runs of each cell.
    pub runs: u32,
    /// Only these functions of an experiment; empty for all.
    pub functions: Vec<String>,
    /// Only up to this number of microVMs at once.
    pub most: u32,
    /// Only these of an experiment's tiers; empty for all.
    pub only: Vec<TierName>,
    /// Tiers of this host that are measured beside those of the experiment.
    pub tiers: Vec<Tier>,
    /// The seed of the random order of each run's cells; none for that of the earlier results, or a
    /// random one.
    pub order: Option<u64>,
}

impl Default for SystorConfig {
    fn default() -> Self {
        let (functions, only, tiers) = (Vec::new(), Vec::new(), Vec::new());
        Self { runs: 5, functions, most: u32::MAX, only, tiers, order: None }
    }
}

/// Why an experiment has no results.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SystorError {
    /// A trace cannot be loaded.
    #[error(transparent)]
    Trace(#[from] LoadTraceError),
    /// The host cannot be described.
    #[error(transparent)]
    Host(#[from] HostError),
    /// A signal ended the measurement.
    #[error(transparent)]
    Interrupted(#[from] BatchError),
    /// The experiment has none of the functions.
    #[error("{experiment} has none of these functions; its functions are {known}")]
    NoFunction {
        /// The experiment.
        experiment: String,
        /// Its functions.
        known: String,
    },
    /// The experiment has none of the tiers.
    #[error("{experiment} has none of these tiers; its tiers are {known}")]
    NoTier {
        /// The experiment.
        experiment: String,
        /// Its tiers.
        known: String,
    },
}

/// The experiments of SYSTOR '22 in the table of all.
pub fn systor_experiments() -> impl Iterator<Item = &'static SystorExperiment> {
    EXPERIMENTS.iter().filter_map(|experiment| match &experiment.way {
        Way::Tiers(systor) => Some(systor),
        _ => None,
    })
}

/// A tier to be measured.
#[derive(Clone, Copy)]
enum Candidate<'a> {
    Paper(TierName),
    Real(&'a Tier),
}

impl<'a> Candidate<'a> {
    fn name(self) -> &'a str {
        match self {
            Self::Paper(name) => name.name(),
            Self::Real(tier) => &tier.name,
        }
    }

    fn activate(self, media: &mut Media) -> Result<ActiveTier, ActivateError> {
        match self {
            Self::Paper(name) => media.of_paper(name),
            Self::Real(tier) => ActiveTier::real(tier),
        }
    }

    /// DRAM that a microVM takes. An emulated disk is DRAM, and so is the page cache of a check.
    fn needs(self, trace: &Trace) -> u64 {
        let copies = match self {
            Self::Paper(name) if name.is_disk() => 2,
            _ => 1,
        };
        copies * trace.layout().total_bytes() + trace.written_pages() * PAGE_SIZE + MONITOR
    }

    /// Why so many microVMs do not fit into `room` bytes of DRAM or onto the tier.
    fn misfit(self, trace: &Trace, microvms: u32, room: u64) -> Option<String> {
        let needed = self.needs(trace) * u64::from(microvms);
        if needed > room {
            let (needed, room) = (format_bytes(needed), format_bytes(room));
            return Some(format!("needs {needed} of memory, and {room} may be used"));
        }
        let Self::Real(tier) = self else { return None };
        // Why a tier cannot be used is reported once, when it is set up.
        let space = tier.check().ok()?.free.min(tier.capacity);
        let needed = (trace.layout().total_bytes() + MONITOR) * u64::from(microvms);
        let (need, has) = (format_bytes(needed), format_bytes(space));
        (needed > space).then(|| format!("needs {need} of the tier, which has {has} for snapshots"))
    }
}

/// The position of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct At<'a> {
    trace: &'a str,
    tier: &'a str,
    microvms: u32,
    readahead: bool,
}

impl At<'_> {
    fn is_of(&self, cell: &Cell) -> bool {
        (self.trace, self.tier) == (&*cell.row.trace, &*cell.tier)
            && (self.microvms, self.readahead) == (cell.microvms, cell.readahead)
    }
}

impl SystorConfig {
    /// Runs an experiment. `known` are the results of earlier ones; their cells of the same build,
    /// host and number of runs are not measured again. `saved` gets the results after each
    /// function. A tier that this host cannot be given, and a cell that fails, are left out, with
    /// the reason.
    ///
    /// # Errors
    ///
    /// [`SystorError`].
    pub fn run(
        &self,
        experiment: &SystorExperiment,
        known: &[SystorOutcome],
        harness: &Harness<'_>,
        mut saved: impl FnMut(&SystorOutcome),
    ) -> Result<SystorOutcome, SystorError> {
        let (functions, candidates) = (self.functions(experiment)?, self.candidates(experiment)?);
        let mut outcome = SystorOutcome::new(experiment, self.runs)?;
        let ordered = |known: &&SystorOutcome| self.order.is_none_or(|order| order == known.order);
        let comparable = known.iter().filter(|known| known.is_comparable(&outcome));
        let known: Vec<&SystorOutcome> = comparable.filter(ordered).collect();
        let earlier = known.first().map(|known| known.order);
        outcome.order = self.order.or(earlier).unwrap_or_else(random_order);
        outcome.command = self.command(experiment.name);
        let room = available() / 10 * 8;
        let numbers: Vec<u32> =
            experiment.microvms.iter().copied().filter(|number| *number <= self.most).collect();
        let mut all = Vec::new();
        for &trace in &functions {
            let loaded = load(trace)?.trace;
            for (&microvms, candidate) in
                numbers.iter().flat_map(|n| candidates.iter().map(move |candidate| (n, candidate)))
            {
                let tier = candidate.name();
                if let Some(why) = candidate.misfit(&loaded, microvms, room) {
                    outcome.leave_out(trace, tier, microvms, why);
                    continue;
                }
                let cells = experiment.readahead.iter();
                all.extend(cells.map(|&readahead| At { trace, tier, microvms, readahead }));
            }
        }
        // What an experiment compares on a tier is measured in one session.
        let found = |at: &At<'_>| {
            let mut all = experiment.readahead.iter();
            let complete = all.all(|&on| find(&known, At { readahead: on, ..*at }).is_some());
            find(&known, *at).filter(|_| complete)
        };
        let study = Study { config: self, harness, room };
        let readers = numbers.iter().max().map_or(1, |most| (*most).min(PROVED_READERS));
        let (mut media, mut tiers) = (Media::default(), Vec::new());
        for candidate in &candidates {
            let name = candidate.name();
            let cells = all.iter().filter(|at| at.tier == name);
            let cells: Vec<_> = cells.map(found).collect();
            let Some(first) = cells.first() else { continue };
            if let Some((used, _)) = first.filter(|_| cells.iter().all(Option::is_some)) {
                outcome.tiers.push(used.clone());
                continue;
            }
            match study.set_up(*candidate, &mut media, readers)? {
                Ok(active) => {
                    outcome.tiers.push(active.used.clone());
                    tiers.push((*candidate, active));
                }
                Err(why) => {
                    outcome.left_out.insert(name.to_owned(), why);
                    // Its earlier results stay.
                    let used = cells.iter().flatten().next().map(|(used, _)| *used);
                    outcome.tiers.extend(used.cloned());
                }
            }
        }
        let mut missing = Vec::new();
        for at in &all {
            let active = tiers.iter().find(|(candidate, _)| candidate.name() == at.tier);
            match found(at) {
                Some((used, cell))
                    if active.is_none_or(|(_, active)| active.used.is_same(used)) =>
                {
                    outcome.cells.push(cell.clone());
                    outcome.noise.extend(find_noise(&known, *at).cloned());
                }
                _ if active.is_some() => missing.push(*at),
                _ => {}
            }
        }
        for (number, trace) in (1..).zip(&functions) {
            let missing: Vec<At<'_>> =
                missing.iter().filter(|at| at.trace == *trace).copied().collect();
            if missing.is_empty() {
                continue;
            }
            let (name, functions) = (experiment.name, functions.len());
            harness.progress.note(&format!("{name}: {trace}, function {number} of {functions}"));
            study.measure(&tiers, &missing, &mut outcome)?;
            saved(&outcome);
        }
        Ok(outcome)
    }

    /// The command that runs an experiment like this, without directories.
    fn command(&self, experiment: &str) -> String {
        let mut options = vec![format!("--runs {}", self.runs)];
        let only: Vec<&str> = self.only.iter().map(|tier| tier.name()).collect();
        let tiers: Vec<&str> = self.tiers.iter().map(|tier| tier.name.as_str()).collect();
        for (option, names) in [("--only", only), ("--tier", tiers)] {
            options.extend((!names.is_empty()).then(|| format!("{option} {}", names.join(","))));
        }
        command(experiment, options, &self.functions, self.most)
    }

    /// The functions of an experiment that are measured.
    fn functions<'a>(&self, of: &'a SystorExperiment) -> Result<Vec<&'a str>, SystorError> {
        let wanted = |name: &&str| {
            self.functions.is_empty() || self.functions.iter().any(|function| function == name)
        };
        let functions: Vec<&str> = of.functions.iter().copied().filter(wanted).collect();
        if functions.is_empty() {
            let (experiment, known) = (of.name.to_owned(), of.functions.join(", "));
            return Err(SystorError::NoFunction { experiment, known });
        }
        Ok(functions)
    }

    /// The tiers that are measured.
    fn candidates(&self, of: &SystorExperiment) -> Result<Vec<Candidate<'_>>, SystorError> {
        let wanted = |name: &TierName| self.only.is_empty() || self.only.contains(name);
        let paper = of.tiers.iter().copied().filter(wanted).map(Candidate::Paper);
        let all: Vec<_> = paper.chain(self.tiers.iter().map(Candidate::Real)).collect();
        if all.is_empty() {
            let known: Vec<&str> = of.tiers.iter().map(|tier| tier.name()).collect();
            let (experiment, known) = (of.name.to_owned(), known.join(", "));
            return Err(SystorError::NoTier { experiment, known });
        }
        Ok(all)
    }
}

/// A cell that was measured before, and its tier.
fn find<'a>(known: &[&'a SystorOutcome], at: At<'_>) -> Option<(&'a TierUse, &'a Cell)> {
    known.iter().find_map(|outcome| {
        let cell = outcome.cells.iter().find(|cell| at.is_of(cell))?;
        Some((outcome.tiers.iter().find(|used| used.name == at.tier)?, cell))
    })
}

/// The second measurement of a cell, to see the noise.
fn find_noise<'a>(known: &[&'a SystorOutcome], at: At<'_>) -> Option<&'a Cell> {
    known.iter().find_map(|outcome| outcome.noise.iter().find(|cell| at.is_of(cell)))
}

#[cfg(test)]
mod tests;
