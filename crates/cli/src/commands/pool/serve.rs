//! `firn pool serve`: the manager's process.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::Args;
use serde::Serialize;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use firn_pool::{Access, Listing, MappedMedium, Pool, Recovery, Server};

use super::PoolCommandError;
use super::create::TableArgs;
use super::medium::{self, MediumName};
use crate::detach::detach;
use crate::output;

/// Arguments of `firn pool serve`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn pool serve --medium /dev/dax0.0 --socket /run/firn-pool.sock
  firn pool serve --medium memfd:4G,huge,node=1 --socket pool.sock --detach
  FIRN_POOL=pool.sock firn pool ls

A memfd is made, with a pool in it, and ends with this process. Its memory is taken at once; `huge` needs vm.nr_hugepages.")]
pub(crate) struct ServeArgs {
    /// A devdax device or a file with a pool, or memfd:SIZE[,huge][,node=N]
    #[arg(long, value_name = "MEDIUM", value_parser = medium::parse)]
    medium: MediumName,
    /// Where clients connect: a unix socket, for this user alone
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    #[command(flatten)]
    table: TableArgs,
    /// Go to the background once it serves
    #[arg(long)]
    detach: bool,
    /// Print one JSON object once it serves
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Serving {
    pid: u32,
    socket: PathBuf,
    recovery: Recovery,
    #[serde(flatten)]
    listing: Listing,
}

pub(crate) fn run(arguments: &ServeArgs) -> Result<ExitCode, PoolCommandError> {
    if arguments.detach {
        return Ok(detach()?);
    }
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).map_err(PoolCommandError::Signals)?;
    let pool = match &arguments.medium {
        MediumName::Path(path) => Pool::open(Arc::new(MappedMedium::open(path, Access::Write)?))?,
        MediumName::Memfd(options) => {
            let medium = MappedMedium::memfd(*options)?;
            Pool::create(Arc::new(medium), &arguments.table.options(false))?
        }
    };
    let server = Server::start(&arguments.socket, pool)?;
    say(arguments, server.pool());
    signals.forever().next();
    drop(server);
    Ok(ExitCode::SUCCESS)
}

fn say(arguments: &ServeArgs, pool: &Pool) {
    let (listing, recovery, socket) = (pool.list(), pool.recovery(), arguments.socket.clone());
    if arguments.json {
        output::json(&Serving { pid: std::process::id(), socket, recovery, listing });
        return;
    }
    let index = match &listing.medium.index {
        Some(index) => format!(
            "index of {} leaves of {} in {}",
            index.entries,
            output::bytes(index.leaf),
            output::milliseconds(crate::clock::nanoseconds(index.duration))
        ),
        None => "no index: it is in the page cache".to_owned(),
    };
    output::line(&format!(
        "serving {} ({} snapshots, {} free; {index}) on {}",
        listing.medium.name,
        pool.names().len(),
        output::bytes(listing.free_bytes()),
        socket.display()
    ));
    if recovery.freed_extents > 0 {
        output::note(&format!(
            "firn: recovery freed {} that nothing referred to, {}",
            super::map::extents(recovery.freed_extents),
            output::bytes(recovery.freed_bytes)
        ));
    }
}
