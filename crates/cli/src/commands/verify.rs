//! `firn verify`: whether every byte of a snapshot is what was frozen.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use firn_base::{error_chain, format_bytes, format_milliseconds, nanoseconds};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use firn_snapshot::{VerifyReport, protect, sign, verify_pooled, verify_signed};

use crate::output;
use crate::pool_at;
use crate::signature_args::{SignerArgs, VerifierArgs};
use crate::snapshot_args::name;

/// Arguments of `firn verify`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn verify snapshots/hello
  firn verify --json snapshots/hello
  firn verify --protect copies/hello
  firn verify --verify-key alice.pub --tenant alice copies/hello
  firn verify --signing-key alice.pem --tenant alice copies/hello
  firn verify --pool pool.sock --verify-key alice.pub --tenant alice hello")]
pub(crate) struct VerifyArgs {
    /// Directory of the snapshot, or its name where --pool is given
    snapshot: PathBuf,
    /// The pool that the snapshot is in: its medium, whose manager is started where none runs, or
    /// its manager's socket. With --signing-key the pool needs room for the snapshot twice
    #[arg(long, value_name = "PATH", conflicts_with = "protect")]
    pool: Option<PathBuf>,
    /// If all is whole, protect the files with fs-verity where the file system supports it, and
    /// record their digests: for a snapshot that was copied, or frozen by an older firn
    #[arg(long)]
    protect: bool,
    /// The image and the disk are checked against this signature too
    #[command(flatten)]
    signed: VerifierArgs,
    #[command(flatten)]
    signing: SignerArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Answer<'a> {
    snapshot: &'a Path,
    whole: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    report: Option<Checked>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

#[derive(Serialize)]
struct Checked {
    /// Pages of the image, each checked against its digest and the zero map.
    pages: u64,
    /// Pages of them that are zero.
    zero_pages: u64,
    /// Pages of the files that were packed from the image, each checked against its digest.
    packed_pages: u64,
    /// Bytes of the disks, each checked against its digest.
    disk_bytes: u64,
    /// The files that fs-verity protects.
    protected: Vec<String>,
    /// How long it took.
    duration_ns: u64,
}

pub(crate) fn run(arguments: &VerifyArgs) -> anyhow::Result<ExitCode> {
    let result = check(arguments);
    if arguments.json {
        let (report, error) = match &result {
            Ok(report) => (Some(checked(report)), None),
            Err(error) => (None, Some(error_chain(error.as_ref()))),
        };
        let whole = result.is_ok();
        output::json(&Answer { snapshot: &arguments.snapshot, whole, report, error });
        return Ok(if whole { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    let report = result?;
    output::line(&format!(
        "{} is whole: {} pages of guest memory ({} zero), {} of packed files and {} of disks checked in {}; {}",
        arguments.snapshot.display(),
        report.pages,
        report.zero_pages,
        report.packed_pages,
        format_bytes(report.disk_bytes),
        format_milliseconds(nanoseconds(report.duration)),
        protection(&report.protected),
    ));
    Ok(ExitCode::SUCCESS)
}

/// Checks the snapshot, and signs it if it is whole and a key is given.
fn check(arguments: &VerifyArgs) -> anyhow::Result<VerifyReport> {
    let verifier = arguments.signed.verifier()?;
    let signer = arguments.signing.signer(arguments.signed.tenant())?;
    let (path, verifier, signer) = (&arguments.snapshot, verifier.as_ref(), signer.as_ref());
    if let Some(pool) = &arguments.pool {
        let pool = pool_at::open(pool)?;
        return Ok(verify_pooled(pool.socket(), name(path)?, verifier, signer)?);
    }
    let bar = ProgressBar::no_length().with_style(
        ProgressStyle::with_template("verifying {wide_bar} {bytes}/{total_bytes} {eta}")
            .unwrap_or_else(|_| ProgressStyle::default_bar()),
    );
    let mut progress = |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    };
    let report = if arguments.protect {
        protect(path, verifier, &mut progress)?
    } else {
        verify_signed(path, verifier, &mut progress)?
    };
    signer.map_or(Ok(()), |signer| sign(path, signer))?;
    Ok(report)
}

/// Which files fs-verity protects.
pub(super) fn protection(files: &[String]) -> String {
    if files.is_empty() {
        return "no file is protected by fs-verity".to_owned();
    }
    format!("protected by fs-verity: {}", files.join(", "))
}

fn checked(report: &VerifyReport) -> Checked {
    Checked {
        pages: report.pages,
        zero_pages: report.zero_pages,
        packed_pages: report.packed_pages,
        disk_bytes: report.disk_bytes,
        protected: report.protected.clone(),
        duration_ns: nanoseconds(report.duration),
    }
}
