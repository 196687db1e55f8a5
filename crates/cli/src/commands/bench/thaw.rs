//! `firn bench thaw`: planners side by side, on the player.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use thiserror::Error;

use firn_bench::player::{
    FreezePlayerError, GapFactor, Leaves, PlayerInputs, PlayerInputsError, PlayerOptions, freeze,
};
use firn_bench::traces::{LoadTraceError, NamedTrace, load};
use firn_bench::{
    Cache, Frozen, Host, HostError, Interrupt, LeftOut, Session, SessionError, Subject, svg,
};
use firn_memory::planners::{ImageFacts, ParsePlannerError, PlanInput, Store, parse, select};
use firn_memory::{HostFacts, HostFactsError};
use firn_snapshot::PAGE_SIZE;
use firn_vmm::{Destination, KVM_DEVICE, error_chain};

use super::in_pool::{InPoolError, PoolPlayers};
use super::medium::{self, MediumError};
use super::save::{Output, SaveError};
use super::{progress, tables};
use crate::pool_at::{PoolAt, PoolAtError};

/// Arguments of `firn bench thaw`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn bench thaw --trace sequential-read:64M
  firn bench thaw --planner firecracker:readahead=off,dram_cached --trace json-a --cache cold --runs 50
  firn bench thaw --planner firecracker --noise --trace sequential-read:64M
  firn bench thaw --planner firecracker,pass_shared,pass --pool pool.sock --trace sequential-read:512M --leaves 2m
  firn bench thaw --trace json-a --concurrency 32 --runs 3 --json results.json --plot results.svg

Each microVM is a process of its own, whose every page is checked after the clock has stopped: one wrong page
and the command fails. Planners take turns run by run. A planner that is named twice is measured against itself.")]
pub(crate) struct BenchThawArgs {
    /// Planners, as NAME[:KEY=VALUE,...], separated by commas; `all` for all that this host can run
    #[arg(long, value_name = "PLANNER", default_value = "all")]
    planner: Vec<String>,
    /// A trace that firn carries, sequential-read:SIZE, sequential-write:SIZE, or the path of a .trace file;
    /// several: repeat it, or separate them by commas
    #[arg(long, value_name = "NAME", required = true, value_delimiter = ',')]
    trace: Vec<String>,
    /// Runs of each planner on each trace
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    runs: u32,
    /// MicroVMs that start together in a run; with more than this host has processors, read processor time, not
    /// wall time
    #[arg(long, value_name = "C", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    concurrency: u32,
    /// The page cache before each run: no page of the snapshot, or every one
    #[arg(long, default_value = "cached")]
    cache: CacheArg,
    /// Measure every planner twice, as a and as b: the difference is noise
    #[arg(long)]
    noise: bool,
    /// Write the results to a file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw the results into a file, as SVG
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Where the players' snapshots are made: the medium that is measured; default: the folder for temporary files
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// A pool, for the planners that map snapshots from one: its medium, whose manager is started where none runs, or its
    /// manager's socket. They use no page cache, so --cache does not concern them
    #[arg(long, value_name = "PATH")]
    pool: Option<PathBuf>,
    /// Leaves of the guest's own page tables: recorded, 4k or 2m
    #[arg(long, value_name = "LEAVES", default_value_t = Leaves::Recorded)]
    leaves: Leaves,
    /// What the recorded work between touches is multiplied with; 0: faults alone
    #[arg(long, value_name = "FACTOR", default_value_t = GapFactor::NONE)]
    gaps: GapFactor,
    /// Write zero pages into the images too, instead of leaving holes
    #[arg(long)]
    dense: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum CacheArg {
    Cold,
    Cached,
}

/// Why there are no results.
#[derive(Debug, Error)]
pub(crate) enum BenchThawError {
    #[error(transparent)]
    Trace(#[from] LoadTraceError),
    #[error(transparent)]
    HostFacts(#[from] HostFactsError),
    #[error(transparent)]
    Planner(#[from] ParsePlannerError),
    #[error(transparent)]
    Save(#[from] SaveError),
    #[error(transparent)]
    Medium(#[from] MediumError),
    #[error(transparent)]
    Host(#[from] HostError),
    #[error("finding out where firn itself is")]
    Program(#[source] io::Error),
    #[error(transparent)]
    Manager(#[from] PoolAtError),
    #[error(transparent)]
    Pool(#[from] InPoolError),
    #[error(
        "{0} maps snapshots from a pool: name one with --pool (`firn pool create` makes it, `firn pool serve` one in memory)"
    )]
    NoPool(String),
    #[error("preparing to catch signals")]
    Signals(#[source] io::Error),
    #[error("making the player of {trace}")]
    Freeze { trace: String, source: FreezePlayerError },
    #[error(transparent)]
    Inputs(#[from] PlayerInputsError),
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error("the results have no JSON form")]
    Json(#[from] serde_json::Error),
}

pub(crate) fn run(arguments: &BenchThawArgs) -> Result<ExitCode, BenchThawError> {
    let traces = arguments.trace.iter().map(|name| load(name)).collect::<Result<Vec<_>, _>>()?;
    let pool = arguments.pool.as_deref().map(PoolAt::open).transpose()?;
    let mut pool = pool.as_ref().map(|pool| PoolPlayers::new(pool.socket())).transpose()?;
    let (mut subjects, left_out) = subjects(&arguments.planner.join(","), &traces, pool.as_ref())?;
    if arguments.noise {
        subjects.extend_from_within(..);
    }
    let json = Output::prepare(arguments.json.as_deref())?;
    let plot = Output::prepare(arguments.plot.as_deref())?;
    let program = std::env::current_exe().map_err(BenchThawError::Program)?;
    let interrupt = Interrupt::catch().map_err(BenchThawError::Signals)?;
    let directory = medium::directory(arguments.dir.as_deref())?;
    let mut host = Host::of(directory.path())?;
    if let Some(pool) = &pool {
        host.medium = format!("{}; pool on {}", host.medium, pool.medium());
    }

    let options =
        PlayerOptions { leaves: arguments.leaves, gaps: arguments.gaps, ..Default::default() };
    let mut players = Vec::new();
    for (number, trace) in traces.iter().enumerate() {
        let snapshot = directory.path().join(format!("player-{number}"));
        let destination = Destination::Directory(snapshot.clone());
        let inputs = PlayerInputs::new(vec![trace.clone()])?;
        freeze(&inputs, &options, KVM_DEVICE.as_ref(), destination, arguments.dense)
            .map_err(|source| BenchThawError::Freeze { trace: trace.name.clone(), source })?;
        let pooled = match &mut pool {
            Some(pool) if subjects.iter().any(|subject| subject.in_pool) => {
                Some(pool.freeze(&inputs, &trace.name, &options)?)
            }
            _ => None,
        };
        players.push(Frozen { trace: trace.name.clone(), snapshot, pooled });
    }
    let cache = match arguments.cache {
        CacheArg::Cold => Cache::Cold,
        CacheArg::Cached => Cache::Cached,
    };
    let (runs, concurrency) = (arguments.runs, arguments.concurrency);
    let session = Session { program, players, subjects, runs, concurrency, cache };
    let bar = progress(session.batches());
    let results = session.run(host, &interrupt, |player, subject| {
        bar.set_message(format!("{} on {}", subject.planner, player.trace));
        bar.inc(1);
    });
    bar.finish_and_clear();
    let mut results = results?;
    results.left_out = left_out;
    tables::print(&results);
    if let Some(json) = json {
        json.write(&(serde_json::to_string_pretty(&results)? + "\n"))?;
    }
    if let Some(plot) = plot {
        plot.write(&svg::draw(&results))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The planners of a list, and those that `all` leaves out because they have no plan for one of the traces.
fn subjects(
    list: &str,
    traces: &[NamedTrace],
    pool: Option<&PoolPlayers<'_>>,
) -> Result<(Vec<Subject>, Vec<LeftOut>), BenchThawError> {
    let host = HostFacts::read()?;
    let (mut subjects, mut left_out) = (Vec::new(), Vec::<LeftOut>::new());
    for NamedTrace { trace, .. } in traces {
        let (layout, zero_map) = (trace.layout(), trace.zero_map());
        let stored = (layout.pages() - zero_map.count()) * PAGE_SIZE;
        let file = ImageFacts { len: layout.total_bytes(), stored, extent: None };
        let input =
            PlanInput { layout, image: file, zero_map, profile: None, snapshot: None, host: &host };
        let pooled = pool.map(|pool| PlanInput { image: pool.image(file.len), ..input });
        let mut selection = select(list, &input)?;
        if let Some(pooled) = &pooled {
            // What has no plan for a directory may have one for a pool.
            selection.left_out.retain_mut(|(name, reason)| {
                let Ok(planner) = parse(name) else { return true };
                match planner.plan(pooled) {
                    Ok(_) if planner.store() != Store::Directory => {
                        selection.planners.push(planner);
                        false
                    }
                    Err(other) if planner.store() != Store::Directory => {
                        *reason = other;
                        true
                    }
                    _ => true,
                }
            });
        }
        subjects = Vec::new();
        for planner in &selection.planners {
            let in_pool = planner.store() != Store::Directory;
            let input = match (&pooled, in_pool) {
                (Some(pooled), true) => pooled,
                (None, true) => return Err(BenchThawError::NoPool(planner.name())),
                (_, false) => &input,
            };
            // One without a plan fails loudly in its first run.
            let preloads = planner
                .plan(input)
                .is_ok_and(|plan| plan.schedule.iter().any(|step| step.work.is_preload()));
            subjects.push(Subject { planner: planner.name(), preloads, in_pool });
        }
        for (planner, reason) in selection.left_out {
            if left_out.iter().all(|known| known.planner != planner) {
                left_out.push(LeftOut { planner, reason: error_chain(&reason) });
            }
        }
    }
    subjects.retain(|subject| left_out.iter().all(|left_out| left_out.planner != subject.planner));
    Ok((subjects, left_out))
}
