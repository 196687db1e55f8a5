//! `firn bench thaw`: planners side by side, on the player.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use thiserror::Error;

use firn_bench::{Cache, Interrupt, Session, SessionError, svg};

use super::in_pool::{InPoolError, PoolPlayers};
use super::players::{PlayersArgs, PlayersError, Prepared};
use super::save::{Output, SaveError};
use super::{progress, tables};

/// Arguments of `firn bench thaw`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn bench thaw --trace sequential-read:64M
  firn bench thaw --planner firecracker:readahead=off,dram_cached --trace json-a --cache cold --runs 50
  firn bench thaw --planner firecracker --noise --trace sequential-read:64M
  firn bench thaw --planner firecracker,pass_shared,pass --pool pool.sock --trace sequential-read:512M --leaves 2m
  firn bench thaw --trace json-a --cache cold,cached --runs 3
  firn bench thaw --trace json-a --concurrency 32 --runs 3 --json results.json --plot results.svg

Each microVM is a process of its own, whose every page is checked after the clock has stopped: one wrong page
and the command fails. A planner that uses a profile gets one that was recorded before all clocks on the function's other
input, where there is one: -b for a trace whose name ends in -a, and the reverse. Planners take turns run by run. A planner that is named twice is measured against itself.")]
pub(crate) struct BenchThawArgs {
    #[command(flatten)]
    players: PlayersArgs,
    /// Runs of each planner on each trace
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    runs: u32,
    /// Runs of planners that map from a pool, before those that count: the first has to wait for replicas and copies, until the manager
    /// knows how many such a run takes
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=1000))]
    warm_up: u32,
    /// MicroVMs that start together in a run; with more than this host has processors, read processor time, not
    /// wall time
    #[arg(long, value_name = "C", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    concurrency: u32,
    /// The page cache before each run: no page of the snapshot, or every one; with cached-4k in folios of 4 KiB, as in the
    /// kernels of the papers. Several, separated by commas, are measured one after the other
    #[arg(long, default_value = "cached", value_delimiter = ',')]
    cache: Vec<CacheArg>,
    /// Whether the microVMs of a run are of the same snapshot, or each of one of its own, with other content
    #[arg(long, default_value = "same")]
    snapshots: SnapshotsArg,
    /// Measure every planner twice, as a and as b: the difference is noise
    #[arg(long)]
    noise: bool,
    /// Write the results to a file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw the results into a file, as SVG
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum CacheArg {
    Cold,
    Cached,
    #[value(name = "cached-4k")]
    CachedSmall,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum SnapshotsArg {
    Same,
    Different,
}

/// Why there are no results.
#[derive(Debug, Error)]
pub(crate) enum BenchThawError {
    #[error(transparent)]
    Players(#[from] PlayersError),
    #[error(transparent)]
    Pool(#[from] InPoolError),
    #[error(transparent)]
    Save(#[from] SaveError),
    #[error("finding out where firn itself is")]
    Program(#[source] io::Error),
    #[error("preparing to catch signals")]
    Signals(#[source] io::Error),
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error("the results have no JSON form")]
    Json(#[from] serde_json::Error),
}

pub(crate) fn run(arguments: &BenchThawArgs) -> Result<ExitCode, BenchThawError> {
    let json = Output::prepare(arguments.json.as_deref())?;
    let plot = Output::prepare(arguments.plot.as_deref())?;
    let program = std::env::current_exe().map_err(BenchThawError::Program)?;
    let interrupt = Interrupt::catch().map_err(BenchThawError::Signals)?;
    let snapshots = match arguments.snapshots {
        SnapshotsArg::Same => 1,
        SnapshotsArg::Different => arguments.concurrency,
    };
    let pool = arguments.players.pool()?;
    let mut pool = PoolPlayers::at(pool.as_ref())?;
    let Prepared { players, mut subjects, left_out, host, directory: _directory } =
        arguments.players.prepare(pool.as_mut(), snapshots, arguments.concurrency)?;
    if arguments.noise {
        subjects.extend_from_within(..);
    }
    let mut caches = Vec::new();
    for cache in &arguments.cache {
        let cache = match cache {
            CacheArg::Cold => Cache::Cold,
            CacheArg::Cached => Cache::Cached,
            CacheArg::CachedSmall => Cache::CachedSmall,
        };
        if !caches.contains(&cache) {
            caches.push(cache);
        }
    }
    let session = Session {
        program,
        players,
        subjects,
        runs: arguments.runs,
        warm_up: arguments.warm_up,
        concurrency: arguments.concurrency,
        caches,
        faults: false,
    };
    let bar = progress(session.batches());
    let results = session.run(host, &interrupt, |player, subject| {
        bar.set_message(format!("{} on {}", subject.planner, player.trace));
        bar.inc(1);
    });
    bar.finish_and_clear();
    let mut results = results?;
    results.left_out = left_out;
    results.dense = arguments.players.dense;
    results.unsanitised = arguments.players.unsanitised;
    tables::print(&results);
    if let Some(json) = json {
        json.write(&(serde_json::to_string_pretty(&results)? + "\n"))?;
    }
    if let Some(plot) = plot {
        plot.write(&svg::draw(&results))?;
    }
    Ok(ExitCode::SUCCESS)
}
