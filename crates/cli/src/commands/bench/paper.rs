//! `firn bench paper`: the papers' experiments, each as data, table and picture.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use firn_base::{error_chain, format_bytes};
use thiserror::Error;

use firn_bench::experiments::{EXPERIMENTS, Experiment, Outcome, Place, Quantity, Shape};
use firn_bench::player::{GapFactor, Leaves};
use firn_bench::table::sanitises;
use firn_bench::{
    CgroupError, Host, HostError, Interrupt, MemoryLimit, Session, SessionError, svg,
};
use firn_memory::planners::{Store, parse};

use super::capacity::{Budget, FillError, fill};
use super::in_pool::{InPoolError, PoolPlayers};
use super::players::{PlayersArgs, PlayersError, Prepared};
use super::progress;
use super::save::{Output, SaveError};
use crate::output;

/// How long a microVM may take to replay its trace where a budget is filled.
const PATIENCE: Duration = Duration::from_secs(60);
/// No budget is filled with more microVMs.
const MOST: u32 = 200;

/// Arguments of `firn bench paper`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn bench paper                                        # the names of all experiments
  firn bench paper pass-figure-9 --out results
  firn bench paper all --pool pool.sock --out results --runs 5

Each experiment NAME writes NAME.json, NAME.md and NAME.svg. A planner that this host cannot run, or that fails, is left
out, with the reason. Images are dense, as the papers' are; in the experiments of FaaSnap and SnapBPF all that a guest holds free
holds something, but for faasnap.")]
pub(crate) struct PaperArgs {
    /// Names of experiments, or `all`; without any they are listed
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Where the results are written
    #[arg(long, value_name = "DIR", default_value = ".")]
    out: PathBuf,
    /// Runs of each planner on each trace
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// A pool, for the planners that map snapshots from one: its medium, or its manager's socket
    #[arg(long, value_name = "PATH")]
    pool: Option<PathBuf>,
    /// Where the players' snapshots are made: the medium that is measured; default: the folder for temporary files
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

/// Why there are no results.
#[derive(Debug, Error)]
pub(crate) enum PaperError {
    #[error("no experiment is called {0}; `firn bench paper` lists them")]
    Unknown(String),
    #[error(transparent)]
    Players(#[from] PlayersError),
    #[error(transparent)]
    Pool(#[from] InPoolError),
    #[error(transparent)]
    Save(#[from] SaveError),
    #[error(transparent)]
    Host(#[from] HostError),
    #[error("making {path}")]
    Directory { path: PathBuf, source: io::Error },
    #[error("finding out where firn itself is")]
    Program(#[source] io::Error),
    #[error("preparing to catch signals")]
    Signals(#[source] io::Error),
    #[error(transparent)]
    Limit(#[from] CgroupError),
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error(transparent)]
    Fill(#[from] FillError),
    #[error("the results have no JSON form")]
    Json(#[from] serde_json::Error),
}

pub(crate) fn run(arguments: &PaperArgs) -> Result<ExitCode, PaperError> {
    if arguments.names.is_empty() {
        let rows =
            EXPERIMENTS.iter().map(|e| [e.name, e.source, e.title].map(str::to_owned).to_vec());
        output::line(&output::table(&["name", "source", "what"], &rows.collect::<Vec<_>>()));
        return Ok(ExitCode::SUCCESS);
    }
    let mut chosen: Vec<&Experiment> = Vec::new();
    for name in &arguments.names {
        let matching = EXPERIMENTS.iter().filter(|e| name == "all" || e.name == name);
        let before = chosen.len();
        chosen.extend(matching);
        if chosen.len() == before {
            return Err(PaperError::Unknown(name.clone()));
        }
    }
    let path = arguments.out.clone();
    fs::create_dir_all(&path).map_err(|source| PaperError::Directory { path, source })?;
    let program = std::env::current_exe().map_err(PaperError::Program)?;
    let interrupt = Interrupt::catch().map_err(PaperError::Signals)?;
    for experiment in chosen {
        output::note(&format!("{}: {} ({})", experiment.name, experiment.title, experiment.source));
        let runner =
            Runner { arguments, experiment, program: program.clone(), interrupt: &interrupt };
        let outcome = runner.run()?;
        let file = |kind: &str| arguments.out.join(format!("{}.{kind}", experiment.name));
        let write = |kind: &str, text: &str| match Output::prepare(Some(&file(kind)))? {
            Some(output) => output.write(text),
            None => Ok(()),
        };
        write("json", &(serde_json::to_string_pretty(&outcome)? + "\n"))?;
        write("svg", &outcome.draw())?;
        let table = markdown(&outcome);
        write("md", &table)?;
        output::line(&table);
    }
    Ok(ExitCode::SUCCESS)
}

/// One experiment that is run.
struct Runner<'a> {
    arguments: &'a PaperArgs,
    experiment: &'a Experiment,
    program: PathBuf,
    interrupt: &'a Interrupt,
}

impl Runner<'_> {
    fn run(&self) -> Result<Outcome, PaperError> {
        let Experiment { name, source, title, quantity, unsanitised, .. } = *self.experiment;
        let mut left_out = BTreeMap::new();
        let mut planners = Vec::new();
        for written in self.experiment.planners {
            let reason = match parse(written) {
                Ok(planner)
                    if self.arguments.pool.is_some() || planner.store() == Store::Directory =>
                {
                    planners.push((*written).to_owned());
                    continue;
                }
                Ok(_) => "it maps snapshots from a pool: name one with --pool".to_owned(),
                Err(error) => error.to_string(),
            };
            left_out.insert((*written).to_owned(), reason);
        }
        let mut outcome = Outcome {
            name: name.to_owned(),
            source: source.to_owned(),
            title: title.to_owned(),
            quantity,
            host: Host::of(&std::env::temp_dir())?,
            unsanitised,
            sessions: Vec::new(),
            capacities: None,
            left_out,
        };
        let (sanitising, others): (Vec<_>, Vec<_>) =
            planners.into_iter().partition(|planner| !unsanitised || sanitises(planner));
        for (planner, unsanitised) in [(others, unsanitised), (sanitising, false)] {
            if !planner.is_empty() {
                self.measure(planner, unsanitised, &mut outcome)?;
            }
        }
        Ok(outcome)
    }

    /// Freezes the players, and measures these planners at each place of the scale.
    fn measure(
        &self,
        planner: Vec<String>,
        unsanitised: bool,
        outcome: &mut Outcome,
    ) -> Result<(), PaperError> {
        let players = PlayersArgs {
            planner,
            trace: self.experiment.traces.iter().map(|trace| (*trace).to_owned()).collect(),
            dir: self.arguments.dir.clone(),
            pool: self.arguments.pool.clone(),
            leaves: Leaves::Recorded,
            gaps: if self.experiment.work { GapFactor::FULL } else { GapFactor::NONE },
            dense: true,
            unsanitised,
            same_input: self.experiment.same_input,
        };
        let pool = players.pool()?;
        let mut pool = PoolPlayers::at(pool.as_ref())?;
        let snapshots = match self.experiment.shape {
            Shape::Concurrency(numbers) if self.experiment.different => {
                numbers.iter().copied().max().unwrap_or(1)
            }
            _ => 1,
        };
        let prepared = players.prepare(pool.as_mut(), snapshots, 1)?;
        // This one names the pool, too.
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
                let budget = Budget { memory, most: MOST, patience: PATIENCE };
                let pool = pool.as_mut();
                let filled = fill(&budget, &self.program, &prepared, pool, self.interrupt)?;
                outcome.capacities = Some(filled);
            }
        }
        Ok(())
    }

    /// Measures all planners in turn. One that fails is left out of this place, and the others are measured anew.
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
                program: self.program.clone(),
                players: prepared.players.clone(),
                subjects: subjects.clone(),
                runs: self.arguments.runs,
                warm_up: 0,
                concurrency,
                caches: vec![self.experiment.cache],
                faults: self.experiment.quantity == Quantity::Faults,
            };
            let bar = progress(session.batches());
            let results = session.run(prepared.host.clone(), self.interrupt, |player, subject| {
                bar.set_message(format!("{place}: {} on {}", subject.planner, player.trace));
                bar.inc(1);
            });
            bar.finish_and_clear();
            match results {
                Ok(results) => {
                    outcome.add(place, results);
                    return Ok(());
                }
                Err(error) => {
                    if self.interrupt.signal().is_some() {
                        return Err(error.into());
                    }
                    let SessionError::Batch { planner, .. } = &error else {
                        return Err(error.into());
                    };
                    let planner = planner.clone();
                    let reason = error_chain(&error);
                    output::note(&format!("{place}: left out: {reason}"));
                    outcome.left_out.insert(format!("{planner} at {place}"), reason);
                    subjects.retain(|subject| subject.planner != planner);
                }
            }
        }
        let rows = Vec::new();
        outcome.sessions.push(Place { name: place.to_owned(), rows });
        Ok(())
    }
}

/// The outcome as a table for a document.
fn markdown(outcome: &Outcome) -> String {
    let mut text = format!("{} ({})\n\n{}\n\n", outcome.title, outcome.source, outcome.host.line());
    let mut row = |cells: Vec<String>| text.push_str(&format!("| {} |\n", cells.join(" | ")));
    if let Some(capacities) = &outcome.capacities {
        let head = ["trace", "planner", "microVMs", "charged", "pool"];
        row(head.map(str::to_owned).to_vec());
        row(vec!["---".to_owned(); head.len()]);
        for result in &capacities.results {
            row(vec![
                result.trace.clone(),
                result.planner.clone(),
                result.carried.microvms.to_string(),
                format_bytes(result.carried.usage.total),
                result.pool_bytes.map_or(String::new(), format_bytes),
            ]);
        }
    } else {
        let head = [
            "trace",
            "place",
            "planner",
            "total, ms",
            "p95",
            "in page faults, ms",
            "DRAM of a run",
            "private",
            "read",
            "KVM faults",
        ];
        row(head.map(str::to_owned).to_vec());
        row(vec!["---".to_owned(); head.len()]);
        for session in &outcome.sessions {
            for result in &session.rows {
                let mark = if result.oversubscribed { "*" } else { "" };
                row(vec![
                    result.trace.clone(),
                    session.name.clone(),
                    result.planner.clone(),
                    format!("{}{mark}", svg::number(result.total_ms.median)),
                    svg::number(result.total_ms.p95),
                    result.fault_ms.map_or(String::new(), |faults| svg::number(faults.median)),
                    format_bytes(result.batch_dram_bytes),
                    format_bytes(result.private_bytes),
                    format_bytes(result.read_bytes),
                    result.kvm_page_faults.to_string(),
                ]);
            }
        }
    }
    if outcome.unsanitised {
        text.push_str("\nAll that the guests held free holds something; `faasnap` alone has guests that zero what they free.\n");
    }
    for (planner, reason) in &outcome.left_out {
        text.push_str(&format!("\nleft out: {planner}: {reason}\n"));
    }
    text
}
