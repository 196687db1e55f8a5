//! The processes that run the function: the agent's own Python runtime, or a runtime that uses AWS
//! Lambda's Runtime API.

mod api;
mod channel;
mod credentials;
mod lambda;
mod own;
mod process;
mod thrashing;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Instant;

use serde_json::value::RawValue;

pub(crate) use api::RuntimeApi;
pub(crate) use channel::Identity;
pub(crate) use credentials::Credentials;
use lambda::LambdaRuntime;
use own::OwnRuntime;

use super::freezer::Freezer;
use crate::protocol::{
    FrameError, FunctionError, Invoke, Load, ReceiveError, Reply, RuntimeKind, SendError,
};

/// Configuration of the runtime.
#[derive(Debug, Clone)]
pub struct RuntimeConfig {
    /// The Python interpreter, version 3.9 or newer: a path, or a name to look up in `PATH`.
    pub python: PathBuf,
    /// The directory for the function's files. Its previous content is removed.
    pub task_dir: PathBuf,
    /// The directory for the files of the function's layers.
    pub layers_dir: PathBuf,
    /// The directory with AWS Lambda's runtime interface client for Python.
    pub runtime_dir: PathBuf,
    /// The address of the Runtime API. The kernel chooses a port in place of port 0.
    pub runtime_api: SocketAddr,
    /// The user and group id of the function; `None` for the agent's own.
    pub user: Option<u32>,
    /// The kernel's counters, one on each line (`/proc/vmstat`).
    pub counters: PathBuf,
    /// The kernel's setting against thrashing (`/sys/kernel/mm/lru_gen/min_ttl_ms`).
    pub min_ttl_ms: PathBuf,
    /// The control groups of the function's processes. Without them, threads and processes other
    /// than the main thread of Python run until the freeze, and from the restore on.
    pub freezer: Option<Freezer>,
}

/// An outcome reported by a runtime. The function shares its process, so the content is not
/// trusted.
#[derive(Debug)]
pub(crate) enum Outcome {
    Done,
    /// At most [`crate::protocol::MAX_ANSWER_BYTES`].
    Answer(Box<RawValue>),
    Error(FunctionError),
}

/// Why a runtime did not start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    /// The function's `bootstrap` is missing.
    #[error("Couldn't find valid bootstrap(s): [{}]", .0.display())]
    NoBootstrap(PathBuf),
    /// The function's `bootstrap` cannot be executed.
    #[error("fork/exec {}: {reason}", path.display())]
    Bootstrap { path: PathBuf, reason: &'static str },
    /// A program cannot be executed.
    #[error("cannot start: {0}")]
    Spawn(io::Error),
    #[error("cannot start: {0}")]
    System(#[from] io::Error),
}

/// Why the runtime returned no [`Outcome`]. It must be ended, unless the variant states otherwise.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExchangeError {
    #[error("the runtime did not respond within the time limit")]
    TimedOut,
    #[error("the runtime exited")]
    Ended,
    /// It has not received the request, which a new runtime can serve.
    #[error("the runtime exited before the request")]
    EndedBefore,
    #[error("the function violated the protocol of the runtime's channel")]
    Broken,
    #[error("the runtime does not support a restore: load the function with SnapStart")]
    NotRestorable,
    #[error("the runtime has not been restored")]
    NotRestored,
    #[error("the runtime's channel failed")]
    Io(#[source] io::Error),
}

/// A running runtime. Dropping it kills it and its process group.
#[derive(Debug)]
pub(crate) enum Runtime {
    Own(Box<OwnRuntime>),
    Lambda(Box<LambdaRuntime>),
}

impl Runtime {
    /// Starts the process with only `environment` as its environment.
    pub(crate) fn start(
        config: &RuntimeConfig,
        api: &mut Option<RuntimeApi>,
        credentials: &Credentials,
        load: &Load,
        mut environment: BTreeMap<String, String>,
    ) -> Result<Self, StartError> {
        if load.runtime == RuntimeKind::Own {
            return OwnRuntime::start(config, &environment).map(Box::new).map(Self::Own);
        }
        let api = match api {
            Some(api) => api,
            None => api.insert(RuntimeApi::serve(config.runtime_api, credentials.clone())?),
        };
        lambda::add_environment(&mut environment, config, api, load);
        let runtime = LambdaRuntime::start(config, api, load.runtime, &environment)?;
        Ok(Self::Lambda(Box::new(runtime)))
    }

    /// Waits until the function is loaded.
    pub(crate) fn init(
        &mut self,
        config: &RuntimeConfig,
        load: &Load,
        deadline: Instant,
    ) -> Result<Outcome, ExchangeError> {
        match self {
            Self::Own(runtime) => runtime.init(config, load, deadline),
            Self::Lambda(runtime) => runtime.init(load.snap_start, deadline),
        }
    }

    /// Passes one event to the function and waits for the outcome. An answer that it streams goes
    /// to `host` in parts, if the request asks for it.
    pub(crate) fn invoke(
        &mut self,
        invoke: &Invoke,
        deadline: Instant,
        host: &mut dyn FnMut(&Reply),
    ) -> Result<Outcome, ExchangeError> {
        match self {
            Self::Own(runtime) => runtime.invoke(invoke, deadline),
            Self::Lambda(runtime) => runtime.invoke(invoke, deadline, host),
        }
    }

    /// Stops the function's processes for a freeze. If this fails, the runtime must be ended,
    /// except after [`ExchangeError::NotRestorable`].
    pub(crate) fn stop(&mut self, deadline: Instant) -> Result<Outcome, ExchangeError> {
        match self {
            Self::Own(runtime) => runtime.stop(deadline),
            Self::Lambda(runtime) => runtime.stop(deadline),
        }
    }

    /// Makes the process differ from those of other clones, then lets everything run that was
    /// stopped.
    pub(crate) fn resume(
        &mut self,
        identity: Identity<'_>,
        deadline: Instant,
    ) -> Result<Outcome, ExchangeError> {
        match self {
            Self::Own(runtime) => runtime.resume(identity, deadline),
            Self::Lambda(runtime) => runtime.resume(identity, deadline),
        }
    }

    /// Whether the function's before-snapshot hooks have run, and its after-restore hooks have not.
    /// Such a process cannot be replaced by a new one, because its hooks belong to the frozen
    /// state.
    pub(crate) fn waits_for_restore(&self) -> bool {
        match self {
            Self::Own(_) => false,
            Self::Lambda(runtime) => runtime.is_restorable(),
        }
    }

    /// Takes the last part of the function's output since the previous call, as text.
    pub(crate) fn take_logs(&mut self) -> String {
        match self {
            Self::Own(runtime) => runtime.take_logs(),
            Self::Lambda(runtime) => runtime.take_logs(),
        }
    }

    /// The sum of the largest resident sets of the processes that run, in bytes.
    pub(crate) fn peak_memory(&self) -> u64 {
        match self {
            Self::Own(runtime) => runtime.peak_memory(),
            Self::Lambda(runtime) => runtime.peak_memory(),
        }
    }

    /// Waits for a runtime whose channel closed, and kills it after a grace period. Returns its
    /// status, or `None` if it was killed.
    pub(crate) fn end(&mut self) -> io::Result<Option<ExitStatus>> {
        match self {
            Self::Own(runtime) => runtime.end(),
            Self::Lambda(runtime) => runtime.end(),
        }
    }
}

impl From<FrameError> for ExchangeError {
    fn from(error: FrameError) -> Self {
        match error {
            FrameError::Closed | FrameError::Reset | FrameError::Truncated => Self::Ended,
            FrameError::TimedOut => Self::TimedOut,
            FrameError::TooLong { .. } => Self::Broken,
            FrameError::Io(error) => Self::Io(error),
        }
    }
}

impl From<SendError> for ExchangeError {
    fn from(error: SendError) -> Self {
        match error {
            SendError::Frame(error) => error.into(),
            SendError::Unwritable(error) => Self::Io(error.into()),
        }
    }
}

impl From<ReceiveError> for ExchangeError {
    fn from(error: ReceiveError) -> Self {
        match error {
            ReceiveError::Frame(error) => error.into(),
            ReceiveError::Malformed(_) => Self::Broken,
        }
    }
}
