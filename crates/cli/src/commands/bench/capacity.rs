//! `firn bench capacity`: the number of microVMs that fit into a memory budget.

use std::time::Duration;

use clap::Args;

use firn_base::parse_size;
use firn_bench::{Budget, CapacityConfig};

use super::players::PlayersArgs;
use super::{FilesArgs, measure};
use crate::output;

/// Arguments of `firn bench capacity`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn bench capacity --memory 256M --trace json-a --planner firecracker,dram_cached
  firn bench capacity --memory 256M --trace json-a --planner firecracker,pass_shared,pass --pool pool.sock

MicroVMs start one after the other and keep running. Each first replays its trace, and all pages that it touches are checked.
The budget is a memory cgroup around all of them. It does not include the pool, which its manager filled.")]
pub(crate) struct CapacityArgs {
    #[command(flatten)]
    players: PlayersArgs,
    /// Memory of all microVMs together
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    memory: u64,
    /// Highest number of microVMs to start
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    most: u32,
    /// Longest time for a microVM to replay its trace, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    patience: u64,
    #[command(flatten)]
    files: FilesArgs,
}

pub(super) fn run(arguments: &CapacityArgs) -> anyhow::Result<()> {
    let files = arguments.files.prepare()?;
    let (players, _pool) = arguments.players.config()?;
    let budget = Budget {
        memory: arguments.memory,
        most: arguments.most,
        patience: Duration::from_secs(arguments.patience),
    };
    let config = CapacityConfig { players, budget };
    let capacities = measure(|harness| Ok(config.run(harness)?))?;
    output::line(&capacities.text());
    Ok(files.write(&capacities, &capacities.draw())?)
}
