//! The processes that run the function: the agent's own Python runtime, or one that speaks AWS Lambda's Runtime API.

mod api;
mod lambda;
mod own;
mod process;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Instant;

use serde_json::value::RawValue;

pub(crate) use api::RuntimeApi;
use lambda::LambdaRuntime;
use own::OwnRuntime;

use crate::protocol::{
    FrameError, FunctionError, Invoke, Load, ReceiveError, RuntimeKind, SendError,
};

/// How the runtime is started.
#[derive(Debug, Clone)]
pub struct RuntimeConfig {
    /// The Python interpreter, version 3.9 or newer: a path, or a name to look up in `PATH`.
    pub python: PathBuf,
    /// The folder that the function's files are written to. Everything in it is removed before.
    pub task_dir: PathBuf,
    /// The folder with AWS Lambda's runtime interface client for Python.
    pub runtime_dir: PathBuf,
    /// Where the Runtime API is served; the kernel chooses a port in place of port 0.
    pub runtime_api: SocketAddr,
    /// The user and group that the function runs as; the agent's own where there is none.
    pub user: Option<u32>,
}

/// What a runtime answers. The function shares its process, so nothing here is to be trusted.
#[derive(Debug)]
pub(crate) enum Outcome {
    Done,
    /// At most [`crate::protocol::MAX_ANSWER_BYTES`].
    Answer(Box<RawValue>),
    Error(FunctionError),
}

/// Why the runtime gave no [`Outcome`]. It has to be ended then.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExchangeError {
    #[error("the runtime did not answer in time")]
    TimedOut,
    #[error("the runtime ended")]
    Ended,
    #[error("the function broke the runtime's channel")]
    Broken,
    #[error("the runtime waits for no restore: load the function for SnapStart")]
    NotRestorable,
    #[error("the runtime waits for a restore")]
    NotRestored,
    #[error("the runtime's channel failed")]
    Io(#[source] io::Error),
}

/// A running runtime. It and its process group are killed when this is dropped.
#[derive(Debug)]
pub(crate) enum Runtime {
    Own(OwnRuntime),
    Lambda(Box<LambdaRuntime>),
}

impl Runtime {
    /// Starts the process with `environment` and nothing else from the agent's own.
    pub(crate) fn start(
        config: &RuntimeConfig,
        api: &mut Option<RuntimeApi>,
        load: &Load,
        mut environment: BTreeMap<String, String>,
    ) -> io::Result<Self> {
        if load.runtime == RuntimeKind::Own {
            return OwnRuntime::start(config, &environment).map(Self::Own);
        }
        let api = match api {
            Some(api) => api,
            None => api.insert(RuntimeApi::serve(config.runtime_api)?),
        };
        lambda::add_environment(&mut environment, config, api.address(), load);
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

    /// Gives one event to the function and waits for the outcome.
    pub(crate) fn invoke(
        &mut self,
        invoke: &Invoke,
        deadline: Instant,
    ) -> Result<Outcome, ExchangeError> {
        match self {
            Self::Own(runtime) => runtime.invoke(invoke, deadline),
            Self::Lambda(runtime) => runtime.invoke(invoke, deadline),
        }
    }

    /// Leaves the process fit to be frozen.
    pub(crate) fn collect(&mut self, deadline: Instant) -> Result<Outcome, ExchangeError> {
        match self {
            Self::Own(runtime) => runtime.collect(deadline),
            Self::Lambda(runtime) => runtime.check_restorable(),
        }
    }

    /// Makes the process differ from those of other clones.
    pub(crate) fn reseed(
        &mut self,
        instance_id: &str,
        log_stream_name: &str,
        deadline: Instant,
    ) -> Result<Outcome, ExchangeError> {
        match self {
            Self::Own(runtime) => runtime.reseed(instance_id, log_stream_name, deadline),
            // Its hooks take the identity from the host name.
            Self::Lambda(runtime) => runtime.restore(deadline),
        }
    }

    /// Whether a new process is as good as this one when this one cannot reseed itself. One that waits
    /// to be restored has hooks to run, and is what was frozen.
    pub(crate) fn is_replaceable(&self) -> bool {
        match self {
            Self::Own(_) => true,
            Self::Lambda(runtime) => runtime.check_restorable().is_err(),
        }
    }

    /// Takes what the function printed since the last call: its last bytes, as text.
    pub(crate) fn take_logs(&mut self) -> String {
        match self {
            Self::Own(runtime) => runtime.take_logs(),
            Self::Lambda(runtime) => runtime.take_logs(),
        }
    }

    /// Waits for a runtime whose channel closed, kills it where it goes on, and says how it ended:
    /// `None` where it had to be killed.
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
