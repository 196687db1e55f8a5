//! `firn freeze`: a running microVM into a snapshot.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Args;
use serde::Serialize;

use firn_base::{PAGE_SIZE, format_bytes, format_milliseconds};
use firn_run::{FreezeInstanceReport, Instances, freeze};

use super::verify::protection;
use crate::output;
use crate::pool_at;
use crate::signature_args::{SignerArgs, TenantArgs};
use crate::snapshot_args::destination;

/// Arguments of `firn freeze`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn freeze builder snapshots/hello
  firn freeze --keep --json builder snapshots/hello
  firn freeze --pool pool.sock builder hello
  firn freeze --signing-key alice.pem --tenant alice builder snapshots/hello

A snapshot that is there already is replaced in one step, or, when the freeze fails, kept whole.")]
pub(crate) struct FreezeArgs {
    /// Name of the microVM
    name: String,
    /// Directory of the snapshot, or its name where --pool is given
    snapshot: PathBuf,
    /// Freeze straight into this pool: its medium, whose manager is started where none runs, or its
    /// manager's socket
    #[arg(long, value_name = "PATH")]
    pool: Option<PathBuf>,
    #[command(flatten)]
    signing: SignerArgs,
    #[command(flatten)]
    tenant: TenantArgs,
    /// Let the microVM run on afterwards, instead of ending it
    #[arg(long)]
    keep: bool,
    /// Write zero pages too, for media without holes
    #[arg(long)]
    dense: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Answer {
    /// Directory of the snapshot, or its name in the pool.
    snapshot: PathBuf,
    #[serde(flatten)]
    report: FreezeInstanceReport,
}

pub(crate) fn run(arguments: &FreezeArgs) -> anyhow::Result<ExitCode> {
    // For the reader of the output, whose working directory may be another.
    let absolute = |path: &Path| {
        std::path::absolute(path)
            .with_context(|| format!("cannot find the absolute path of {}", path.display()))
    };
    let (snapshot, pool) = match &arguments.pool {
        Some(pool) => (arguments.snapshot.clone(), Some(pool_at::open(&absolute(pool)?)?)),
        None => (absolute(&arguments.snapshot)?, None),
    };
    if pool.is_none()
        && let Some(parent) = snapshot.parent().filter(|parent| !parent.is_dir())
    {
        bail!(
            "cannot create a snapshot in {}: it is not a directory; create it first",
            parent.display()
        );
    }
    let signer = arguments.signing.signer(&arguments.tenant.tenant)?;
    let destination = destination(pool.as_ref(), &snapshot)?;
    let instance = Instances::of_user().find(&arguments.name)?;
    let report = freeze(&instance, destination, arguments.dense, arguments.keep, signer.as_ref())?;
    let answer = Answer { snapshot, report };
    if arguments.json {
        output::json(&answer);
    } else {
        let FreezeInstanceReport { total_ns, report, .. } = &answer.report;
        output::line(&format!(
            "{}: {} of guest memory stored, {} zero, {} on disk; {}{}",
            answer.snapshot.display(),
            format_bytes(report.stored_pages * PAGE_SIZE),
            format_bytes(report.zero_pages * PAGE_SIZE),
            format_bytes(report.disk_bytes),
            format_milliseconds(*total_ns),
            if report.protected.is_empty() {
                String::new()
            } else {
                format!("; {}", protection(&report.protected))
            },
        ));
    }
    Ok(ExitCode::SUCCESS)
}
