//! `firn pool`: the PMEM manager's commands.
//!
//! A pool is named by its medium's path, or by the socket of the manager that serves it: `--pool PATH`, or `FIRN_POOL`.

mod create;
mod error;
mod inspect;
mod map;
mod medium;
mod serve;
mod source;
mod svg;

use std::process::ExitCode;

use clap::Subcommand;

pub(crate) use error::PoolCommandError;

/// Commands of `firn pool`.
#[derive(Debug, Subcommand)]
pub(crate) enum PoolCommand {
    /// Make an empty pool on a device or a file
    Create(create::CreateArgs),
    /// Own a pool: hand out its extents to other commands, until a signal comes
    Serve(serve::ServeArgs),
    /// List the extents of a pool
    Ls(inspect::LsArgs),
    /// Show what a pool is, and a map of it
    Show(inspect::ShowArgs),
    /// Check a pool's metadata and its snapshots, or repair it
    Verify(inspect::VerifyArgs),
    /// Free what nothing refers to
    Gc(inspect::GcArgs),
    /// Remove a snapshot
    Rm(inspect::RmArgs),
}

pub(crate) fn run(command: &PoolCommand) -> Result<ExitCode, PoolCommandError> {
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
