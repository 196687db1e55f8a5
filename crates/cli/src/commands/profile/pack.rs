//! `firn profile pack`: the file that a planner maps, packed from the image by the profile.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use thiserror::Error;

use firn_memory::planners::{PackError, ParsePlannerError, pack, parse};

use crate::output;

/// Arguments of `firn profile pack`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn profile pack --planner faasnap snapshots/hello
  firn profile pack --planner faasnap:merge=0 --json snapshots/hello

A snapshot has one file of each kind: packing for other options replaces it. One that was packed from the same stays.")]
pub(crate) struct PackArgs {
    /// Directory of the snapshot
    snapshot: PathBuf,
    /// The planner, as NAME[:KEY=VALUE,...]
    #[arg(long, value_name = "PLANNER")]
    planner: String,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Why nothing was packed.
#[derive(Debug, Error)]
pub(crate) enum PackCommandError {
    #[error(transparent)]
    Planner(#[from] ParsePlannerError),
    #[error(transparent)]
    Pack(#[from] PackError),
    #[error("{0} maps no file of its own: there is nothing to pack")]
    Nothing(String),
}

pub(crate) fn run(arguments: &PackArgs) -> Result<ExitCode, PackCommandError> {
    let planner = parse(&arguments.planner)?;
    let report = pack(&arguments.snapshot, &*planner)?;
    let report = report.ok_or_else(|| PackCommandError::Nothing(planner.name()))?;
    if arguments.json {
        output::json(&report);
    } else {
        output::line(&format!(
            "{}: {} pages in {} runs ({} before merging){}",
            report.file.name(),
            report.pages,
            report.runs,
            report.runs_before_merging,
            if report.was_there { ", was there already" } else { "" },
        ));
    }
    Ok(ExitCode::SUCCESS)
}
