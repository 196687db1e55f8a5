//! `firn verify`: whether every byte of a snapshot is what was frozen.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};

use firn_snapshot::{VerifyError, verify};

use crate::output;

/// Arguments of `firn verify`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn verify snapshots/hello
  firn verify --json snapshots/hello")]
pub(crate) struct VerifyArgs {
    /// Directory of the snapshot
    snapshot: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &VerifyArgs) -> Result<ExitCode, VerifyError> {
    let bar = ProgressBar::no_length().with_style(
        ProgressStyle::with_template("verifying {wide_bar} {bytes}/{total_bytes} {eta}")
            .unwrap_or_else(|_| ProgressStyle::default_bar()),
    );
    let result = verify(&arguments.snapshot, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    let report = result?;
    if arguments.json {
        output::json(&report);
    } else {
        output::line(&format!("{}: whole", arguments.snapshot.display()));
    }
    Ok(ExitCode::SUCCESS)
}
