//! `firn pool`: the commands of the PMEM manager.
//!
//! `--pool PATH` or `FIRN_POOL` names a pool: the path of its medium, or the socket of its manager.

mod create;
mod inspect;
mod map;
mod medium;
mod serve;
mod source;
mod svg;

use std::process::ExitCode;

use clap::Subcommand;

/// Commands of `firn pool`.
#[derive(Debug, Subcommand)]
pub(crate) enum PoolCommand {
    /// Create an empty pool on a device or a file
    Create(create::CreateArgs),
    /// Manage a pool: grant its extents to other commands until a signal arrives
    Serve(serve::ServeArgs),
    /// List the extents of a pool
    Ls(inspect::LsArgs),
    /// Show the properties and a map of a pool
    Show(inspect::ShowArgs),
    /// Check a pool's metadata and snapshots, or repair it
    Verify(inspect::VerifyArgs),
    /// Free unreferenced extents and idle replicas
    Gc(inspect::GcArgs),
    /// Remove a snapshot
    Rm(inspect::RmArgs),
}

pub(crate) fn run(command: &PoolCommand) -> anyhow::Result<ExitCode> {
    match command {
        PoolCommand::Create(arguments) => create::run(arguments),
        PoolCommand::Serve(arguments) => serve::run(arguments),
        PoolCommand::Ls(arguments) => inspect::ls(arguments),
        PoolCommand::Show(arguments) => inspect::show(arguments),
        PoolCommand::Verify(arguments) => inspect::verify(arguments),
        PoolCommand::Gc(arguments) => inspect::gc(arguments),
        PoolCommand::Rm(arguments) => inspect::rm(arguments),
    }
}

#[cfg(test)]
mod tests;
