//! `firn player`: the measuring guest, made from a trace.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use serde::Serialize;
use thiserror::Error;

use firn_bench::player::{FreezePlayerError, GapFactor, Leaves, PlayerOptions, freeze};
use firn_bench::traces::{LoadTraceError, load};
use firn_vmm::{FreezeReport, KVM_DEVICE};

use crate::output;

/// Arguments of `firn player`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn player --trace sequential-read:64M --out snapshots/read
  firn player --trace pyaes-a --leaves 4k --gaps 1 --out snapshots/pyaes-a
  firn thaw --planner dram_cached --json snapshots/read

The player repeats the page accesses of a recorded function and checks what it reads; it runs natively on any KVM.")]
pub(crate) struct PlayerArgs {
    /// A trace that firn carries, sequential-read:SIZE, sequential-write:SIZE, or the path of a .trace file
    #[arg(long, value_name = "NAME")]
    trace: String,
    /// Where the snapshot is made
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Leaves of the guest's own page tables: recorded, 4k or 2m
    #[arg(long, value_name = "LEAVES", default_value_t = Leaves::Recorded)]
    leaves: Leaves,
    /// What the recorded work between touches is multiplied with; 0: faults alone
    #[arg(long, value_name = "FACTOR", default_value_t = GapFactor::NONE)]
    gaps: GapFactor,
    /// Decides about the content of memory
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,
    /// Write zero pages too, instead of leaving holes
    #[arg(long)]
    dense: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// The KVM device
    #[arg(long, value_name = "DEVICE", default_value = KVM_DEVICE, hide = true)]
    kvm: PathBuf,
}

/// Why there is no player.
#[derive(Debug, Error)]
pub(crate) enum PlayerCommandError {
    #[error(transparent)]
    Trace(#[from] LoadTraceError),
    #[error(transparent)]
    Freeze(#[from] FreezePlayerError),
}

#[derive(Serialize)]
struct Answer {
    trace: String,
    touches: usize,
    pages: u64,
    snapshot: PathBuf,
    freeze: FreezeReport,
}

pub(crate) fn run(arguments: &PlayerArgs) -> Result<ExitCode, PlayerCommandError> {
    let trace = load(&arguments.trace)?;
    let options =
        PlayerOptions { leaves: arguments.leaves, gaps: arguments.gaps, seed: arguments.seed };
    let freeze = freeze(&trace, &options, &arguments.kvm, &arguments.out, arguments.dense)?;
    let answer = Answer {
        touches: trace.trace.touches().len(),
        pages: trace.trace.touched_pages(),
        trace: trace.name,
        snapshot: arguments.out.clone(),
        freeze,
    };
    if arguments.json {
        output::json(&answer);
    } else {
        output::line(&format!(
            "{}: a player of {} touches of {} pages; {} pages stored, {} zero; thaw it with `firn thaw {}`",
            answer.trace,
            answer.touches,
            answer.pages,
            answer.freeze.stored_pages,
            answer.freeze.zero_pages,
            answer.snapshot.display(),
        ));
    }
    Ok(ExitCode::SUCCESS)
}
