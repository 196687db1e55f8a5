//! `firn pool create`: creates an empty pool.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::bail;
use clap::Args;
use firn_base::{format_bytes, parse_size};

use firn_pool::{Access, CreateOptions, MappedMedium, Pool};

use super::medium::{self, MediumName};
use crate::output;

/// Capacity of a new pool.
#[derive(Debug, Args)]
pub(crate) struct TableArgs {
    /// Maximum number of names
    #[arg(long, value_name = "N", default_value_t = 1024)]
    names: u32,
    /// Maximum length of a name in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 112)]
    longest_name: u32,
    /// Guest-size class: guest memory of at least this size is aligned to it (1G for leaves of 1
    /// GiB). May be given more than once, in ascending order
    #[arg(long = "class", value_name = "SIZE", value_parser = parse_size)]
    classes: Vec<u64>,
    /// Write zeros over every extent before it is free, so that free space has no byte of removed
    /// snapshots. An earlier firn does not open such a pool
    #[arg(long)]
    scrub: bool,
}

impl TableArgs {
    pub(crate) fn options(&self, overwrite: bool) -> CreateOptions {
        CreateOptions {
            names: self.names,
            longest_name: self.longest_name,
            classes: self.classes.clone(),
            overwrite,
            scrub: self.scrub,
        }
    }
}

/// Arguments of `firn pool create`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn pool create --medium /dev/dax0.0
  firn pool create --medium /mnt/dax/pool --size 8G --class 1G
  firn pool create --medium /dev/dax0.0 --scrub")]
pub(crate) struct CreateArgs {
    /// A devdax device or a file
    #[arg(long, value_name = "MEDIUM", value_parser = medium::parse)]
    medium: MediumName,
    /// Create the file with this size
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    size: Option<u64>,
    #[command(flatten)]
    table: TableArgs,
    /// Overwrite existing content of the medium
    #[arg(long)]
    overwrite: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &CreateArgs) -> anyhow::Result<ExitCode> {
    let MediumName::Path(path) = &arguments.medium else {
        bail!(
            "a memfd exists only while its process runs: create and serve it with `firn pool serve --medium memfd:SIZE`"
        );
    };
    let (medium, is_new) = match arguments.size {
        Some(size) => (MappedMedium::create_file(path, size)?, true),
        None => (MappedMedium::open(path, Access::Write)?, false),
    };
    let created = Pool::create(Arc::new(medium), &arguments.table.options(arguments.overwrite));
    if created.is_err() && is_new {
        // This command created the file.
        let _ = std::fs::remove_file(path);
    }
    let pool = created?;
    let listing = pool.list();
    if arguments.json {
        output::json(&listing);
    } else {
        let free = format_bytes(listing.free_bytes());
        let (uuid, name) = (listing.pool.uuid, &listing.medium.name);
        output::line(&format!("created the pool {uuid} on {name}: {free} for snapshots"));
    }
    Ok(ExitCode::SUCCESS)
}
