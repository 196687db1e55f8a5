//! `firn thaw`: a microVM from a snapshot.

mod beside;
mod linux;
mod player;

use std::error::Error as StdError;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use thiserror::Error;

use firn_base::now_ns;
use firn_bench::player::ReplayError;
use firn_memory::loader::LoadError;
use firn_memory::planners::{ParsePlannerError, PlanSnapshotError, Preloaded, parse};
use firn_memory::{ExecuteError, StepError};
use firn_run::{ConnectError, EventError, IdentifyError, IdentityError, InvokeError};
use firn_vmm::{GoneError, IncompatibleError, OpenKvm, RestoreError};

use crate::clock;
use crate::commands::invoke::FUNCTION_FAILED;
use crate::detach;
use crate::event::ReadEventError;
use crate::host_args::{HostArgs, HostError};
use crate::output;
use crate::session::{self, SessionError};
use crate::snapshot_args::{OpenSnapshotError, SnapshotArgs};

/// Arguments of `firn thaw`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn thaw --invoke '{\"name\": \"Ada\"}' snapshots/hello
  firn thaw --name h1 --detach snapshots/hello
  firn thaw --planner firecracker:readahead=off --invoke @event.json --json snapshots/hello
  firn thaw --pool pool.sock --planner pass --invoke '{}' hello

With --invoke the microVM answers one request and ends; without, it runs until it is stopped.
Any number of microVMs may be thawed from one snapshot at once. A snapshot that `firn player` made replays its
trace, checks all its memory and ends; of the options only --planner, --input and --json matter to it.")]
pub(crate) struct ThawArgs {
    #[command(flatten)]
    snapshot: SnapshotArgs,
    /// Name of the microVM: a-z, 0-9 and -
    #[arg(long)]
    name: Option<String>,
    /// Where guest memory comes from, as NAME[:KEY=VALUE,...]; see `firn plan --planner all`
    /// [default: firecracker, or firn from a pool]
    #[arg(long, value_name = "PLANNER")]
    planner: Option<String>,
    /// The image is in the page cache: leave out what the planner would preload
    #[arg(long, hide = true)]
    preloaded: bool,
    /// A player: when the last page is touched print `held`, and check all memory once standard input ends
    #[arg(long, hide = true)]
    hold: bool,
    /// A player: measure the time in page faults too; that takes some time itself
    #[arg(long, hide = true)]
    fault_time: bool,
    /// A player with several traces: the one that it replays; default: its first
    #[arg(long, value_name = "TRACE", conflicts_with = "invoke")]
    input: Option<String>,
    /// Send this event first: JSON, @FILE, or - for standard input
    #[arg(long, value_name = "EVENT")]
    invoke: Option<String>,
    /// After --invoke, let the microVM run on
    #[arg(long, requires = "invoke")]
    keep: bool,
    /// Seconds that the guest may take to wake, and the function to answer
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    time_limit: u64,
    /// The root file system, where it has moved since the freeze
    #[arg(long, value_name = "FILE")]
    root: Option<PathBuf>,
    /// Copy the guest's serial console to a file
    #[arg(long, value_name = "FILE")]
    console: Option<PathBuf>,
    /// Return once the microVM is awake, and let it run in the background
    #[arg(long)]
    detach: bool,
    /// After the answer, compare guest memory with the image: every page that was not written since
    #[arg(long, requires_all = ["invoke", "json"])]
    compare: bool,
    /// Print one JSON object: times, counts, memory, and the answer
    #[arg(long)]
    json: bool,
    /// End with standard input, as with a signal
    #[arg(long, hide = true)]
    end_with_input: bool,
    #[command(flatten)]
    host: HostArgs,
}

/// Why a snapshot was not thawed.
#[derive(Debug, Error)]
pub(crate) enum ThawCommandError {
    #[error(transparent)]
    Detach(#[from] detach::DetachError),
    #[error(transparent)]
    Host(#[from] HostError),
    #[error(transparent)]
    Read(#[from] ReadEventError),
    #[error(transparent)]
    Event(#[from] EventError),
    #[error(transparent)]
    Planner(#[from] ParsePlannerError),
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error(transparent)]
    Open(#[from] OpenSnapshotError),
    #[error(transparent)]
    Incompatible(#[from] IncompatibleError),
    #[error(transparent)]
    Plan(#[from] PlanSnapshotError),
    #[error(transparent)]
    Execute(#[from] ExecuteError),
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    Schedule(#[from] StepError),
    #[error(transparent)]
    Restore(#[from] RestoreError),
    #[error("starting the guest's processors")]
    Resume(#[source] firn_vmm::VcpuThreadError),
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Identify(#[from] IdentifyError),
    #[error(transparent)]
    Invoke(#[from] InvokeError),
    #[error(transparent)]
    Gone(#[from] GoneError),
    #[error(transparent)]
    Replay(#[from] ReplayError),
    #[error("comparing guest memory with the image")]
    Compare(#[source] Box<dyn StdError + Send + Sync>),
    #[error("measuring the microVM")]
    Measure(#[source] Box<dyn StdError + Send + Sync>),
}

/// How a thaw began.
pub(crate) struct Begun {
    /// When this process had its order, ns of CLOCK_MONOTONIC: at its first line, or later for one that stood by.
    pub(crate) at: u64,
    /// When the request came in, where whoever asks says so.
    pub(crate) request: Option<u64>,
    /// KVM, where it was opened before there was anything to thaw.
    pub(crate) kvm: Option<OpenKvm>,
}

impl Begun {
    /// Begins now, with nothing prepared.
    pub(crate) fn now() -> Self {
        Self { at: now_ns(), request: clock::request(), kvm: None }
    }
}

pub(crate) fn run(arguments: &ThawArgs, begun: Begun) -> Result<ExitCode, ThawCommandError> {
    let written = arguments.planner.as_deref();
    let mut planner = parse(written.unwrap_or_else(|| arguments.snapshot.default_planner()))?;
    if arguments.preloaded {
        planner = Box::new(Preloaded(planner));
    }
    if arguments.detach {
        return Ok(detach::detach()?);
    }
    if arguments.end_with_input {
        session::end_with_input()?;
    }
    let open = Instant::now();
    let mut opened = arguments.snapshot.open(planner.store())?;
    opened.take_copy(&*planner)?;
    let snapshot = opened.snapshot();
    let opening = open.elapsed();
    match firn_bench::player::traces_of(snapshot.manifest()) {
        Some(_) => player::run(arguments, &begun, &*planner, &mut opened, opening),
        None if arguments.input.is_some() => Err(ReplayError::NotPlayer.into()),
        None => match linux::run(arguments, begun, &*planner, &mut opened, opening) {
            // The function's own failure, of its after-restore hooks, is an answer.
            Err(ThawCommandError::Identify(IdentifyError::Function(failed))) => {
                output::json(&failed.error);
                Ok(ExitCode::from(FUNCTION_FAILED))
            }
            ended => ended,
        },
    }
}
