//! `firn profile pack`: the file that a planner maps, packed from the image by the profile.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;

use firn_memory::planners::{pack_signed, parse};
use firn_snapshot::{Snapshot, sign};

use crate::output;
use crate::signature_args::{SignerArgs, VerifierArgs};

/// Arguments of `firn profile pack`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn profile pack --planner faasnap snapshots/hello
  firn profile pack --planner faasnap:merge=0 --json snapshots/hello

A snapshot has one file of each kind. Packing with other options replaces it; a file that was packed with the same options stays.")]
pub(crate) struct PackArgs {
    /// Directory of the snapshot
    snapshot: PathBuf,
    /// The planner, as NAME[:KEY=VALUE,...]
    #[arg(long, value_name = "PLANNER")]
    planner: String,
    #[command(flatten)]
    signed: VerifierArgs,
    #[command(flatten)]
    signing: SignerArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &PackArgs) -> anyhow::Result<ExitCode> {
    let planner = parse(&arguments.planner)?;
    let verifier = arguments.signed.verifier()?;
    let signer = arguments.signing.signer(arguments.signed.tenant())?;
    if signer.is_some() && verifier.is_some() {
        // Only what was signed is signed again.
        Snapshot::open_signed(&arguments.snapshot, verifier.as_ref())?.check_signed_files()?;
    }
    let report = pack_signed(&arguments.snapshot, &*planner, verifier.as_ref())?;
    // The manifest names a packed file that fs-verity protects.
    signer.map_or(Ok(()), |signer| sign(&arguments.snapshot, &signer))?;
    let report = report.with_context(|| {
        format!("{} maps no packed file, so there is nothing to pack", planner.name())
    })?;
    if arguments.json {
        output::json(&report);
    } else {
        output::line(&format!(
            "{}: {} pages in {} runs ({} before merging){}",
            report.file.name(),
            report.pages,
            report.runs,
            report.runs_before_merging,
            if report.was_there { ", was there already" } else { "" },
        ));
    }
    Ok(ExitCode::SUCCESS)
}
