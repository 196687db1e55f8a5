//! The comparison of planners on players, as `firn bench thaw` runs it.

mod document;
mod error;
mod invocation;
mod open_loop;
mod picture;
mod results;
mod session;
mod stock;
mod text;

use std::path::PathBuf;

use firn_memory::planners::{ParsePlannerError, parse, split_list};
use thiserror::Error;

pub use document::{draw_sessions, sessions_markdown};
pub use error::SessionError;
pub use open_loop::OpenLoop;
#[cfg(test)]
pub(crate) use results::RowHead;
pub(crate) use results::Run;
pub use results::{Noise, RESULTS_VERSION, Results, Row};
pub use session::Session;
pub(crate) use session::{Turn, shuffled};
pub use stock::{StockError, StockPlayer, StockRow, StockRun};

use crate::batch::Jails;
use crate::cache::Cache;
use crate::harness::Harness;
use crate::players::{PlayersConfig, PlayersError, Subject};
use crate::traces::load;

/// A comparison of planners on players.
#[derive(Clone, Debug)]
pub struct ThawConfig {
    /// The players and planners.
    pub players: PlayersConfig,
    /// Runs of each planner on each player.
    pub runs: u32,
    /// Runs before the first measured one, for planners that map from a pool. The manager then has
    /// prepared what such a run takes.
    pub warm_up: u32,
    /// MicroVMs that start together in a run.
    pub concurrency: u32,
    /// States of the page cache before each run, measured one after the other.
    pub caches: Vec<Cache>,
    /// Whether each microVM of a run is of a snapshot of its own, with other content.
    pub different_snapshots: bool,
    /// Whether every planner is measured twice: the difference is noise. Otherwise one of several
    /// planners is.
    pub noise: bool,
    /// The seed of the random order in which the planners have their turns.
    pub order: u64,
    /// Whether microVMs start in monitors that stand by for them.
    pub standby: bool,
    /// Measure each planner also with monitors that are not jailed.
    pub unjailed: bool,
    /// Planners whose microVMs start from ready clones, as in [`PlayersConfig::planners`].
    pub ready: Vec<String>,
    /// Starts of each planner on each player at random intervals, after the runs; none waits for an
    /// earlier one.
    pub open_loop: u32,
    /// The seed by which each run replays the trace or the function's other input; without it, the
    /// trace.
    pub mix: Option<u64>,
    /// Whether each microVM serves a second invocation after the first.
    pub warm: bool,
    /// A program with Firecracker's API that is measured in the same rounds.
    pub firecracker: Option<PathBuf>,
}

/// A seed that JSON keeps in full.
pub(crate) fn random_order() -> u64 {
    fastrand::u32(..).into()
}

impl Default for ThawConfig {
    fn default() -> Self {
        Self {
            players: PlayersConfig::default(),
            runs: 20,
            warm_up: 0,
            concurrency: 1,
            caches: vec![Cache::Cached],
            different_snapshots: false,
            noise: false,
            order: random_order(),
            standby: false,
            unjailed: false,
            ready: Vec::new(),
            open_loop: 0,
            mix: None,
            warm: false,
            firecracker: None,
        }
    }
}

/// Why there are no results.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ThawError {
    /// There are no players to measure.
    #[error(transparent)]
    Players(#[from] PlayersError),
    /// A planner of `ready` is not among those that are measured.
    #[error("{0} is to start from ready clones, and is not measured: name it with --planner, too")]
    NotMeasured(String),
    /// A planner of `ready` cannot be parsed.
    #[error(transparent)]
    Planner(#[from] ParsePlannerError),
    /// A program with Firecracker's API makes no snapshot.
    #[error("cannot snapshot the player of {trace} with {program}")]
    Stock {
        /// The program.
        program: PathBuf,
        /// The trace.
        trace: String,
        /// The reason.
        source: Box<StockError>,
    },
    /// A run failed.
    #[error(transparent)]
    Session(#[from] SessionError),
}

impl ThawConfig {
    /// Marks the subjects that start from ready clones.
    fn select_ready(&self, subjects: &mut [Subject]) -> Result<(), ThawError> {
        for name in split_list(&self.ready.join(",")).iter().filter(|name| !name.is_empty()) {
            let planner = parse(name)?.name();
            let subject = subjects.iter_mut().find(|subject| subject.planner == planner);
            subject.ok_or(ThawError::NotMeasured(planner))?.ready = true;
        }
        Ok(())
    }

    /// The players' snapshots of the other program, if one is measured.
    fn stock(&self) -> Result<Vec<StockPlayer>, ThawError> {
        let Some(program) = &self.firecracker else { return Ok(Vec::new()) };
        let make = |name: &String| {
            let trace = load(name).map_err(PlayersError::from)?;
            let (options, directory) = (self.players.options(1), self.players.directory.as_deref());
            StockPlayer::make(program, &trace, &options, directory).map_err(|source| {
                let (program, source) = (program.clone(), Box::new(source));
                ThawError::Stock { program, trace: trace.name.clone(), source }
            })
        };
        self.players.traces.iter().map(make).collect()
    }

    /// Freezes the players, measures, and removes them.
    ///
    /// # Errors
    ///
    /// [`ThawError`].
    pub fn run(&self, harness: &Harness<'_>) -> Result<Results, ThawError> {
        let progress = harness.progress;
        let mut pool = self.players.connect(progress)?;
        let snapshots = if self.different_snapshots { self.concurrency } else { 1 };
        let prepared = self.players.prepare(pool.as_mut(), snapshots, self.concurrency, harness)?;
        let mut subjects = prepared.subjects.clone();
        self.select_ready(&mut subjects)?;
        if self.noise {
            subjects.extend_from_within(..);
        } else {
            subjects.extend(to_repeat(&subjects).cloned());
        }
        if self.unjailed {
            let unjailed = subjects.iter().map(|s| Subject { jailed: false, ..s.clone() });
            subjects.extend(unjailed.collect::<Vec<_>>());
        }
        let mut caches: Vec<Cache> = Vec::new();
        for cache in &self.caches {
            if !caches.contains(cache) {
                caches.push(*cache);
            }
        }
        let session = Session {
            program: harness.program.clone(),
            jails: Jails::default(),
            players: prepared.players.clone(),
            subjects,
            runs: self.runs,
            warm_up: self.warm_up,
            concurrency: self.concurrency,
            replicas: None,
            caches,
            faults: false,
            standby: self.standby,
            open_loop: self.open_loop,
            mix: self.mix,
            warm: self.warm,
            shortened: false,
        };
        let stock = self.stock()?;
        let host = prepared.host.clone();
        let mut results =
            session.run_beside(&stock, host, self.order, harness.interrupt, progress)?;
        results.left_out = prepared.left_out.clone();
        results.leaves = Some(self.players.leaves.to_string());
        results.gaps = Some(self.players.gaps.to_string());
        results.again = self.players.again.map(|again| again.to_string());
        results.dense = self.players.dense;
        results.unsanitised = self.players.unsanitised;
        Ok(results)
    }
}

/// The subject that a session measures a second time to see its noise; `None` if there is one
/// subject only, or a planner was listed twice. Planners that use the page cache come first,
/// because they are measured in each of its states.
pub(crate) fn to_repeat(subjects: &[Subject]) -> Option<&Subject> {
    let mut planners: Vec<&str> = subjects.iter().map(|subject| &*subject.planner).collect();
    planners.sort_unstable();
    planners.dedup();
    let repeated = planners.len() < subjects.len();
    let chosen = subjects.iter().find(|subject| !subject.in_pool).or(subjects.first());
    chosen.filter(|_| subjects.len() > 1 && !repeated)
}

#[cfg(test)]
mod tests;
