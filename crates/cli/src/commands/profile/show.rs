//! `firn profile show`: a profile as text, JSON, and a picture.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use thiserror::Error;

use firn_snapshot::OpenError;

use super::picture;
use super::summary::Summary;
use crate::output;
use crate::snapshot_args::{OpenSnapshotError, SnapshotArgs};

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

/// Why no profile is shown.
#[derive(Debug, Error)]
pub(crate) enum ShowError {
    #[error(transparent)]
    Open(#[from] OpenSnapshotError),
    #[error(transparent)]
    Profile(#[from] OpenError),
    #[error("the snapshot {} has no profile: record one with `firn profile record`", .0.display())]
    NoProfile(PathBuf),
    #[error("the profile of {} is empty: record one with `firn profile record`", .0.display())]
    Empty(PathBuf),
    #[error("writing {path}")]
    Write { path: PathBuf, source: std::io::Error },
}

pub(crate) fn run(arguments: &ShowArgs) -> Result<ExitCode, ShowError> {
    let opened = arguments.snapshot.open()?;
    let snapshot = opened.snapshot();
    let none = || ShowError::NoProfile(snapshot.path().to_owned());
    let profile = snapshot.profile()?.ok_or_else(none)?;
    let summary = Summary::of(&profile, snapshot);
    if summary.is_empty() {
        return Err(ShowError::Empty(snapshot.path().to_owned()));
    }
    if arguments.json {
        output::json(&summary);
    } else {
        output::line(&summary.to_string());
    }
    if let Some(path) = &arguments.plot {
        let picture = picture::draw(&profile, snapshot.zero_map(), &summary.title());
        std::fs::write(path, picture)
            .map_err(|source| ShowError::Write { path: path.clone(), source })?;
    }
    Ok(ExitCode::SUCCESS)
}
