//! `firn bench compare`: what became slower or faster between two results.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use firn_bench::{Compared, Measured};

use crate::output;

/// A restore became slower.
const REGRESSION: u8 = 4;

/// Arguments of `firn bench compare`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn bench thaw --planner firecracker,reap,faast --trace json-a --json old.json
  firn bench thaw --planner firecracker,reap,faast --trace json-a --json new.json
  firn bench compare old.json new.json

Both are of one host and were measured in the same way; other files are refused. A regression or a gain is a median whose
interval does not overlap the earlier one, and that differs by more than the noise, which each session shows by measuring a
planner twice. `make bench-regression` measures a fixed set of sessions and compares them with an earlier run.

Exit codes: 0 no regression, 1 the files cannot be compared, 4 a regression.")]
pub(crate) struct CompareArgs {
    /// The earlier results, as `firn bench thaw --json` or `firn bench paper` wrote them
    old: PathBuf,
    /// The later results
    new: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(arguments: &CompareArgs) -> anyhow::Result<ExitCode> {
    let (old, new) = (Measured::read(&arguments.old)?, Measured::read(&arguments.new)?);
    let compared = Compared::of(&old, &new)?;
    if arguments.json {
        output::json(&compared);
    } else {
        output::line(&compared.text());
    }
    let code = if compared.has_regression() { REGRESSION } else { 0 };
    Ok(ExitCode::from(code))
}
