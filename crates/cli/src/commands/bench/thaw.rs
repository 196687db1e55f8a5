//! `firn bench thaw`: a comparison of planners on the player.

use std::path::PathBuf;

use anyhow::ensure;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};

use firn_bench::{Cache, ThawConfig};

use super::players::PlayersArgs;
use super::{FilesArgs, measure};
use crate::output;

/// Arguments of `firn bench thaw`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn bench thaw --trace sequential-read:64M
  firn bench thaw --planner firecracker:readahead=off,dram_cached --trace json-a --cache cold --runs 50
  firn bench thaw --planner firecracker --noise --trace sequential-read:64M
  firn bench thaw --planner firecracker,pass_shared,pass --pool pool.sock --trace sequential-read:512M --leaves 2m
  firn bench thaw --trace json-a --cache cold,cached --runs 3
  firn bench thaw --planner pass_shared,pass,firn --pool pool.sock --trace json-a --runs 20 --warm-up 2 --open-loop 200
  firn bench thaw --planner pass,firn:granule=16k --standby --ready firn:granule=16k --pool pool.sock --trace json-a
  firn bench thaw --trace json-a --concurrency 32 --runs 3 --json results.json --plot results.svg
  firn bench thaw --planner firecracker --trace json-a --cache cold --gaps 1 --again 1000 --warm
  firn bench thaw --planner firecracker,firn --pool pool.sock --trace json-a --firecracker /usr/bin/firecracker

Each microVM is a process of its own, and all its pages are checked after the time was measured: a single wrong page fails
the command. Planners that use a profile get one that was recorded before all measurements on the function's other input, if
it has one: -b for a trace whose name ends in -a, and the reverse. Planners take turns run by run, in random order. A
planner that is listed twice is compared with itself, and so is one of several planners.")]
pub(crate) struct BenchThawArgs {
    #[command(flatten)]
    players: PlayersArgs,
    /// Runs of each planner on each trace
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    runs: u32,
    /// Runs before the first measured one, for planners that map from a pool: the first run waits
    /// for replicas and copies, later ones find as many as a run takes
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=1000))]
    warm_up: u32,
    /// MicroVMs that start together in a run; if there are more than processors, compare processor
    /// time, not wall time
    #[arg(long, value_name = "C", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    concurrency: u32,
    /// Page cache before each run: no page of the snapshot, or every page; with cached-4k in folios
    /// of 4 KiB, as in the papers' kernels. Several, separated by commas, are measured one after
    /// the other
    #[arg(long, default_value = "cached", value_delimiter = ',',
        value_parser = PossibleValuesParser::new(["cold", "cached", "cached-4k"]).map(|name| cache(&name)))]
    cache: Vec<Cache>,
    /// Whether the microVMs of a run share a snapshot, or each has one of its own with other
    /// content
    #[arg(long, default_value = "same", value_parser = ["same", "different"])]
    snapshots: String,
    /// Measure every planner twice, as a and as b: the difference is noise. Without it, one of
    /// several planners is
    #[arg(long)]
    noise: bool,
    /// Seed of the random order in which the planners have their turns; the results have it
    #[arg(long, value_name = "SEED")]
    order: Option<u64>,
    /// Start each microVM in a standby monitor: the process, the VM and its vCPUs are made before
    /// the request
    #[arg(long)]
    standby: bool,
    /// Measure each planner also with monitors that are not jailed, in the same rounds
    #[arg(long)]
    unjailed: bool,
    /// Start the microVMs of these planners from ready clones: all of a start but the identity and
    /// the resume is done before the request. Of a pool's planners each clone has its copy or
    /// replica
    #[arg(long, value_name = "PLANNERS")]
    ready: Vec<String>,
    /// After the runs, start N more of each planner on each trace at random intervals of 5 to 500
    /// ms, as requests arrive: none waits for an earlier one, or for the pool's manager
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=100_000))]
    open_loop: u32,
    /// Replay the trace or the function's other input in each run, by this seed: every planner gets
    /// the same sequence, and `firn` learns from both
    #[arg(long, value_name = "SEED")]
    mix: Option<u64>,
    /// Let each microVM serve a second invocation, the one that the trace has recorded or an
    /// identical one: cold and warm beside each other
    #[arg(long, conflicts_with = "open_loop")]
    warm: bool,
    /// Measure a program with Firecracker's API, such as Firecracker itself, in the same rounds: it
    /// boots the player, snapshots it, and loads the snapshot in each run
    #[arg(long, value_name = "PROGRAM", env = "FIRECRACKER",
        conflicts_with_all = ["standby", "mix", "warm"])]
    firecracker: Option<PathBuf>,
    #[command(flatten)]
    files: FilesArgs,
}

fn cache(name: &str) -> Cache {
    match name {
        "cold" => Cache::Cold,
        "cached" => Cache::Cached,
        _ => Cache::CachedSmall,
    }
}

pub(super) fn run(arguments: &BenchThawArgs) -> anyhow::Result<()> {
    if arguments.open_loop > 0 {
        ensure!(
            arguments.ready.is_empty(),
            "starts at random intervals take standby monitors, no ready clones: leave out --ready with --open-loop"
        );
        ensure!(
            arguments.concurrency == 1 && !arguments.cache.contains(&Cache::Cold),
            "starts at random intervals are compared with single ones, and the first one fills the page cache: leave out \
             --concurrency and --cache cold with --open-loop"
        );
    }
    ensure!(
        arguments.firecracker.is_none()
            || (arguments.concurrency == 1 && arguments.ready.is_empty()),
        "another program is compared with single starts in monitors of their own: leave out --concurrency and --ready with \
         --firecracker"
    );
    let files = arguments.files.prepare()?;
    let (players, _pool) = arguments.players.config()?;
    let config = ThawConfig {
        players,
        runs: arguments.runs,
        warm_up: arguments.warm_up,
        concurrency: arguments.concurrency,
        caches: arguments.cache.clone(),
        different_snapshots: arguments.snapshots == "different",
        noise: arguments.noise,
        order: arguments.order.unwrap_or(ThawConfig::default().order),
        standby: arguments.standby,
        unjailed: arguments.unjailed,
        ready: arguments.ready.clone(),
        open_loop: arguments.open_loop,
        mix: arguments.mix,
        warm: arguments.warm,
        firecracker: arguments.firecracker.clone(),
    };
    let results = measure(|harness| Ok(config.run(harness)?))?;
    output::line(&results.text());
    Ok(files.write(&results, &results.draw())?)
}
