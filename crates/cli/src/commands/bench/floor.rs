//! `firn bench floor`: a comparison of the player with a bare loop.

use std::path::PathBuf;

use clap::Args;

use firn_base::parse_size;
use firn_bench::floor::{FloorAccess, FloorConfig, FloorLeaves};

use super::{measure, prepare};
use crate::output;

/// Arguments of `firn bench floor`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn bench floor
  firn bench floor --leaves 2m
  firn bench floor --access write --pairs 10 --json floor.json

Both touch every page once, in order, with the same plan and a cached image. The loop runs without a monitor.")]
pub(crate) struct FloorArgs {
    /// Number of pairs: one run of the loop and one of the player
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pairs: u32,
    /// Memory to touch; default: 64M with leaves of 4k, 1G with leaves of 2m, which take
    /// milliseconds
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    memory: Option<u64>,
    /// Leaves of both guests' page tables; with 2m the image lies on a tmpfs of huge pages
    #[arg(long, default_value = "4k", value_parser = ["4k", "2m"])]
    leaves: String,
    /// Access to each page
    #[arg(long, default_value = "read", value_parser = ["read", "write"])]
    access: String,
    /// Write the results to a file as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Directory for the player's snapshot, with leaves of 4k; default: the directory for temporary
    /// files
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

pub(super) fn run(arguments: &FloorArgs) -> anyhow::Result<()> {
    let json = prepare(arguments.json.as_deref())?;
    let config = FloorConfig {
        pairs: arguments.pairs,
        memory: arguments.memory,
        leaves: if arguments.leaves == "2m" { FloorLeaves::Large } else { FloorLeaves::Small },
        access: if arguments.access == "write" { FloorAccess::Write } else { FloorAccess::Read },
        directory: arguments.dir.clone(),
    };
    let results = measure(|harness| Ok(config.run(harness)?))?;
    output::line(&config.text(&results));
    Ok(json.map_or(Ok(()), |json| json.write_json(&results))?)
}
