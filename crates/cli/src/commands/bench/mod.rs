//! `firn bench`: measurements with the player.

pub(crate) mod capacity;
pub(crate) mod cost;
pub(crate) mod floor;
mod in_pool;
mod medium;
pub(crate) mod paper;
mod players;
mod save;
pub(crate) mod table;
mod tables;
pub(crate) mod thaw;

use std::error::Error;
use std::process::ExitCode;

use clap::Subcommand;
use indicatif::{ProgressBar, ProgressStyle};

/// Commands of `firn bench`.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Compare planners: thaws of a player, side by side
    Thaw(thaw::BenchThawArgs),
    /// Count the microVMs that a memory budget carries
    Capacity(capacity::CapacityArgs),
    /// Put a price on what `firn bench capacity` counted
    Cost(cost::CostArgs),
    /// Make tables for a document out of what `firn bench thaw --json` wrote
    Table(table::TableArgs),
    /// Run the papers' experiments: data, table and picture of each
    Paper(paper::PaperArgs),
    /// Compare the player with a bare loop: how much of a measurement is the instrument
    Floor(floor::FloorArgs),
}

pub(crate) fn run(command: &BenchCommand) -> Result<ExitCode, Box<dyn Error>> {
    match command {
        BenchCommand::Thaw(arguments) => thaw::run(arguments).map_err(Into::into),
        BenchCommand::Capacity(arguments) => capacity::run(arguments).map_err(Into::into),
        BenchCommand::Cost(arguments) => cost::run(arguments).map_err(Into::into),
        BenchCommand::Paper(arguments) => paper::run(arguments).map_err(Into::into),
        BenchCommand::Table(arguments) => table::run(arguments).map_err(Into::into),
        BenchCommand::Floor(arguments) => floor::run(arguments).map_err(Into::into),
    }
}

/// A progress bar on standard error; nothing where that is no terminal.
fn progress(steps: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} {eta} {msg}");
    let bar = ProgressBar::new(steps);
    style.map_or(bar.clone(), |style| bar.with_style(style))
}
