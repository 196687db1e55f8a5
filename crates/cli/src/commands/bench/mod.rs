//! `firn bench`: measurements with the player.

mod capacity;
mod compare;
mod cost;
mod floor;
mod freeze;
mod paper;
mod players;
mod progress;
mod table;
mod thaw;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Subcommand};
use serde::Serialize;

use firn_base::monitor_program;
use firn_bench::{Harness, Interrupt, ResultFile, ResultFileError};

use progress::Bar;

/// Commands of `firn bench`.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Compare planners on thaws of a player
    Thaw(thaw::BenchThawArgs),
    /// Count the microVMs that fit into a memory budget
    Capacity(capacity::CapacityArgs),
    /// Compute the cost of the memory that `firn bench capacity` measured
    Cost(cost::CostArgs),
    /// Find what became slower or faster between two results of one host
    Compare(compare::CompareArgs),
    /// Make tables for a document from the files of `firn bench thaw --json`
    Table(table::TableArgs),
    /// Run the papers' experiments: data, table and picture of each
    Paper(paper::PaperArgs),
    /// Compare the player with a bare loop, to measure the player's overhead
    Floor(floor::FloorArgs),
    /// Measure freezes into a directory and a pool, next to fio on the same medium
    Freeze(freeze::BenchFreezeArgs),
}

pub(crate) fn run(command: &BenchCommand) -> anyhow::Result<ExitCode> {
    match command {
        BenchCommand::Thaw(arguments) => thaw::run(arguments)?,
        BenchCommand::Capacity(arguments) => capacity::run(arguments)?,
        BenchCommand::Cost(arguments) => cost::run(arguments)?,
        BenchCommand::Compare(arguments) => return compare::run(arguments),
        BenchCommand::Paper(arguments) => paper::run(arguments)?,
        BenchCommand::Table(arguments) => table::run(arguments)?,
        BenchCommand::Floor(arguments) => floor::run(arguments)?,
        BenchCommand::Freeze(arguments) => freeze::run(arguments)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs measurements with their progress on standard error. A signal stops them with an error.
pub(crate) fn measure<T>(run: impl FnOnce(&Harness<'_>) -> anyhow::Result<T>) -> anyhow::Result<T> {
    let program = monitor_program().context("cannot find the path of this program")?;
    let interrupt = Interrupt::catch().context("cannot catch signals")?;
    let bar = Bar::new();
    run(&Harness { program, interrupt: &interrupt, progress: &bar })
}

/// Files for the results of a measurement.
#[derive(Debug, Args)]
struct FilesArgs {
    /// Write the results to a file as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw the results into a file as SVG
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

/// The prepared files.
struct Files {
    json: Option<ResultFile>,
    plot: Option<ResultFile>,
}

impl FilesArgs {
    fn prepare(&self) -> Result<Files, ResultFileError> {
        Ok(Files { json: prepare(self.json.as_deref())?, plot: prepare(self.plot.as_deref())? })
    }
}

impl Files {
    fn write(self, results: &impl Serialize, picture: &str) -> Result<(), ResultFileError> {
        self.json.map_or(Ok(()), |json| json.write_json(results))?;
        self.plot.map_or(Ok(()), |plot| plot.write(picture))
    }
}

fn prepare(path: Option<&Path>) -> Result<Option<ResultFile>, ResultFileError> {
    path.map(ResultFile::prepare).transpose()
}
