//! `firn profile show`: a profile as text, JSON, and a picture.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, ensure};
use clap::Args;

use super::picture;
use super::summary::Summary;
use crate::output;
use crate::snapshot_args::SnapshotArgs;

/// Arguments of `firn profile show`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn profile show snapshots/hello
  firn profile show snapshots/hello --plot hello.svg

The picture has a row for each 2 MiB of guest memory and a cell for each page.")]
pub(crate) struct ShowArgs {
    #[command(flatten)]
    snapshot: SnapshotArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Draw guest memory into a file, as SVG
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

pub(crate) fn run(arguments: &ShowArgs) -> anyhow::Result<ExitCode> {
    let opened = arguments.snapshot.open()?;
    let snapshot = opened.snapshot();
    let path = snapshot.path().display();
    let profile = snapshot.profile()?.with_context(|| {
        format!("the snapshot {path} has no profile: record one with `firn profile record`")
    })?;
    let summary = Summary::of(&profile, snapshot);
    ensure!(
        !summary.is_empty(),
        "the profile of {path} is empty: record one with `firn profile record`"
    );
    if arguments.json {
        output::json(&summary);
    } else {
        output::line(&summary.to_string());
    }
    if let Some(path) = &arguments.plot {
        let picture = picture::draw(&profile, snapshot.zero_map(), &summary.title());
        std::fs::write(path, picture)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}
