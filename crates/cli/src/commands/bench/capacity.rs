//! `firn bench capacity`: how many microVMs a memory budget carries.

use std::error::Error as StdError;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use firn_base::{format_bytes, parse_size};
use thiserror::Error;

use firn_bench::{Capacities, Capacity, CapacityError, CapacityRow, Carried, Interrupt};
use firn_memory::planners::{pack, parse};

use super::in_pool::{InPoolError, PoolPlayers};
use super::players::{PlayersArgs, PlayersError, Prepared};
use super::progress;
use super::save::{Output, SaveError};
use crate::output;

/// Arguments of `firn bench capacity`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn bench capacity --memory 256M --trace json-a --planner firecracker,dram_cached
  firn bench capacity --memory 256M --trace json-a --planner firecracker,pass_shared,pass --pool pool.sock

MicroVMs are started one after the other and stay; each replays its trace first, and all pages that it touches are
checked. The budget is a memory cgroup around all of them. What lies in a pool was filled by its manager and is not in it.")]
pub(crate) struct CapacityArgs {
    #[command(flatten)]
    players: PlayersArgs,
    /// What all microVMs may have together
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    memory: u64,
    /// Start no more than so many
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    most: u32,
    /// Seconds that one may take to replay its trace
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    patience: u64,
    /// Write the results to a file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw the results into a file, as SVG
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

/// Why nothing was counted.
#[derive(Debug, Error)]
pub(crate) enum BenchCapacityError {
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
    Fill(#[from] FillError),
    #[error("the results have no JSON form")]
    Json(#[from] serde_json::Error),
}

pub(crate) fn run(arguments: &CapacityArgs) -> Result<ExitCode, BenchCapacityError> {
    let json = Output::prepare(arguments.json.as_deref())?;
    let plot = Output::prepare(arguments.plot.as_deref())?;
    let program = std::env::current_exe().map_err(BenchCapacityError::Program)?;
    let interrupt = Interrupt::catch().map_err(BenchCapacityError::Signals)?;
    let pool = arguments.players.pool()?;
    let mut pool = PoolPlayers::at(pool.as_ref())?;
    let prepared = arguments.players.prepare(pool.as_mut(), 1, 1)?;
    let budget = Budget {
        memory: arguments.memory,
        most: arguments.most,
        patience: Duration::from_secs(arguments.patience),
    };
    let capacities = fill(&budget, &program, &prepared, pool.as_mut(), &interrupt)?;
    print(&capacities);
    if let Some(json) = json {
        json.write(&(serde_json::to_string_pretty(&capacities)? + "\n"))?;
    }
    if let Some(plot) = plot {
        plot.write(&capacities.draw())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// What is filled up with microVMs.
pub(super) struct Budget {
    /// What they may have together, in bytes.
    pub(super) memory: u64,
    /// No more than so many are started.
    pub(super) most: u32,
    /// How long one may take to its last page.
    pub(super) patience: Duration,
}

/// Why a budget was not filled.
#[derive(Debug, Error)]
pub(crate) enum FillError {
    #[error(transparent)]
    Pool(#[from] InPoolError),
    #[error("packing the file of {planner}")]
    Pack { planner: String, source: Box<dyn StdError + Send + Sync> },
    #[error("{planner} on {trace} was not counted")]
    Capacity { planner: String, trace: String, source: CapacityError },
}

/// Fills a budget with microVMs of each player by each planner, one after the other.
pub(super) fn fill(
    budget: &Budget,
    program: &Path,
    prepared: &Prepared,
    mut pool: Option<&mut PoolPlayers<'_>>,
    interrupt: &Interrupt,
) -> Result<Capacities, FillError> {
    let &Budget { memory, most, patience } = budget;
    let mut results = Vec::new();
    for player in &prepared.players {
        for subject in &prepared.subjects {
            let (planner, trace) = (subject.planner.clone(), player.trace.clone());
            if subject.packs {
                // Planners of one kind have one file, which is packed for the last of them that asked.
                let pack = || Ok(pack(&player.snapshot, &*parse(&planner)?)?);
                pack().map_err(|source| FillError::Pack { planner: planner.clone(), source })?;
            }
            let snapshot = &player.arguments(subject);
            let capacity =
                Capacity { program, snapshot, planner: &planner, memory, most, patience };
            let bar = progress(u64::from(most));
            bar.set_message(format!("{planner} on {trace}"));
            let mut in_pool = pool.as_deref_mut().filter(|_| subject.in_pool);
            if let Some(pool) = &mut in_pool {
                pool.settle()?;
            }
            let filled = capacity.fill(
                interrupt,
                |microvms| bar.set_position(u64::from(microvms)),
                || in_pool.map(PoolPlayers::used).transpose(),
            );
            bar.finish_and_clear();
            let (carried, used) = filled.map_err(|source| {
                let (planner, trace) = (planner.clone(), trace.clone());
                FillError::Capacity { planner, trace, source }
            })?;
            let (pool_bytes, copy_bytes) = used?.unzip();
            results.push(CapacityRow { planner, trace, carried, pool_bytes, copy_bytes });
        }
    }
    let (host, left_out) = (prepared.host.clone(), prepared.left_out.clone());
    Ok(Capacities { host, memory, results, left_out })
}

fn print(capacities: &Capacities) {
    output::line(&capacities.host.line());
    let rows: Vec<Vec<String>> = capacities
        .results
        .iter()
        .map(|row| {
            let Carried { microvms, usage, end } = &row.carried;
            vec![
                row.planner.clone(),
                row.trace.clone(),
                microvms.to_string(),
                format_bytes(usage.total),
                format_bytes(usage.anonymous),
                format_bytes(usage.page_cache),
                row.copy_bytes.map_or(String::new(), format_bytes),
                row.pool_bytes.map_or(String::new(), format_bytes),
                end.clone().unwrap_or_else(|| "no more were started".to_owned()),
            ]
        })
        .collect();
    let head = [
        "planner",
        "trace",
        "microVMs",
        "charged",
        "anonymous",
        "page cache",
        "copies",
        "pool",
        "then",
    ];
    output::line(&output::table(&head, &rows));
    output::line(&format!(
        "microVMs that had replayed their trace and lived, all at once, in a cgroup of {}; charged: to that cgroup, \
         with the kernel's tables, when the last had; copies: DRAM of the copies that the pool's manager lent them, and pool: bytes of it that they \
         used: neither is in the budget",
        format_bytes(capacities.memory)
    ));
    for left_out in &capacities.left_out {
        output::line(&format!("left out: {}: {}", left_out.planner, left_out.reason));
    }
}
