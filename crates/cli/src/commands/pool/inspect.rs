//! `firn pool ls`, `show`, `verify`, `gc` and `rm`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, bail};
use clap::Args;
use firn_base::{format_bytes, format_milliseconds, nanoseconds};
use serde::Serialize;

use firn_pool::{
    Access, ArenaFacts, Imaging, ListedExtent, Listing, LookupError, MappedMedium, MediumFacts,
    NodeBytes, Pool, Problem, RepairReport, Role,
};
use firn_run::Instances;

use super::source::{PoolArgs, Source, open};
use super::{map, svg};
use crate::output;

/// Arguments of `firn pool ls`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn pool ls --pool /dev/dax0.0
  FIRN_POOL=pool.sock firn pool ls --json")]
pub(crate) struct LsArgs {
    #[command(flatten)]
    pool: PoolArgs,
}

pub(crate) fn ls(arguments: &LsArgs) -> anyhow::Result<ExitCode> {
    let listing = arguments.pool.source()?.list()?;
    if arguments.pool.json {
        output::json(&listing);
        return Ok(ExitCode::SUCCESS);
    }
    let head = ["name", "state", "guest memory", "tail", "at", "generation", "pins", "made ready"];
    let rows: Vec<Vec<String>> = listing.extents.iter().map(row).collect();
    output::line(&output::table(&head, &rows));
    output::line(&format!("{} free of {}", free(&listing), format_bytes(listing.pool.size)));
    Ok(ExitCode::SUCCESS)
}

fn row(listed: &ListedExtent) -> Vec<String> {
    let extent = &listed.extent;
    vec![
        map::name(listed),
        map::role(listed.role).to_owned(),
        format_bytes(extent.guest_bytes),
        format_bytes(extent.tail_bytes),
        format!("{:#x}", extent.offset),
        extent.generation.to_string(),
        listed.pins.map(|pins| pins.to_string()).unwrap_or_default(),
        listed.imaging.map(imaging_text).unwrap_or_default(),
    ]
}

fn imaging_text(imaging: Imaging) -> String {
    format!(
        "{} compared, {} copied in {}",
        format_bytes(imaging.compared),
        format_bytes(imaging.copied),
        format_milliseconds(nanoseconds(imaging.duration))
    )
}

/// The free space that the manager has zeroed ahead.
fn zeroed(listing: &Listing) -> String {
    match listing.zeroed_bytes {
        0 => String::new(),
        bytes => format!(", {} of it zeroed ahead", format_bytes(bytes)),
    }
}

fn free(listing: &Listing) -> String {
    format_bytes(listing.free_bytes())
}

/// Arguments of `firn pool show`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn pool show --pool /dev/dax0.0
  firn pool show --pool pool.sock --svg pool.svg
  firn pool show --pool pool.sock hello")]
pub(crate) struct ShowArgs {
    #[command(flatten)]
    pool: PoolArgs,
    /// Show only the snapshot of this name
    name: Option<String>,
    /// Write the map as an SVG file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

pub(crate) fn show(arguments: &ShowArgs) -> anyhow::Result<ExitCode> {
    let mut source = arguments.pool.source()?;
    let mut listing = source.list()?;
    if let Some(path) = &arguments.svg {
        std::fs::write(path, svg::draw(&listing))
            .with_context(|| format!("cannot write the picture {}", path.display()))?;
    }
    if let Some(name) = &arguments.name {
        listing.extents.retain(|listed| listed.name.as_ref() == Some(name));
        if !listing.extents.iter().any(|listed| listed.role == Role::Snapshot) {
            let error = if listing.extents.iter().any(|listed| listed.role == Role::Staging) {
                LookupError::BeingWritten(name.clone())
            } else {
                LookupError::Unknown(name.clone())
            };
            return Err(error.into());
        }
    }
    if arguments.pool.json {
        output::json(&listing);
        return Ok(ExitCode::SUCCESS);
    }
    let copies = source.arena()?.map(|arena| ("copies", copies(&arena)));
    for (what, value) in facts(&listing).into_iter().chain(copies) {
        output::line(&format!("{what:<12}{value}"));
    }
    output::line(&format!("\n{}", map::draw(&listing)));
    Ok(ExitCode::SUCCESS)
}

/// The leaf at which the manager's host maps the medium, and why it is not larger.
fn leaf(medium: &MediumFacts) -> String {
    let Some(index) = medium.index else {
        return "none: no manager has built an index, or the medium uses the page cache".to_owned();
    };
    let why = medium.why_no_larger_leaf().map(|why| format!(" ({why})")).unwrap_or_default();
    format!("{}{why}", format_bytes(index.leaf))
}

/// The DRAM of copies.
fn copies(arena: &ArenaFacts) -> String {
    let [size, ready, lent] = [arena.size, arena.ready, arena.lent].map(format_bytes);
    let node = arena.node.map(|node| format!(", on node {node}")).unwrap_or_default();
    format!("{ready} ready, {lent} in use, at most {size}{node}")
}

/// The NUMA nodes of the medium.
fn nodes(medium: &MediumFacts) -> String {
    let text = |node: &NodeBytes| format!("{} on node {}", format_bytes(node.bytes), node.node);
    let nodes: Vec<String> = medium.nodes.iter().map(text).collect();
    if nodes.is_empty() { "not known".to_owned() } else { nodes.join(", ") }
}

fn facts(listing: &Listing) -> Vec<(&'static str, String)> {
    let (pool, medium) = (&listing.pool, &listing.medium);
    let classes: Vec<String> = pool.classes.iter().map(|class| format_bytes(*class)).collect();
    vec![
        ("pool", pool.uuid.to_string()),
        ("medium", format!("{}, {}", medium.name, map::kind(medium))),
        ("leaf", leaf(medium)),
        ("nodes", nodes(medium)),
        ("size", format!("{}, {} free{}", format_bytes(pool.size), free(listing), zeroed(listing))),
        ("granule", format!("{}; classes {}", format_bytes(pool.granule), classes.join(", "))),
        ("names", format!("up to {} of up to {} bytes", pool.names, pool.longest_name)),
    ]
}

/// Arguments of `firn pool verify`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn pool verify --pool /dev/dax0.0
  firn pool verify --pool /dev/dax0.0 --repair

The exit code is 1 if there are problems.")]
pub(crate) struct VerifyArgs {
    #[command(flatten)]
    pool: PoolArgs,
    /// Restore the superblock from its twin and remove the names of lost snapshots
    #[arg(long)]
    repair: bool,
    /// Check only the pool's metadata, not the guest memory, sections and digests of its snapshots
    #[arg(long)]
    metadata: bool,
}

#[derive(Serialize)]
struct Verified {
    whole: bool,
    snapshots: u64,
    unreferenced: u64,
    problems: Vec<ReportedProblem>,
    #[serde(skip_serializing_if = "Option::is_none")]
    repair: Option<RepairReport>,
}

/// A problem as data and as text.
#[derive(Serialize)]
struct ReportedProblem {
    #[serde(flatten)]
    problem: Problem,
    text: String,
}

pub(crate) fn verify(arguments: &VerifyArgs) -> anyhow::Result<ExitCode> {
    let mut source = arguments.pool.source()?;
    let mut repaired = None;
    if arguments.repair {
        let Source::Medium(path) = &source else {
            bail!(
                "cannot repair a pool that a manager serves: stop the manager, then pass the pool's medium"
            );
        };
        let medium = Arc::new(MappedMedium::open(path, Access::Write)?);
        repaired = Some(Pool::repair(medium)?.1);
    }
    let report = source.verify(!arguments.metadata)?;
    let whole = report.problems.is_empty();
    let code = if whole { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    if arguments.pool.json {
        let reported = |problem: &Problem| ReportedProblem {
            problem: problem.clone(),
            text: problem.to_string(),
        };
        output::json(&Verified {
            whole,
            snapshots: report.snapshots,
            unreferenced: report.unreferenced,
            problems: report.problems.iter().map(reported).collect(),
            repair: repaired,
        });
        return Ok(code);
    }
    if let Some(repaired) = repaired {
        if repaired.superblock {
            output::line("the superblock was restored from its twin");
        }
        for problem in &repaired.problems {
            output::line(&output::plain(&format!("repaired: {problem}")));
        }
    }
    for problem in &report.problems {
        output::line(&output::plain(&problem.to_string()));
    }
    if whole {
        output::line(&format!(
            "{} is valid: {} snapshots, {}",
            arguments.pool.path().display(),
            report.snapshots,
            if arguments.metadata { "content not checked" } else { "every page checked" },
        ));
    }
    Ok(code)
}

/// Arguments of `firn pool gc`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn pool gc --pool /dev/dax0.0
  firn pool gc --pool pool.sock")]
pub(crate) struct GcArgs {
    #[command(flatten)]
    pool: PoolArgs,
}

#[derive(Serialize)]
struct Collected {
    /// Extents without references, and idle replicas.
    freed_extents: u64,
    /// Slots of removed names.
    cleared_slots: u32,
    free_bytes: u64,
}

pub(crate) fn gc(arguments: &GcArgs) -> anyhow::Result<ExitCode> {
    let collected = match arguments.pool.source()? {
        Source::Manager(mut client) => {
            let (freed_extents, cleared_slots) = client.collect()?;
            let free_bytes = client.list()?.free_bytes();
            Collected { freed_extents, cleared_slots, free_bytes }
        }
        Source::Medium(path) => {
            // Opening a pool without a manager recovers it, which frees everything that is not
            // referenced.
            let pool = open(&path)?;
            Collected {
                freed_extents: pool.recovery().freed_extents,
                cleared_slots: pool.recovery().cleared_slots,
                free_bytes: pool.list().free_bytes(),
            }
        }
    };
    if arguments.pool.json {
        output::json(&collected);
    } else {
        output::line(&format!(
            "freed {} and cleared {} slots: {} are free",
            map::extents(collected.freed_extents),
            collected.cleared_slots,
            format_bytes(collected.free_bytes)
        ));
    }
    Ok(ExitCode::SUCCESS)
}

/// Arguments of `firn pool rm`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn pool rm --pool pool.sock hello")]
pub(crate) struct RmArgs {
    #[command(flatten)]
    pool: PoolArgs,
    /// The snapshot's name
    name: String,
}

#[derive(Serialize)]
struct Removed {
    /// Bytes that are free immediately. The extent of a pinned snapshot is freed later.
    freed_bytes: u64,
}

pub(crate) fn rm(arguments: &RmArgs) -> anyhow::Result<ExitCode> {
    let managers = Instances::of_user().managers();
    let freed_bytes = managers.remove_snapshot(arguments.pool.path(), &arguments.name)?;
    if arguments.pool.json {
        output::json(&Removed { freed_bytes });
    } else if freed_bytes == 0 {
        output::line("removed; its extent is freed when the last microVM that uses it exits");
    } else {
        output::line(&format!("removed; {} freed", format_bytes(freed_bytes)));
    }
    Ok(ExitCode::SUCCESS)
}
