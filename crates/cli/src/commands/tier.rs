//! `firn tier`: the memories and disks of this host that snapshots can be on.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;

use firn_base::{error_chain, format_bytes, parse_size};
use firn_bench::tier::{Price, ProbeConfig, SnapshotSize, Space, Tier, TierList, TierMedium};

use super::bench::measure;
use crate::output;
use crate::signature_args::VerifierArgs;

/// Commands of `firn tier`.
#[derive(Debug, Subcommand)]
pub(crate) enum TierCommand {
    /// Add a memory or disk to the list of tiers
    #[command(after_help = "Examples:
  firn tier add dram --medium dram --capacity 8G --price 16.61
  firn tier add cxl --medium node --node 1 --price 7.85
  firn tier add pmem --medium devdax --path /dev/dax0.0 --price 7.85
  firn tier add ssd --medium disk --path /mnt/ssd --price 0.35

The medium is checked, and nothing is written to it. The list is tiers.json in firn's cache directory.")]
    Add(AddArgs),
    /// List the tiers, whether their media can be used now, and what a snapshot costs there
    #[command(after_help = "Examples:
  firn tier ls
  firn tier ls --snapshot snapshots/json

With --snapshot each tier has the bytes that the snapshot takes there, their price, and how many such snapshots fit into what
is free and within the capacity. On a file system these are the directory's files; on other media an extent of a pool, which
stores zero pages, too.")]
    Ls(ListArgs),
    /// Remove a tier from the list; its medium stays as it is
    Rm(RmArgs),
    /// Measure tiers: latency, rates with 1 to 32 readers, the cost of writes
    #[command(after_help = "Examples:
  firn tier probe ssd
  firn tier probe dram ssd --json

Latency is that of a random read of 4 KiB by one reader. A disk is read past the page cache. The micro-benchmark is that of
SYSTOR '22, section 4.2.1: each thread copies the first half of its file of 16 MiB in blocks of 4 KiB in random order, and then
reads the other half in blocks of 64 bytes; there a disk is read through the page cache, which is empty before each point.
A devdax device is only read, because it may hold a pool. A tier that fails is named, and the others are measured.")]
    Probe(ProbeArgs),
}

/// The kind of a medium.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Kind {
    /// This host's DRAM
    Dram,
    /// Reserved huge pages
    Huge,
    /// The memory of a NUMA node (--node), such as CXL memory
    Node,
    /// A devdax character device (--path)
    Devdax,
    /// A directory on a DAX file system (--path)
    Dax,
    /// A directory on a file system on a block device (--path)
    Disk,
}

/// Arguments of `firn tier add`.
#[derive(Debug, Args)]
pub(crate) struct AddArgs {
    /// Name of the tier
    name: String,
    /// Kind of the medium
    #[arg(long, value_name = "KIND")]
    medium: Kind,
    /// The device or directory
    #[arg(long, value_name = "PATH", required_if_eq_any([("medium", "devdax"), ("medium", "dax"), ("medium", "disk")]))]
    path: Option<PathBuf>,
    /// The NUMA node
    #[arg(long, value_name = "N", required_if_eq("medium", "node"))]
    node: Option<u32>,
    /// Bytes that snapshots may use, such as 64G; default: all of the medium
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    capacity: Option<u64>,
    /// Price of a GiB, in any currency
    #[arg(long, value_name = "AMOUNT", allow_negative_numbers = true)]
    price: Price,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Arguments of `firn tier ls`.
#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Also show what this snapshot takes and costs on each tier
    #[arg(long, value_name = "DIR")]
    snapshot: Option<PathBuf>,
    #[command(flatten)]
    signed: VerifierArgs,
    /// Print one JSON array
    #[arg(long)]
    json: bool,
}

/// Arguments of `firn tier rm`.
#[derive(Debug, Args)]
pub(crate) struct RmArgs {
    /// Name of the tier
    name: String,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Arguments of `firn tier probe`.
#[derive(Debug, Args)]
pub(crate) struct ProbeArgs {
    /// Names of tiers
    #[arg(value_name = "NAME", required = true)]
    names: Vec<String>,
    /// Bytes of the test area, a multiple of 32M; the micro-benchmark has 32 files of a 32nd each,
    /// of 2M to 16M
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "512M")]
    size: u64,
    /// The longest time of each of the 20 points, ms
    #[arg(long, value_name = "MS", default_value_t = 500, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    time: u64,
    /// Print one JSON array
    #[arg(long)]
    json: bool,
}

/// A tier in the list, with what its medium is now.
#[derive(Serialize)]
struct Listed<'a> {
    #[serde(flatten)]
    tier: &'a Tier,
    /// Bytes of the medium, where it can be used.
    #[serde(flatten)]
    space: Option<Space>,
    /// Why it cannot be used.
    error: Option<String>,
    /// The snapshot on it.
    #[serde(skip_serializing_if = "Option::is_none")]
    snapshot: Option<SnapshotOnTier>,
}

/// A snapshot on a tier.
#[derive(Serialize)]
struct SnapshotOnTier {
    /// Bytes.
    bytes: u64,
    /// Their price.
    cost: f64,
    /// The number of such snapshots that fit now, where the tier can be used.
    fit: Option<u64>,
}

pub(crate) fn run(command: &TierCommand) -> anyhow::Result<ExitCode> {
    match command {
        TierCommand::Add(arguments) => add(arguments)?,
        TierCommand::Ls(arguments) => list(arguments)?,
        TierCommand::Rm(arguments) => remove(arguments)?,
        TierCommand::Probe(arguments) => return probe(arguments),
    }
    Ok(ExitCode::SUCCESS)
}

/// The list's file.
pub(super) fn file() -> anyhow::Result<PathBuf> {
    let folder = firn_lab::cache_dir();
    let folder = folder.context("no directory for the list of tiers: set HOME or FIRN_CACHE")?;
    Ok(folder.join("tiers.json"))
}

fn medium(arguments: &AddArgs) -> TierMedium {
    let path = arguments.path.clone().unwrap_or_default();
    match arguments.medium {
        Kind::Dram => TierMedium::Dram {},
        Kind::Huge => TierMedium::HugePages {},
        Kind::Node => TierMedium::Node { node: arguments.node.unwrap_or_default() },
        Kind::Devdax => TierMedium::Devdax { path },
        Kind::Dax => TierMedium::DaxFs { path },
        Kind::Disk => TierMedium::Disk { path },
    }
}

fn add(arguments: &AddArgs) -> anyhow::Result<()> {
    let AddArgs { name, capacity, price, .. } = arguments;
    let tier = Tier::new(name, medium(arguments), *capacity, *price)?;
    TierList::lock(&file()?)?.add(tier.clone())?;
    if arguments.json {
        output::json(&tier);
    } else {
        let Tier { name, medium, capacity, .. } = &tier;
        output::line(&format!("added {name}: {} of {medium}", format_bytes(*capacity)));
    }
    Ok(())
}

fn list(arguments: &ListArgs) -> anyhow::Result<()> {
    let verifier = arguments.signed.verifier()?;
    let size = |path| SnapshotSize::of(path, verifier.as_ref());
    let size = arguments.snapshot.as_deref().map(size).transpose()?;
    let list = TierList::read(&file()?)?;
    let listed = list.tiers().iter().map(|tier| {
        let (space, error) = match tier.check() {
            Ok(space) => (Some(space), None),
            Err(error) => (None, Some(error_chain(&error))),
        };
        let snapshot = size.map(|size| {
            let bytes = size.on(&tier.medium);
            let fit = space.and_then(|space| tier.usable(space).checked_div(bytes));
            SnapshotOnTier { bytes, cost: tier.cost(bytes), fit }
        });
        Listed { tier, space, error, snapshot }
    });
    let listed: Vec<Listed<'_>> = listed.collect();
    if arguments.json {
        output::json(&listed);
        return Ok(());
    }
    let rows = listed.iter().map(|Listed { tier, space, error, snapshot }| {
        let free = space.map_or(String::new(), |space| format_bytes(space.free));
        let Tier { name, medium, capacity, price, .. } = tier;
        let mut row = vec![
            name.clone(),
            medium.to_string(),
            format_bytes(*capacity),
            free,
            price.to_string(),
        ];
        if let Some(SnapshotOnTier { bytes, cost, fit }) = snapshot {
            let fit = fit.map_or(String::new(), |fit| fit.to_string());
            row.extend([format_bytes(*bytes), format!("{cost:.4}"), fit]);
        }
        row.push(if error.is_none() { "ok" } else { "unusable" }.to_owned());
        row
    });
    let mut head = vec!["name", "medium", "capacity", "free", "price of a GiB"];
    if size.is_some() {
        head.extend(["the snapshot", "its price", "fit"]);
    }
    head.push("state");
    output::line(&output::table(&head, &rows.collect::<Vec<_>>()));
    // A reason is wider than the table.
    for Listed { tier, error, .. } in &listed {
        if let Some(error) = error {
            output::line(&format!("{}: {error}", tier.name));
        }
    }
    Ok(())
}

fn remove(arguments: &RmArgs) -> anyhow::Result<()> {
    let removed = TierList::lock(&file()?)?.remove(&arguments.name)?;
    if arguments.json {
        output::json(&removed);
    } else {
        output::line(&format!("removed {}; {} stays as it is", removed.name, removed.medium));
    }
    Ok(())
}

fn probe(arguments: &ProbeArgs) -> anyhow::Result<ExitCode> {
    let list = TierList::read(&file()?)?;
    // A name that is not in the list is found out before anything is measured.
    let tiers = arguments.names.iter().map(|name| list.get(name)).collect::<Result<Vec<_>, _>>()?;
    let config = ProbeConfig { time: Duration::from_millis(arguments.time), size: arguments.size };
    let (mut probes, mut code) = (Vec::new(), ExitCode::SUCCESS);
    measure(|harness| {
        for tier in tiers {
            match config.run(tier, harness) {
                Ok(probe) if arguments.json => probes.push(probe),
                Ok(probe) => output::line(&probe.text()),
                Err(error) => {
                    let is_interrupt = error.is_interrupt();
                    let error = anyhow::Error::from(error);
                    let error = error.context(format!("cannot measure the tier {}", tier.name));
                    output::print_error(error.as_ref());
                    code = ExitCode::FAILURE;
                    if is_interrupt {
                        break;
                    }
                }
            }
        }
        Ok(())
    })?;
    if arguments.json {
        output::json(&probes);
    }
    Ok(code)
}
