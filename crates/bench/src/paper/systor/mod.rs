//! SYSTOR '22: snapshots on several tiers of storage, cold and warm.
//!
//! Every experiment is a set of cells: a function on a tier, with a number of microVMs, each of a
//! snapshot of its own. Cells that several experiments share are measured once.

mod experiments;
mod results;
mod tiers;

use std::collections::BTreeMap;
use std::num::NonZero;

use firn_base::{error_chain, format_bytes};
use thiserror::Error;

pub use experiments::{Class, SYSTOR_EXPERIMENTS, SystorExperiment, TierName, View};
pub use results::{Cell, SystorOutcome, Time};
pub use tiers::{Realisation, TierUse};

use tiers::{ActiveTier, available};

use crate::cache::Cache;
use crate::harness::Harness;
use crate::host::{Host, HostError};
use crate::player::{GapFactor, Leaves};
use crate::players::{PlayersConfig, PlayersError, Prepared};
use crate::progress::Part;
use crate::thaw::{Session, SessionError};
use crate::tier::{EmulateError, Tier};
use crate::traces::{LoadTraceError, load};

/// Instructions of replayed work between repeated accesses: a processor whose last cache misses
/// once in a thousand instructions.
const AGAIN: u32 = 1000;
/// The function whose touches count as connecting a guest. It computes nothing, so it is the
/// monitor, the kernel and the runtime answering a request.
const CONNECTING: &str = "hello-a";
/// The trace that shows what a guest's cold fault takes on a tier.
const FAULTS: &str = "sequential-read:8M";

/// How the experiments run.
#[derive(Clone, Debug)]
pub struct SystorConfig {
    /// Runs of each cell.
    pub runs: u32,
    /// Only these functions of an experiment; empty for all.
    pub functions: Vec<String>,
    /// Only up to this number of microVMs at once.
    pub most: u32,
    /// Tiers of this host that are measured beside those of the paper.
    pub tiers: Vec<Tier>,
}

impl Default for SystorConfig {
    fn default() -> Self {
        Self { runs: 5, functions: Vec::new(), most: u32::MAX, tiers: Vec::new() }
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
    /// There are no players to measure.
    #[error(transparent)]
    Players(#[from] PlayersError),
    /// A session failed.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// The limits of an emulated disk cannot be changed.
    #[error(transparent)]
    Emulate(#[from] EmulateError),
    /// The experiment has none of the functions.
    #[error("{experiment} has none of these functions; its functions are {known}")]
    NoFunction {
        /// The experiment.
        experiment: String,
        /// Its functions.
        known: String,
    },
}

/// Finds experiments by their names; `systor` selects every one.
#[must_use]
pub fn find_systor(name: &str) -> Vec<&'static SystorExperiment> {
    SYSTOR_EXPERIMENTS.iter().filter(|e| name == "systor" || name == e.name).collect()
}

/// A tier to be measured.
enum Candidate<'a> {
    Paper(TierName),
    Real(&'a Tier),
}

impl Candidate<'_> {
    fn name(&self) -> &str {
        match self {
            Self::Paper(name) => name.name(),
            Self::Real(tier) => &tier.name,
        }
    }

    fn activate(&self, scales: bool) -> Result<ActiveTier, tiers::ActivateError> {
        match self {
            Self::Paper(name) => ActiveTier::of_paper(*name, scales),
            Self::Real(tier) => ActiveTier::real(tier),
        }
    }
}

/// The position of a cell.
#[derive(Clone, Copy)]
struct At<'a> {
    trace: &'a str,
    tier: &'a str,
    microvms: u32,
    readahead: bool,
}

impl SystorConfig {
    /// Runs an experiment. `known` are the results of earlier ones; their cells of the same build,
    /// host and number of runs are not measured again. `saved` gets the results after each function
    /// and tier. A tier that this host cannot be given is left out, with the reason.
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
        let wanted = |name: &&str| {
            self.functions.is_empty() || self.functions.iter().any(|function| function == name)
        };
        let functions: Vec<&str> = experiment.functions.iter().copied().filter(wanted).collect();
        if functions.is_empty() {
            let (experiment, known) = (experiment.name.to_owned(), experiment.functions.join(", "));
            return Err(SystorError::NoFunction { experiment, known });
        }
        let connect = load(CONNECTING)?.trace.touches().len() as u64;
        let mut outcome = SystorOutcome {
            name: experiment.name.to_owned(),
            source: experiment.source.to_owned(),
            title: experiment.title.to_owned(),
            view: experiment.view,
            host: Host::of(&std::env::temp_dir())?,
            runs: self.runs,
            again: AGAIN,
            connect,
            tiers: Vec::new(),
            cells: Vec::new(),
            left_out: BTreeMap::new(),
        };
        "the tiers".clone_into(&mut outcome.host.medium);
        let same = |other: &&SystorOutcome| {
            (&other.host, other.runs, other.again, other.connect)
                == (&outcome.host, outcome.runs, outcome.again, outcome.connect)
        };
        let known: Vec<&SystorOutcome> = known.iter().filter(same).collect();
        let numbers: Vec<u32> =
            experiment.microvms.iter().copied().filter(|number| *number <= self.most).collect();
        let scales = experiment.microvms.len() > 1;
        let paper = experiment.tiers.iter().copied().map(Candidate::Paper);
        let candidates: Vec<Candidate<'_>> =
            paper.chain(self.tiers.iter().map(Candidate::Real)).collect();
        for candidate in &candidates {
            let name = candidate.name();
            let at = |trace, microvms, readahead| At { trace, tier: name, microvms, readahead };
            let all: Vec<At<'_>> = functions
                .iter()
                .flat_map(|trace| numbers.iter().map(move |number| (*trace, *number)))
                .flat_map(|(trace, number)| {
                    experiment.readahead.iter().map(move |readahead| (trace, number, *readahead))
                })
                .map(|(trace, number, readahead)| at(trace, number, readahead))
                .collect();
            let reused = all.iter().filter_map(|at| find(&known, *at, scales));
            let reused: Vec<(&TierUse, &Cell)> = reused.collect();
            if reused.len() == all.len() {
                outcome.tiers.extend(reused.first().map(|(used, _)| (*used).clone()));
                outcome.cells.extend(reused.into_iter().map(|(_, cell)| cell.clone()));
                continue;
            }
            let mut active = match candidate.activate(scales) {
                Ok(active) => active,
                Err(error) => {
                    outcome.left_out.insert(name.to_owned(), error_chain(&error));
                    continue;
                }
            };
            let study = Study { config: self, harness, connect };
            study.prove(&mut active)?;
            outcome.tiers.push(active.used.clone());
            for trace in &functions {
                let missing: Vec<At<'_>> = all
                    .iter()
                    .copied()
                    .filter(|at| at.trace == *trace && find(&known, *at, scales).is_none())
                    .collect();
                let found = reused.iter().filter(|(_, cell)| cell.row.trace == **trace);
                outcome.cells.extend(found.map(|(_, cell)| (*cell).clone()));
                study.measure(&active, &missing, &mut outcome)?;
                saved(&outcome);
            }
        }
        Ok(outcome)
    }
}

/// A cell that was measured before, on a tier with the same limits.
fn find<'a>(
    known: &[&'a SystorOutcome],
    at: At<'_>,
    scales: bool,
) -> Option<(&'a TierUse, &'a Cell)> {
    let of_scale =
        |outcome: &&&SystorOutcome| matches!(outcome.view, View::Cold | View::Warm) == scales;
    known.iter().filter(of_scale).find_map(|outcome| {
        let cell = outcome.cells.iter().find(|cell| {
            cell.row.trace == at.trace
                && cell.tier == at.tier
                && cell.microvms == at.microvms
                && cell.readahead == at.readahead
        })?;
        let used = outcome.tiers.iter().find(|used| used.name == at.tier)?;
        Some((used, cell))
    })
}

/// The measurements on one tier.
struct Study<'a> {
    config: &'a SystorConfig,
    harness: &'a Harness<'a>,
    connect: u64,
}

impl Study<'_> {
    fn players(&self, tier: &ActiveTier, trace: &str, readahead: &[bool]) -> PlayersConfig {
        let planner = |readahead: &bool| {
            format!("firecracker:readahead={}", if *readahead { "on" } else { "off" })
        };
        PlayersConfig {
            planners: readahead.iter().map(planner).collect(),
            traces: vec![trace.to_owned()],
            directory: Some(tier.path().to_owned()),
            leaves: Leaves::Recorded,
            gaps: GapFactor::FULL,
            dense: true,
            again: NonZero::new(AGAIN),
            connect: Some(self.connect),
            medium: tier.used.model,
            ..PlayersConfig::default()
        }
    }

    fn session(&self, prepared: &Prepared, cache: Cache, concurrency: u32, warm: bool) -> Session {
        Session {
            program: self.harness.program.clone(),
            players: prepared.players.clone(),
            subjects: prepared.subjects.clone(),
            runs: self.config.runs,
            warm_up: 0,
            concurrency,
            caches: vec![cache],
            standby: false,
            open_loop: 0,
            mix: None,
            faults: false,
            warm,
        }
    }

    /// Measures a guest's cold faults on an emulated disk, without limits and with them.
    fn prove(&self, tier: &mut ActiveTier) -> Result<(), SystorError> {
        if tier.used.throttle.is_none() {
            return Ok(());
        }
        let players = PlayersConfig {
            gaps: GapFactor::NONE,
            again: None,
            connect: None,
            ..self.players(tier, FAULTS, &[false])
        };
        let prepared = players.prepare(None, 1, 1, self.harness.progress)?;
        let mut faults = Vec::new();
        for limited in [false, true] {
            tier.limit(limited)?;
            let session = self.session(&prepared, tier.cache(), 1, false);
            let (host, progress) = (prepared.host.clone(), self.harness.progress);
            let results = session.run(host, self.harness.interrupt, progress)?;
            faults.extend(results.results.iter().map(|row| row.ns_per_page.median));
        }
        tier.limit(false)?;
        if let [without, with] = faults[..] {
            tier.used.guest_fault_ns = Some((without, with));
        }
        Ok(())
    }

    /// Measures cells of one function.
    fn measure(
        &self,
        tier: &ActiveTier,
        cells: &[At<'_>],
        outcome: &mut SystorOutcome,
    ) -> Result<(), SystorError> {
        let Some(At { trace, .. }) = cells.first() else { return Ok(()) };
        let mut readahead: Vec<bool> = cells.iter().map(|at| at.readahead).collect();
        readahead.sort_unstable();
        readahead.dedup();
        let mut numbers: Vec<u32> = cells.iter().map(|at| at.microvms).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let loaded = load(trace)?.trace;
        // The snapshots of an emulated or modelled tier are DRAM, and so are the page cache of
        // their check and what the guests copy.
        let each = loaded.layout().total_bytes() * 5 / 2;
        let room = available() / 10 * 8;
        numbers.retain(|&number| {
            let needed = each * u64::from(number);
            if needed > room {
                let why = format!(
                    "needs {} of memory, and {} are available",
                    format_bytes(needed),
                    format_bytes(room)
                );
                let what = format!("{trace} on {} with {number} microVMs", tier.used.name);
                outcome.left_out.insert(what, why);
            }
            needed <= room
        });
        let Some(&most) = numbers.last() else { return Ok(()) };
        let players = self.players(tier, trace, &readahead);
        tier.limit(false)?;
        let prepared = players.prepare(None, most, most, self.harness.progress)?;
        tier.limit(true)?;
        let progress = Part { name: &tier.used.name, progress: self.harness.progress };
        for number in numbers {
            let mut session = self.session(&prepared, tier.cache(), number, true);
            for player in &mut session.players {
                player.others.truncate(usize::try_from(number - 1).unwrap_or_default());
            }
            let host = prepared.host.clone();
            let results = session.run(host, self.harness.interrupt, &progress)?;
            for row in results.results {
                let readahead = row.planner.ends_with("on");
                outcome.cells.push(Cell {
                    tier: tier.used.name.clone(),
                    microvms: number,
                    readahead,
                    pages: loaded.touched_pages(),
                    written: loaded.written_pages(),
                    row,
                });
            }
        }
        Ok(tier.limit(false)?)
    }
}

#[cfg(test)]
mod tests;
