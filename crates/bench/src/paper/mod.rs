//! The papers' experiments, as far as the traces and this host allow.
//!
//! All of them differ from the papers in the same ways: the player replays the functions, the host
//! has fewer processors, and all planners share one executor, so that they differ in the restore
//! alone.

mod experiments;
#[cfg(test)]
mod holders;
mod kernel_faults;
mod outcome;
#[cfg(test)]
mod page;
mod picture;
mod programs;
#[cfg(test)]
mod records;
mod replays;
#[cfg(test)]
mod sentences;
pub mod systor;
mod table;
mod text;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use thiserror::Error;

use firn_base::error_chain;
use firn_memory::planners::{PlanSnapshotError, Store, parse, plan};
use firn_run::cgroup::CgroupError;
use firn_snapshot::{OpenError, Snapshot};

pub use experiments::EXPERIMENTS;
pub use kernel_faults::{FunctionTime, KernelFaults, KernelFaultsError};
pub use outcome::{Outcome, Place, Priced, Settings};
pub use programs::{Programs, ProgramsError};
pub use replays::{Medium, Quantity, Replays, Shape, Storage};
pub use table::{Experiment, FindError, Verdict, Way, document, find, help, listing};

use crate::batch::Jails;
use crate::capacity::{Budget, Capacities, FillError, fill};
use crate::cgroup::MemoryLimit;
use crate::harness::Harness;
use crate::host::{Host, HostError};
use crate::medium::is_dax;
use crate::player::{GapFactor, Leaves};
use crate::players::{PlayersConfig, PlayersError, PoolPlayers, Prepared, Subject, host_of};
use crate::progress::Part;
use crate::thaw::{RESULTS_VERSION, Session, SessionError, random_order, to_repeat};
use crate::tier::{EmulateError, EmulatedDisk, Throttle};
use crate::traces::{LoadTraceError, SIZES};

/// How often a budget is filled at most: a fill starts up to 200 microVMs.
const MOST_FILLS: u32 = 5;

/// How the papers' experiments run.
#[derive(Clone, Debug)]
pub struct PaperConfig {
    /// Runs of each planner on each trace; where one takes 10 s, at most five.
    pub runs: u32,
    /// The socket of a pool's manager, for the planners that map snapshots from a pool.
    pub pool: Option<PathBuf>,
    /// The directory in which the snapshots are made, on the medium that is measured. By default it
    /// is the directory for temporary files.
    pub directory: Option<PathBuf>,
    /// Traces in place of the experiment's; empty for its own.
    pub traces: Vec<String>,
    /// At most this number of microVMs at once.
    pub most: u32,
    /// The seed of the random order in which the planners have their turns; none for a random one.
    pub order: Option<u64>,
}

impl Default for PaperConfig {
    fn default() -> Self {
        let (traces, most) = (Vec::new(), u32::MAX);
        Self { runs: 11, pool: None, directory: None, traces, most, order: None }
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
    /// A disk cannot be emulated.
    #[error(transparent)]
    Emulate(#[from] EmulateError),
    /// A snapshot cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A trace cannot be loaded.
    #[error(transparent)]
    Trace(#[from] LoadTraceError),
    /// The cost of BPF programs cannot be measured.
    #[error(transparent)]
    Programs(#[from] ProgramsError),
    /// The time in the kernel's page faults cannot be measured.
    #[error(transparent)]
    KernelFaults(#[from] KernelFaultsError),
    /// The snapshots would be on a medium of the wrong kind.
    #[error(
        "{path} is not on the medium that {name} needs: --dir on a DAX file system (ext4 or XFS mounted with -o dax=always), \
         TMPDIR on one with a page cache; `make dax-counts` has both, and counts in place of times"
    )]
    Medium {
        /// The experiment's file.
        name: String,
        /// The directory.
        path: PathBuf,
    },
}

impl PaperConfig {
    /// Runs a part of an experiment, one trace after the other. A planner that this host cannot
    /// run, or that fails, is left out of the results, with the reason.
    ///
    /// `earlier` are results of the files in [`Experiment::sources`]. The first that has the same
    /// settings, host and build is continued. `save` gets the results after each trace.
    ///
    /// # Errors
    ///
    /// [`PaperError`].
    pub fn run(
        &self,
        experiment: &Experiment,
        replays: &Replays,
        earlier: Vec<Outcome>,
        harness: &Harness<'_>,
        save: impl FnMut(&Outcome),
    ) -> Result<Outcome, PaperError> {
        Runner { config: self, experiment, replays, harness }.run(earlier, save)
    }

    /// The command that runs an experiment like this, without directories.
    fn command(&self, experiment: &str) -> String {
        let mut options = vec![format!("--runs {}", self.runs)];
        options.extend(self.pool.as_ref().map(|_| "--pool POOL".to_owned()));
        options.extend(self.directory.as_ref().map(|_| "--dir DIR".to_owned()));
        command(experiment, options, &self.traces, self.most)
    }

    fn settings(&self) -> Settings {
        let most = Some(self.most).filter(|most| *most != u32::MAX);
        Settings { runs: self.runs, most, pool: self.pool.is_some() }
    }

    /// The numbers of microVMs at once that are measured: all but those above the limit, or the
    /// limit if all are.
    fn numbers(&self, all: &[u32]) -> Vec<u32> {
        let numbers: Vec<u32> = all.iter().copied().filter(|n| *n <= self.most).collect();
        if numbers.is_empty() { vec![self.most] } else { numbers }
    }
}

/// The run of one part of an experiment.
struct Runner<'a> {
    config: &'a PaperConfig,
    experiment: &'a Experiment,
    replays: &'a Replays,
    harness: &'a Harness<'a>,
}

/// Where a group is measured.
#[derive(Clone, Copy, Default)]
struct Spot<'a> {
    /// The directory of the snapshots; none for that of temporary files.
    directory: Option<&'a Path>,
    /// The emulated disk of the directory, and what it emulates.
    disk: Option<(&'a EmulatedDisk, &'a [Storage])>,
    /// The size of the input, and what the trace's name ends with.
    size: Option<(&'a str, &'a str)>,
}

impl Runner<'_> {
    fn run(
        &self,
        earlier: Vec<Outcome>,
        mut save: impl FnMut(&Outcome),
    ) -> Result<Outcome, PaperError> {
        let Experiment { source, title, .. } = *self.experiment;
        let Replays { quantity, unsanitised, remarks, .. } = *self.replays;
        let mut left_out = BTreeMap::new();
        let mut planners = Vec::new();
        for written in self.replays.planners {
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
            name: self.experiment.file(self.replays),
            source: source.to_owned(),
            title: title.to_owned(),
            quantity,
            remarks: remarks.iter().map(|remark| (*remark).to_owned()).collect(),
            host: self.host()?,
            pool_size: None,
            settings: self.config.settings(),
            measured: Vec::new(),
            unsanitised,
            order: self.config.order.unwrap_or_else(random_order),
            command: self.config.command(self.experiment.name),
            sessions: Vec::new(),
            budgets: Vec::new(),
            costs: Vec::new(),
            programs: Vec::new(),
            kernel_faults: Vec::new(),
            left_out,
        };
        let emulated = matches!(self.replays.shape, Shape::Storage(_));
        let ordered =
            |earlier: &Outcome| self.config.order.is_none_or(|order| order == earlier.order);
        let mut earlier = earlier.into_iter().filter(ordered);
        if let Some(earlier) = earlier.find(|earlier| earlier.continues_as(&outcome, emulated)) {
            outcome.continue_from(earlier);
        }
        let given: Vec<&str> = self.config.traces.iter().map(String::as_str).collect();
        let traces = if given.is_empty() { self.replays.traces } else { &given };
        for trace in traces {
            let name = format!("{trace} by {}", planners.join(" "));
            if planners.is_empty() || outcome.measured.contains(&name) {
                continue;
            }
            self.measure(trace, &planners, &mut outcome)?;
            outcome.measured.push(name);
            save(&outcome);
        }
        if quantity == Quantity::Price {
            outcome.price()?;
        }
        Ok(outcome)
    }

    /// The directory of the snapshots; none for that of temporary files.
    fn directory(&self) -> Option<&Path> {
        let given = self.config.directory.as_deref();
        given.filter(|_| self.replays.medium != Medium::PageCache)
    }

    /// This host, with the medium of the snapshots where the experiment does not make one.
    fn host(&self) -> Result<Host, PaperError> {
        let pool = self.config.pool.as_deref();
        let pool = pool.map(|socket| PoolPlayers::connect(socket, self.harness.progress));
        let pool = pool.transpose().map_err(PlayersError::from)?;
        let temporary = std::env::temp_dir();
        let directory = self.directory().unwrap_or(&temporary);
        let fits = match self.replays.medium {
            Medium::Any => true,
            Medium::Dax => is_dax(directory),
            Medium::PageCache => !is_dax(directory),
        };
        if !fits {
            let (name, path) = (self.experiment.file(self.replays), directory.to_owned());
            return Err(PaperError::Medium { name, path });
        }
        Ok(host_of(directory, pool.as_ref())?)
    }

    /// Measures the planners on a trace together: on the disk that the experiment emulates, on each
    /// of its sizes, or where the snapshots otherwise are.
    fn measure(
        &self,
        trace: &str,
        planners: &[String],
        outcome: &mut Outcome,
    ) -> Result<(), PaperError> {
        let spot = Spot { directory: self.directory(), ..Spot::default() };
        match self.replays.shape {
            Shape::Storage(disks) => {
                let disk = EmulatedDisk::make(systor::available() / 2)?;
                let disks = Some((&disk, disks));
                let spot = Spot { directory: Some(disk.path()), disk: disks, ..spot };
                self.measure_in(spot, trace, planners, outcome)
            }
            Shape::Sizes => SIZES.into_iter().try_for_each(|size| {
                self.measure_in(Spot { size: Some(size), ..spot }, trace, planners, outcome)
            }),
            _ => self.measure_in(spot, trace, planners, outcome),
        }
    }

    /// Freezes the players, and measures the planners at each place on the scale.
    fn measure_in(
        &self,
        spot: Spot<'_>,
        function: &str,
        planners: &[String],
        outcome: &mut Outcome,
    ) -> Result<(), PaperError> {
        let progress = self.harness.progress;
        let trace = match spot.size {
            Some((_, ending)) => format!("{function}-{ending}"),
            None => function.to_owned(),
        };
        let players = PlayersConfig {
            planners: planners.to_vec(),
            traces: vec![trace.clone()],
            directory: spot.directory.map(Path::to_owned),
            pool: self.config.pool.clone(),
            leaves: Leaves::Recorded,
            gaps: if self.replays.work { GapFactor::FULL } else { GapFactor::NONE },
            dense: true,
            unsanitised: self.replays.unsanitised,
            same_input: self.replays.same_input.contains(&function),
            ..PlayersConfig::default()
        };
        let mut pool = players.connect(progress)?;
        let snapshots = match self.replays.shape {
            Shape::Concurrency(numbers) if self.replays.different => {
                self.config.numbers(numbers).into_iter().max().unwrap_or(1)
            }
            _ => 1,
        };
        let mut prepared = players.prepare(pool.as_mut(), snapshots, 1, self.harness)?;
        // This description includes the pool.
        outcome.host = prepared.host.clone();
        outcome.pool_size = pool.as_ref().map(PoolPlayers::size);
        let unfit = prepared.left_out.iter();
        outcome.left_out.extend(
            unfit.map(|left| (format!("{} on {trace}", left.planner), left.reason.clone())),
        );
        leave_out_unplanned(&mut prepared, outcome)?;
        match self.replays.shape {
            Shape::Concurrency(numbers) => {
                for number in self.config.numbers(numbers) {
                    self.session(&number.to_string(), number, &prepared, outcome)?;
                }
            }
            Shape::Memory(number, limits) => {
                for &limit in limits {
                    let place = format!("{} MiB", limit >> 20);
                    let _limit = MemoryLimit::enter(limit)?;
                    self.session(&place, number.min(self.config.most), &prepared, outcome)?;
                }
            }
            Shape::Capacity(budgets) => {
                for &memory in budgets {
                    let budget = Budget { memory, ..Budget::default() };
                    let budget = Budget { most: budget.most.min(self.config.most), ..budget };
                    let mut fills = Vec::new();
                    for _ in 0..self.config.runs.min(MOST_FILLS) {
                        fills.push(fill(&budget, &prepared, pool.as_mut(), self.harness)?);
                    }
                    if let Some(median) = Capacities::median_of(&fills) {
                        outcome.add_budget(median);
                    }
                }
            }
            Shape::Storage(_) => {
                for (disk, storage) in
                    spot.disk.iter().flat_map(|(disk, all)| all.iter().map(|s| (*disk, s)))
                {
                    disk.throttle(storage.limits)?;
                    let measured = self.session(storage.name, 1, &prepared, outcome);
                    disk.throttle(Throttle::NONE)?;
                    measured?;
                }
            }
            Shape::Sizes => {
                if let Some((place, _)) = spot.size {
                    self.session(place, 1, &prepared, outcome)?;
                }
                outcome.rename_trace(&trace, function);
            }
        }
        match self.replays.quantity {
            Quantity::Programs => {
                for player in &prepared.players {
                    outcome.programs.push(Programs::measure(player, self.config.runs)?);
                }
            }
            Quantity::KernelFaults => {
                let session = self.planners(1, &prepared, prepared.subjects.clone());
                let (cache, interrupt) = (self.replays.cache, self.harness.interrupt);
                let measured = KernelFaults::measure(&session, &prepared.host, cache, interrupt)?;
                outcome.kernel_faults.extend(measured);
            }
            _ => {}
        }
        Ok(())
    }

    /// A session of these planners.
    fn planners(&self, concurrency: u32, prepared: &Prepared, subjects: Vec<Subject>) -> Session {
        Session {
            program: self.harness.program.clone(),
            jails: self.jails(),
            players: prepared.players.clone(),
            subjects,
            runs: self.config.runs,
            warm_up: 0,
            concurrency,
            replicas: prepared.room,
            caches: vec![self.replays.cache],
            standby: false,
            open_loop: 0,
            mix: None,
            faults: self.replays.quantity.times_touches(),
            warm: self.replays.warm,
            shortened: true,
        }
    }

    fn jails(&self) -> Jails {
        match self.replays.shape {
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
            // One planner alone has a noise floor, too.
            let only = subjects.first().filter(|_| subjects.len() == 1);
            let twice = subjects.iter().chain(to_repeat(&subjects).or(only)).cloned().collect();
            let session = self.planners(concurrency, prepared, twice);
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
                    let traces = prepared.players.iter().map(|player| player.trace.as_str());
                    let traces = traces.collect::<Vec<_>>().join(", ");
                    outcome.left_out.insert(format!("{planner} on {traces} at {place}"), reason);
                    subjects.retain(|subject| subject.planner != planner);
                }
            }
        }
        outcome.add_place(place);
        Ok(())
    }
}

/// The command of an experiment with these options, functions and largest number of microVMs.
fn command(experiment: &str, options: Vec<String>, traces: &[String], most: u32) -> String {
    let traces = Some(traces).filter(|traces| !traces.is_empty());
    let more = [
        traces.map(|traces| format!("--trace {}", traces.join(","))),
        Some(most).filter(|most| *most != u32::MAX).map(|most| format!("--most {most}")),
    ];
    let words = [format!("firn bench paper {experiment}")].into_iter().chain(options);
    words.chain(more.into_iter().flatten()).collect::<Vec<_>>().join(" ")
}

/// Leaves out the planners that have no plan for their player in a directory, with the reason.
fn leave_out_unplanned(prepared: &mut Prepared, outcome: &mut Outcome) -> Result<(), PaperError> {
    for player in &prepared.players {
        let mut planned = Vec::new();
        for subject in &prepared.subjects {
            let planner = parse(&subject.planner).ok().filter(|_| !subject.in_pool);
            let snapshot = Snapshot::open(&player.of(subject).snapshot)?;
            match planner.map(|planner| plan(&snapshot, None, &*planner)) {
                Some(Err(PlanSnapshotError::Planner(reason))) => {
                    let place = format!("{} on {}", subject.planner, player.trace);
                    outcome.left_out.insert(place, error_chain(&reason));
                }
                _ => planned.push(subject.clone()),
            }
        }
        prepared.subjects = planned;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
