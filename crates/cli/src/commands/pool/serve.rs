//! `firn pool serve`: the manager's process.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use firn_base::{format_bytes, format_milliseconds, nanoseconds, parse_size};
use serde::Serialize;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use firn_memory::OwnFiles;
use firn_pool::{Access, Listing, MappedMedium, MediumError, Pool, Recovery, Server};
use firn_run::{Instances, MANAGER_HAS_CLIENTS, MANAGER_IN_USE};

use super::create::TableArgs;
use super::medium::{self, MediumName};
use crate::detach::detach;
use crate::output;

/// How long a manager started on demand runs without clients. Its first client needs time to
/// connect, and often another client follows the last.
const PATIENCE: Duration = Duration::from_secs(1);

/// Arguments of `firn pool serve`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn pool serve --medium /dev/dax0.0 --socket /run/firn-pool.sock
  firn pool serve --medium memfd:4G,huge,node=1 --socket pool.sock --detach
  firn pool serve --medium /dev/dax0.0 --socket /run/firn-pool.sock --arena 2G --copies-node 0
  FIRN_POOL=pool.sock firn pool ls

If --pool names a medium without a manager, commands start a manager, which exits after its last client.
A memfd is created with an empty pool and is lost when this process exits. Its memory is allocated
immediately; `huge` requires vm.nr_hugepages, and `huge=1G` pages in
/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages.")]
pub(crate) struct ServeArgs {
    /// A devdax device or a file with a pool, or `memfd:SIZE[,huge[=1G]][,node=N]`
    #[arg(long, value_name = "MEDIUM", value_parser = medium::parse)]
    medium: MediumName,
    /// Unix socket for clients, accessible to this user only
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    #[command(flatten)]
    table: TableArgs,
    /// Maximum DRAM for copies made in advance for the planner firn, ready and in use; 0: no
    /// copies. Default: an eighth of this host's memory
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    arena: Option<u64>,
    /// NUMA node of copies, as long as it has room. Default: near the processor that makes them
    #[arg(long, value_name = "N")]
    copies_node: Option<u32>,
    /// Run in the background once the manager serves
    #[arg(long)]
    detach: bool,
    /// Exit after the last client
    #[arg(long, hide = true)]
    on_demand: bool,
    /// Print one JSON object once the manager serves
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

pub(crate) fn run(arguments: &ServeArgs) -> anyhow::Result<ExitCode> {
    if arguments.detach {
        return detach();
    }
    // For the report on a medium whose bytes are lost.
    OwnFiles::of_process();
    let mut signals =
        Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot install signal handlers")?;
    let (pool, published) = match &arguments.medium {
        MediumName::Path(path) => match MappedMedium::open(path, Access::Write) {
            Err(error @ MediumError::InUse(_)) if arguments.on_demand => {
                output::print_error(&error);
                return Ok(ExitCode::from(MANAGER_IN_USE));
            }
            Err(error @ MediumError::HasClients(_)) if arguments.on_demand => {
                output::print_error(&error);
                return Ok(ExitCode::from(MANAGER_HAS_CLIENTS));
            }
            medium => (Pool::open(Arc::new(medium?))?, published(path, &arguments.socket)?),
        },
        MediumName::Memfd(options) => {
            let medium = MappedMedium::memfd(*options)?;
            (Pool::create(Arc::new(medium), &arguments.table.options(false))?, None)
        }
    };
    let mut server = Server::start(&arguments.socket, pool)?;
    if let Some(published) = published {
        server.also_at(&published)?;
    }
    if let Some(bytes) = arguments.arena {
        server.set_arena(bytes);
    }
    if let Some(node) = arguments.copies_node {
        server.set_copies_node(node)?;
    }
    if !arguments.on_demand {
        server.prepare_copies();
    }
    report_serving(arguments, server.pool());
    if arguments.on_demand {
        let (clients, waiting) = (server.watch(), signals.handle());
        std::thread::Builder::new()
            .name("clients".into())
            .spawn(move || {
                clients.wait_until_unused(PATIENCE);
                waiting.close();
            })
            .context("cannot install signal handlers")?;
    }
    signals.forever().next();
    // The sockets are removed before the process releases the medium's lock. Afterwards another
    // manager may create them.
    drop(server);
    Ok(ExitCode::SUCCESS)
}

/// The further socket of the manager, for clients that know only the medium. This process holds the
/// medium's lock, so an existing one is stale.
fn published(medium: &Path, socket: &Path) -> anyhow::Result<Option<PathBuf>> {
    let published = Instances::of_user().managers().socket_of(medium)?;
    let socket = std::path::absolute(socket).context("cannot find the socket's folder")?;
    Ok(published.filter(|published| *published != socket))
}

fn report_serving(arguments: &ServeArgs, pool: &Pool) {
    let (listing, recovery, socket) = (pool.list(), pool.recovery(), arguments.socket.clone());
    if arguments.json {
        output::json(&Serving { pid: std::process::id(), socket, recovery, listing });
        return;
    }
    let index = match &listing.medium.index {
        Some(index) => format!(
            "index of {} leaves of {} in {}",
            index.entries,
            format_bytes(index.leaf),
            format_milliseconds(nanoseconds(index.duration))
        ),
        None => "no index: the medium uses the page cache".to_owned(),
    };
    output::line(&format!(
        "serving {} ({} snapshots, {} free; {index}) on {}",
        listing.medium.name,
        pool.names().len(),
        format_bytes(listing.free_bytes()),
        socket.display()
    ));
    if recovery.freed_extents > 0 {
        output::note(&format!(
            "firn: recovery freed {} without references, {}",
            super::map::extents(recovery.freed_extents),
            format_bytes(recovery.freed_bytes)
        ));
    }
}
