//! `firn bench table`: the results of many sessions as tables for a document.

use std::path::PathBuf;

use clap::Args;

use firn_bench::{Results, draw_sessions, sessions_markdown};

use super::prepare;
use crate::output;

/// Arguments of `firn bench table`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn bench thaw --dense --unsanitised --cache cold --trace json-a --json results/json-a.json
  firn bench thaw --dense --unsanitised --cache cold --trace image-a --json results/image-a.json
  firn bench table --plot results/table.svg results/*.json >results/table.md

Sessions with the same conditions share a table: a row for each trace, a column for each planner. `make restores-table` runs
all of these measurements.")]
pub(crate) struct TableArgs {
    /// Files that `firn bench thaw --json` wrote
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Draw a picture into a file as SVG: time and DRAM of each planner relative to Firecracker
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

pub(super) fn run(arguments: &TableArgs) -> anyhow::Result<()> {
    let plot = prepare(arguments.plot.as_deref())?;
    let sessions = arguments.files.iter().map(|path| Results::read(path));
    let sessions = sessions.collect::<Result<Vec<_>, _>>()?;
    output::line(&sessions_markdown(&sessions));
    Ok(plot.map_or(Ok(()), |plot| plot.write(&draw_sessions(&sessions)))?)
}
