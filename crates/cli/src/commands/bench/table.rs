//! `firn bench table`: results of many sessions as tables for a document.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use thiserror::Error;

use firn_bench::{Results, table};

use super::save::{Output, SaveError};
use crate::output;

/// Arguments of `firn bench table`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn bench thaw --dense --unsanitised --cache cold --trace json-a --json results/json-a.json
  firn bench thaw --dense --unsanitised --cache cold --trace image-a --json results/image-a.json
  firn bench table --plot results/table.svg results/*.json >results/table.md

Sessions that measured in the same way share a table: a row for each trace, a column for each planner. Beside unsanitised guests
faasnap is shown of a sanitised one, where that was measured. `make restores-table` measures and shows all of it.")]
pub(crate) struct TableArgs {
    /// Files that `firn bench thaw --json` wrote
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Draw a picture into a file, as SVG: how long each planner takes beside Firecracker, and how much DRAM
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

/// Why there is no table.
#[derive(Debug, Error)]
pub(crate) enum TableError {
    #[error("reading {path}")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path} holds no results of `firn bench thaw`")]
    Results { path: PathBuf, source: serde_json::Error },
    #[error(transparent)]
    Save(#[from] SaveError),
}

pub(crate) fn run(arguments: &TableArgs) -> Result<ExitCode, TableError> {
    let plot = Output::prepare(arguments.plot.as_deref())?;
    let read = |path: &PathBuf| {
        let text = fs::read(path).map_err(|source| TableError::Read { path: path.clone(), source });
        serde_json::from_slice::<Results>(&text?)
            .map_err(|source| TableError::Results { path: path.clone(), source })
    };
    let sessions = arguments.files.iter().map(read).collect::<Result<Vec<_>, _>>()?;
    output::line(&table::markdown(&sessions));
    if let Some(plot) = plot {
        plot.write(&table::draw(&sessions))?;
    }
    Ok(ExitCode::SUCCESS)
}
