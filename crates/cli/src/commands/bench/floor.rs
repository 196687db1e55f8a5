//! `firn bench floor`: the player beside a bare loop.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use firn_base::parse_size;
use thiserror::Error;

use firn_bench::floor::{CompareError, FloorAccess, FloorComparison, FloorResults};
use firn_bench::player::{
    FreezePlayerError, GapFactor, Leaves, PlayerInputs, PlayerInputsError, PlayerOptions, freeze,
};
use firn_bench::traces::{LoadTraceError, load};
use firn_bench::{Comparison, Host, HostError, Interrupt, svg};
use firn_memory::{GuestRange, Leaf};
use firn_vmm::{Destination, KVM_DEVICE};

use super::medium::{self, HugeTmpfs, MediumError};
use super::progress;
use super::save::{Output, SaveError};
use crate::output;

/// Arguments of `firn bench floor`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn bench floor
  firn bench floor --leaves 2m
  firn bench floor --access write --pairs 10 --json floor.json

Both touch every page once, in order, on the same plan and a cached image. The loop has no monitor around it.")]
pub(crate) struct FloorArgs {
    /// Number of pairs: the loop once, the player once
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pairs: u32,
    /// Memory to touch; default: 64M at leaves of 4k, 1G at 2m, so that either takes milliseconds
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    memory: Option<u64>,
    /// Leaves of both guests' page tables; for 2m the image lies on a tmpfs of huge pages
    #[arg(long, default_value = "4k")]
    leaves: LeavesArg,
    /// What is done to each page
    #[arg(long, default_value = "read")]
    access: AccessArg,
    /// Write the results to a file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Where the player's snapshot is made, for leaves of 4 KiB; default: the folder for temporary files
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LeavesArg {
    #[value(name = "4k")]
    Small,
    #[value(name = "2m")]
    Large,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum AccessArg {
    Read,
    Write,
}

/// Why the player was not compared with the loop.
#[derive(Debug, Error)]
pub(crate) enum FloorCommandError {
    #[error(transparent)]
    Medium(#[from] MediumError),
    #[error(transparent)]
    Save(#[from] SaveError),
    #[error(transparent)]
    Trace(#[from] LoadTraceError),
    #[error(transparent)]
    Inputs(#[from] PlayerInputsError),
    #[error(transparent)]
    Freeze(#[from] FreezePlayerError),
    #[error(transparent)]
    Host(#[from] HostError),
    #[error("finding out where firn itself is")]
    Program(#[source] std::io::Error),
    #[error("preparing to catch signals")]
    Signals(#[source] std::io::Error),
    #[error(transparent)]
    Compare(#[from] CompareError),
    #[error("the results have no JSON form")]
    Json(#[from] serde_json::Error),
}

pub(crate) fn run(arguments: &FloorArgs) -> Result<ExitCode, FloorCommandError> {
    let json = Output::prepare(arguments.json.as_deref())?;
    let program = std::env::current_exe().map_err(FloorCommandError::Program)?;
    let (trace, access) = match arguments.access {
        AccessArg::Read => ("sequential-read", FloorAccess::Read),
        AccessArg::Write => ("sequential-write", FloorAccess::Write),
    };
    let memory = arguments.memory.unwrap_or(match arguments.leaves {
        LeavesArg::Small => 64 << 20,
        LeavesArg::Large => 1 << 30,
    });
    let inputs = PlayerInputs::new(vec![load(&format!("{trace}:{memory}"))?])?;
    let interrupt = Interrupt::catch().map_err(FloorCommandError::Signals)?;
    let (directory, huge, leaves, leaf) = match arguments.leaves {
        LeavesArg::Small => {
            let directory = medium::directory(arguments.dir.as_deref())?;
            (Some(directory), None, Leaves::All4K, Leaf::Size4K)
        }
        LeavesArg::Large => (None, Some(HugeTmpfs::mount()?), Leaves::All2M, Leaf::Size2M),
    };
    let folder = directory.as_ref().map(tempfile::TempDir::path);
    let folder = folder.or(huge.as_ref().map(HugeTmpfs::path)).unwrap_or(std::path::Path::new("."));
    let host = Host::of(folder)?;
    let snapshot = folder.join("player");
    let options = PlayerOptions { leaves, gaps: GapFactor::NONE, ..PlayerOptions::default() };
    let destination = Destination::Directory(snapshot.clone());
    freeze(&inputs, &options, KVM_DEVICE.as_ref(), destination, true)?;
    let comparison = FloorComparison {
        program,
        snapshot,
        range: GuestRange { start: 0, len: memory },
        access,
        leaf,
        planner: "firecracker".to_owned(),
        pairs: arguments.pairs,
    };
    let bar = progress(u64::from(arguments.pairs));
    let results = comparison.run(host, &interrupt, || bar.inc(1));
    bar.finish_and_clear();
    let results = results?;
    print(&results, arguments);
    if let Some(json) = json {
        json.write(&serde_json::to_string_pretty(&results)?)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn print(results: &FloorResults, arguments: &FloorArgs) {
    let FloorResults { floor_ns_per_page: floor, player_ns_per_page: player, .. } = results;
    let row = |name: &str, summary: &firn_bench::Summary, which: usize| {
        vec![
            name.to_owned(),
            svg::number(summary.median),
            svg::number(summary.p95),
            svg::number(summary.min),
            svg::number(summary.max),
            format!("{:.1} %", summary.spread * 100.0),
            results.kvm_page_faults[which].to_string(),
            results.kvm_pages_2m[which].to_string(),
        ]
    };
    let head =
        ["ns per page", "median", "p95", "min", "max", "spread", "KVM faults", "2 MiB leaves"];
    output::line(&results.host.line());
    output::line(&format!(
        "{} pages, {:?}, leaves of {}, {}, {} pairs",
        results.pages,
        arguments.access,
        if arguments.leaves == LeavesArg::Small { "4 KiB" } else { "2 MiB" },
        results.planner,
        results.ratio.pairs,
    ));
    output::line(&output::table(&head, &[row("loop", floor, 0), row("player", player, 1)]));
    output::line(&format!("player / loop: {}", compared(&results.ratio)));
    let difference = compared(&results.difference_ns_per_page);
    output::line(&format!("player - loop: {difference} ns per page"));
}

/// A median with its confidence interval.
pub(super) fn compared(comparison: &Comparison) -> String {
    let Comparison { median, low, high, confidence, .. } = comparison;
    format!("{median:.3} ({low:.3} to {high:.3} with {:.0} % confidence)", confidence * 100.0)
}
