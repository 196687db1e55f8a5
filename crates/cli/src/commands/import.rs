//! `firn import`: a snapshot of the files that `firn-firecracker` created.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use firn_base::{PAGE_SIZE, format_bytes};
use serde::Serialize;

use firn_snapshot::{FreezeReport, OpenTwice, Snapshot, import};

use crate::output;
use crate::pool_at;
use crate::signature_args::{SignerArgs, TenantArgs};
use crate::snapshot_args::destination;

/// Arguments of `firn import`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn import --state vm.state --memory vm.memory --out snapshots/vm
  firn import --state vm.state --memory vm.memory --pool pool.sock

Every page of the memory file is compared with its digest in the state file. In a pool the snapshot's name is its id, by
which firn-firecracker finds it.")]
pub(crate) struct ImportArgs {
    /// The state file, `snapshot_path` of its creation
    #[arg(long, value_name = "FILE")]
    state: PathBuf,
    /// The memory file, `mem_file_path` of its creation
    #[arg(long, value_name = "FILE")]
    memory: PathBuf,
    /// Directory for the snapshot
    #[arg(long, value_name = "PATH", required_unless_present = "pool", conflicts_with = "pool")]
    out: Option<PathBuf>,
    /// Import into this pool instead: its medium, whose manager is started if none runs, or its
    /// manager's socket
    #[arg(long, value_name = "PATH")]
    pool: Option<PathBuf>,
    #[command(flatten)]
    signing: SignerArgs,
    #[command(flatten)]
    tenant: TenantArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Answer {
    snapshot: PathBuf,
    freeze: FreezeReport,
}

pub(crate) fn run(arguments: &ImportArgs) -> anyhow::Result<ExitCode> {
    let ImportArgs { state, memory, .. } = arguments;
    let failed = |path: &Path| format!("cannot open {}", path.display());
    let image = OpenTwice::open(memory).with_context(|| failed(memory))?;
    let container = File::open(state).with_context(|| failed(state))?;
    let opened = Snapshot::of_two_files(container, state, Some((image, memory)))?;
    let pool = arguments.pool.as_deref().map(pool_at::open).transpose()?;
    let id = PathBuf::from(opened.manifest().description.id.to_string());
    let snapshot = arguments.out.clone().unwrap_or(id);
    let destination = destination(pool.as_ref(), &snapshot)?;
    let signer = arguments.signing.signer(&arguments.tenant.tenant)?;
    let freeze = import(&opened, destination, signer.as_ref())?;
    let answer = Answer { snapshot, freeze };
    if arguments.json {
        output::json(&answer);
    } else {
        output::line(&format!(
            "{}: {} of guest memory stored, {} zero",
            answer.snapshot.display(),
            format_bytes(answer.freeze.stored_pages * PAGE_SIZE),
            format_bytes(answer.freeze.zero_pages * PAGE_SIZE),
        ));
    }
    Ok(ExitCode::SUCCESS)
}
