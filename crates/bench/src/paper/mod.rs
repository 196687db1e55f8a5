//! The papers' experiments, as far as the traces and this host allow.
//!
//! All of them differ from the papers in the same ways: the player replays the functions, the host
//! has fewer processors, and all planners share one executor, so that they differ in the restore
//! alone.

mod experiments;
mod outcome;
pub mod systor;

use std::collections::BTreeMap;
use std::path::PathBuf;

use thiserror::Error;

use firn_base::error_chain;
use firn_memory::planners::{Store, parse};
use firn_run::cgroup::CgroupError;

pub use experiments::{EXPERIMENTS, Experiment, Quantity, Shape, UnknownExperiment, find};
pub use outcome::{Outcome, Place};

use crate::batch::Jails;
use crate::capacity::{Budget, FillError, fill};
use crate::cgroup::MemoryLimit;
use crate::harness::Harness;
use crate::host::{Host, HostError};
use crate::player::{GapFactor, Leaves};
use crate::players::{PlayersConfig, PlayersError, Prepared, sanitises};
use crate::progress::Part;
use crate::thaw::{RESULTS_VERSION, Session, SessionError, to_repeat};

/// How the papers' experiments run.
#[derive(Clone, Debug)]
pub struct PaperConfig {
    /// Runs of each planner on each trace.
    pub runs: u32,
    /// The socket of a pool's manager, for the planners that map snapshots from a pool.
    pub pool: Option<PathBuf>,
    /// The directory in which the snapshots are made, on the medium that is measured. By default it
    /// is the directory for temporary files.
    pub directory: Option<PathBuf>,
}

impl Default for PaperConfig {
    fn default() -> Self {
        Self { runs: 5, pool: None, directory: None }
    }
}

/// Why an experiment has no results.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PaperError {
    /// There are no players to measure.
    #[error(transparent)]
    Players(#[from] PlayersError),
    /// The host cannot be described.
    #[error(transparent)]
    Host(#[from] HostError),
    /// Memory cannot be limited.
    #[error("cannot limit memory")]
    Limit(#[from] CgroupError),
    /// A session failed.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// A budget was not filled.
    #[error(transparent)]
    Fill(#[from] FillError),
}

impl PaperConfig {
    /// Runs an experiment. A planner that this host cannot run, or that fails, is left out of the
    /// results, with the reason.
    ///
    /// # Errors
    ///
    /// [`PaperError`].
    pub fn run(
        &self,
        experiment: &Experiment,
        harness: &Harness<'_>,
    ) -> Result<Outcome, PaperError> {
        Runner { config: self, experiment, harness }.run()
    }
}

/// The run of one experiment.
struct Runner<'a> {
    config: &'a PaperConfig,
    experiment: &'a Experiment,
    harness: &'a Harness<'a>,
}

impl Runner<'_> {
    fn run(&self) -> Result<Outcome, PaperError> {
        let Experiment { name, source, title, quantity, unsanitised, .. } = *self.experiment;
        let mut left_out = BTreeMap::new();
        let mut planners = Vec::new();
        for written in self.experiment.planners {
            let reason = match parse(written) {
                Ok(planner)
                    if self.config.pool.is_some() || planner.store() == Store::Directory =>
                {
                    planners.push((*written).to_owned());
                    continue;
                }
                Ok(_) => "it maps snapshots from a pool: name a pool with --pool".to_owned(),
                Err(error) => error.to_string(),
            };
            left_out.insert((*written).to_owned(), reason);
        }
        let mut outcome = Outcome {
            version: RESULTS_VERSION,
            name: name.to_owned(),
            source: source.to_owned(),
            title: title.to_owned(),
            quantity,
            host: Host::of(&std::env::temp_dir())?,
            unsanitised,
            order: fastrand::u32(..).into(),
            sessions: Vec::new(),
            capacities: None,
            left_out,
        };
        let (sanitising, others): (Vec<_>, Vec<_>) =
            planners.into_iter().partition(|planner| !unsanitised || sanitises(planner));
        for (planners, unsanitised) in [(others, unsanitised), (sanitising, false)] {
            if !planners.is_empty() {
                self.measure(planners, unsanitised, &mut outcome)?;
            }
        }
        Ok(outcome)
    }

    /// Freezes the players, and measures these planners at each place on the scale.
    fn measure(
        &self,
        planners: Vec<String>,
        unsanitised: bool,
        outcome: &mut Outcome,
    ) -> Result<(), PaperError> {
        let progress = self.harness.progress;
        let players = PlayersConfig {
            planners,
            traces: self.experiment.traces.iter().map(|trace| (*trace).to_owned()).collect(),
            directory: self.config.directory.clone(),
            pool: self.config.pool.clone(),
            leaves: Leaves::Recorded,
            gaps: if self.experiment.work { GapFactor::FULL } else { GapFactor::NONE },
            dense: true,
            unsanitised,
            same_input: self.experiment.same_input,
            ..PlayersConfig::default()
        };
        let mut pool = players.connect(progress)?;
        let snapshots = match self.experiment.shape {
            Shape::Concurrency(numbers) if self.experiment.different => {
                numbers.iter().copied().max().unwrap_or(1)
            }
            _ => 1,
        };
        let prepared = players.prepare(pool.as_mut(), snapshots, 1, self.harness)?;
        // This description includes the pool.
        outcome.host = prepared.host.clone();
        let unfit = prepared.left_out.iter();
        outcome.left_out.extend(unfit.map(|left| (left.planner.clone(), left.reason.clone())));
        match self.experiment.shape {
            Shape::Concurrency(numbers) => {
                for &number in numbers {
                    self.session(&number.to_string(), number, &prepared, outcome)?;
                }
            }
            Shape::Memory(number, limits) => {
                for &limit in limits {
                    let place = format!("{} MiB", limit >> 20);
                    let _limit = MemoryLimit::enter(limit)?;
                    self.session(&place, number, &prepared, outcome)?;
                }
            }
            Shape::Capacity(memory) => {
                let budget = Budget { memory, ..Budget::default() };
                let pool = pool.as_mut();
                outcome.capacities = Some(fill(&budget, &prepared, pool, self.harness)?);
            }
        }
        Ok(())
    }

    fn jails(&self) -> Jails {
        match self.experiment.shape {
            // The limit is one of all microVMs together.
            Shape::Memory(..) => Jails::in_one_group(),
            _ => Jails::default(),
        }
    }

    /// Measures all planners in turn. A planner that fails is left out of this place, and the
    /// others are measured again.
    fn session(
        &self,
        place: &str,
        concurrency: u32,
        prepared: &Prepared,
        outcome: &mut Outcome,
    ) -> Result<(), PaperError> {
        let mut subjects = prepared.subjects.clone();
        while !subjects.is_empty() {
            let session = Session {
                program: self.harness.program.clone(),
                jails: self.jails(),
                players: prepared.players.clone(),
                subjects: subjects.iter().chain(to_repeat(&subjects)).cloned().collect(),
                runs: self.config.runs,
                warm_up: 0,
                concurrency,
                caches: vec![self.experiment.cache],
                standby: false,
                open_loop: 0,
                mix: None,
                faults: self.experiment.quantity == Quantity::Faults,
                warm: false,
            };
            let progress = Part { name: place, progress: self.harness.progress };
            let results = session.run(
                prepared.host.clone(),
                outcome.order,
                self.harness.interrupt,
                &progress,
            );
            match results {
                Ok(results) => {
                    outcome.add(place, results);
                    return Ok(());
                }
                Err(error) => {
                    if self.harness.interrupt.signal().is_some() {
                        return Err(error.into());
                    }
                    let SessionError::Batch { planner, .. } = &error else {
                        return Err(error.into());
                    };
                    let planner = planner.clone();
                    let reason = error_chain(&error);
                    self.harness.progress.note(&format!("{place}: left out: {reason}"));
                    outcome.left_out.insert(format!("{planner} at {place}"), reason);
                    subjects.retain(|subject| subject.planner != planner);
                }
            }
        }
        let (name, rows, noise) = (place.to_owned(), Vec::new(), Vec::new());
        outcome.sessions.push(Place { name, rows, noise });
        Ok(())
    }
}

#[cfg(test)]
mod tests;
