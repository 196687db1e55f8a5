//! `firn freeze`: a running microVM into a snapshot.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use firn_base::{PAGE_SIZE, format_bytes, format_milliseconds, nanoseconds};
use serde::Serialize;
use thiserror::Error;

use firn_run::{
    AgentClient, ConnectError, FindError, IdentifyError, Identity, IdentityError, Instance,
    Instances, PrepareFreezeError, StatusError,
};
use firn_snapshot::FunctionInfo;
use firn_vmm::{ControlClient, ControlError, FreezeReport, Request, Response};

use crate::output;
use crate::pool_at::{PoolAt, PoolAtError};
use crate::snapshot_args::{OpenSnapshotError, destination};

/// How long a guest may take to tidy up, or to take its identity again.
const GUEST_LIMIT: Duration = Duration::from_secs(60);

/// Arguments of `firn freeze`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn freeze builder snapshots/hello
  firn freeze --keep --json builder snapshots/hello
  firn freeze --pool pool.sock builder hello

A snapshot that is there already is replaced in one step, or, when the freeze fails, kept whole.")]
pub(crate) struct FreezeArgs {
    /// Name of the microVM
    name: String,
    /// Directory of the snapshot, or its name where --pool is given
    snapshot: PathBuf,
    /// Freeze straight into this pool: its medium, whose manager is started where none runs, or its manager's socket
    #[arg(long, value_name = "PATH")]
    pool: Option<PathBuf>,
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

/// Why a microVM was not frozen.
#[derive(Debug, Error)]
pub(crate) enum FreezeCommandError {
    #[error(transparent)]
    Find(#[from] FindError),
    #[error(transparent)]
    Pool(#[from] PoolAtError),
    #[error(transparent)]
    Name(#[from] OpenSnapshotError),
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Status(#[from] StatusError),
    #[error(transparent)]
    Prepare(#[from] PrepareFreezeError),
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error("finding the absolute path of {path}")]
    Path { path: PathBuf, source: std::io::Error },
    #[error("{0} is no directory that a snapshot can be made in: make it first")]
    NoParent(PathBuf),
    #[error("the monitor gave another answer than the one to a freeze")]
    Answer,
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error(transparent)]
    Identify(#[from] IdentifyError),
}

#[derive(Serialize)]
struct Answer {
    /// Directory of the snapshot, or its name in the pool.
    snapshot: PathBuf,
    /// Asking the guest to get ready, ns.
    prepare_ns: u64,
    /// All of it, until the snapshot is in its place, ns.
    total_ns: u64,
    #[serde(flatten)]
    report: FreezeReport,
}

pub(crate) fn run(arguments: &FreezeArgs) -> Result<ExitCode, FreezeCommandError> {
    let begin = Instant::now();
    // The monitor has a working directory of its own.
    let absolute = |path: &Path| {
        std::path::absolute(path)
            .map_err(|source| FreezeCommandError::Path { path: path.to_owned(), source })
    };
    let (snapshot, pool) = match &arguments.pool {
        Some(pool) => (arguments.snapshot.clone(), Some(PoolAt::open(&absolute(pool)?)?)),
        None => (absolute(&arguments.snapshot)?, None),
    };
    if pool.is_none()
        && let Some(parent) = snapshot.parent().filter(|parent| !parent.is_dir())
    {
        return Err(FreezeCommandError::NoParent(parent.to_owned()));
    }
    let destination = destination(pool.as_ref(), &snapshot)?;
    let instance = Instances::of_user().find(&arguments.name)?;
    let mut control = ControlClient::connect(&instance.control_socket())?;
    let mut agent = AgentClient::connect(&instance.vsock_socket(), GUEST_LIMIT)?;
    let status = agent.status()?;
    let function = status.function.zip(status.handler);
    let request = Request::Freeze {
        destination,
        dense: arguments.dense,
        function: function.map(|(name, handler)| FunctionInfo { name, handler }),
    };
    let frozen = prepare_and_freeze(agent, &mut control, &request);
    let total = begin.elapsed();
    if arguments.keep || frozen.is_err() {
        // A freeze that failed costs the microVM nothing: it goes on, if it still can. What went
        // wrong first is what is told.
        let went_on = let_go_on(&mut control, &instance);
        if frozen.is_ok() {
            went_on?;
        }
    } else {
        control.stop()?;
    }
    let (prepared, report) = frozen?;
    let answer = Answer {
        snapshot,
        prepare_ns: nanoseconds(prepared - begin),
        total_ns: nanoseconds(total),
        report,
    };
    if arguments.json {
        output::json(&answer);
    } else {
        output::line(&format!(
            "{}: {} of guest memory stored, {} zero, {} on disk; {}",
            answer.snapshot.display(),
            format_bytes(answer.report.stored_pages * PAGE_SIZE),
            format_bytes(answer.report.zero_pages * PAGE_SIZE),
            format_bytes(answer.report.disk_bytes),
            format_milliseconds(answer.total_ns),
        ));
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns when the guest was ready, and what the freeze wrote.
fn prepare_and_freeze(
    agent: AgentClient,
    control: &mut ControlClient,
    request: &Request,
) -> Result<(Instant, FreezeReport), FreezeCommandError> {
    agent.prepare_freeze(GUEST_LIMIT)?;
    let prepared = Instant::now();
    match control.request(request)? {
        Response::Frozen(report) => Ok((prepared, *report)),
        _ => Err(FreezeCommandError::Answer),
    }
}

/// Lets a paused microVM run on, as one that differs from the clones of its snapshot.
fn let_go_on(control: &mut ControlClient, instance: &Instance) -> Result<(), FreezeCommandError> {
    let identity = Identity::fresh()?;
    control.request(&Request::Resume { generation: identity.generation })?;
    let mut agent = AgentClient::connect(&instance.vsock_socket(), GUEST_LIMIT)?;
    Ok(agent.identify(&identity, GUEST_LIMIT)?)
}
