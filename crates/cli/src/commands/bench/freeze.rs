//! `firn bench freeze`: freezes into a directory and a pool.

use std::path::PathBuf;

use clap::Args;

use firn_base::parse_size;
use firn_bench::freeze::FreezeConfig;

use super::{measure, players, prepare};
use crate::output;

/// Arguments of `firn bench freeze`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn bench freeze
  firn bench freeze --dir /mnt/nvme --pool /dev/dax0.0 --json freeze.json
  firn bench freeze --memory 256M --used 32M --runs 50
  firn bench freeze --no-fio

Each freeze is of a new guest, all of whose used pages are dirty. The time runs from the request to the published, durable
snapshot. After each freeze fio writes as many bytes to the same medium and syncs them. Each snapshot is thawed, and the
player checks every byte, before it is removed.")]
pub(crate) struct BenchFreezeArgs {
    /// Freezes into each destination
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    runs: u32,
    /// Guest memory
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = parse_size)]
    memory: u64,
    /// Memory in use; the guest has never touched the rest
    #[arg(long, value_name = "SIZE", default_value = "80M", value_parser = parse_size)]
    used: u64,
    /// Directory for the snapshots, on the medium to measure; default: the directory for temporary
    /// files
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Pool to freeze into, too: its medium, whose manager is started if none runs, or its
    /// manager's socket
    #[arg(long, value_name = "PATH")]
    pool: Option<PathBuf>,
    /// Do not run fio for comparison
    #[arg(long)]
    no_fio: bool,
    /// Write the results to a file as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

pub(super) fn run(arguments: &BenchFreezeArgs) -> anyhow::Result<()> {
    let json = prepare(arguments.json.as_deref())?;
    let (socket, _pool) = players::open(arguments.pool.as_deref())?;
    let config = FreezeConfig {
        runs: arguments.runs,
        memory: arguments.memory,
        used: arguments.used,
        directory: arguments.dir.clone(),
        pool: socket,
        reference: !arguments.no_fio,
    };
    let results = measure(|harness| Ok(config.run(harness)?))?;
    output::line(&results.text());
    Ok(json.map_or(Ok(()), |json| json.write_json(&results))?)
}
