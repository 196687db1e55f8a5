//! `firn invoke`: one request to the function of a running microVM.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use serde_json::value::RawValue;
use thiserror::Error;

use firn_base::nanoseconds;
use firn_run::{
    AgentClient, Answer, ConnectError, EventError, FindError, FunctionError, Instances, Invocation,
    InvokeError,
};

use crate::event::{self, ReadEventError};
use crate::output;

/// How long the connection to the agent may take.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// Exit code when the function itself failed: its error is the answer.
pub(crate) const FUNCTION_FAILED: u8 = 3;

/// Arguments of `firn invoke`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn invoke hello '{\"name\": \"Ada\"}'
  firn invoke hello @guest/functions/hello/input-a.json
  echo '{}' | firn invoke --json hello -

The answer goes to standard output. Where the function fails, its error goes there in AWS Lambda's
form, what it printed to standard error, and the exit code is 3.")]
pub(crate) struct InvokeArgs {
    /// Name of the microVM
    name: String,
    /// The event: JSON, @FILE, or - for standard input
    event: String,
    /// Seconds that the function may take
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    time_limit: u64,
    /// Print one JSON object with answer or error, logs and time
    #[arg(long)]
    json: bool,
}

/// Why there is no answer.
#[derive(Debug, Error)]
pub(crate) enum InvokeCommandError {
    #[error(transparent)]
    Read(#[from] ReadEventError),
    #[error(transparent)]
    Event(#[from] EventError),
    #[error(transparent)]
    Find(#[from] FindError),
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Invoke(InvokeError),
}

/// What came of a request.
#[derive(Debug, Serialize)]
pub(crate) struct Outcome {
    /// The function's answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) answer: Option<Box<RawValue>>,
    /// Its error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<FunctionError>,
    /// The end of what it printed.
    pub(crate) logs: String,
    /// Time in the function, by the guest's clock, ns; 0 where it failed.
    pub(crate) function_ns: u64,
}

impl Outcome {
    /// What came of a request that reached the function, also where the function failed.
    pub(crate) fn of(result: Result<Answer, InvokeError>) -> Result<Self, InvokeError> {
        match result {
            Ok(answer) => Ok(Self {
                function_ns: nanoseconds(answer.duration),
                // The client passes on only what parsed as JSON.
                answer: RawValue::from_string(answer.json).ok(),
                error: None,
                logs: answer.logs,
            }),
            Err(InvokeError::Function(failed)) => Ok(Self {
                answer: None,
                error: Some(failed.error),
                logs: failed.logs,
                function_ns: 0,
            }),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn exit_code(&self) -> ExitCode {
        if self.error.is_some() { ExitCode::from(FUNCTION_FAILED) } else { ExitCode::SUCCESS }
    }

    /// Prints answer or error, and logs, for people.
    pub(crate) fn print(&self) {
        let logs = output::plain(&self.logs);
        if !logs.is_empty() {
            output::note(logs.trim_end());
        }
        match (&self.answer, &self.error) {
            (Some(answer), _) => output::json_text(answer.get()),
            (None, Some(error)) => output::json(error),
            (None, None) => {}
        }
    }
}

#[derive(Serialize)]
struct Report<'a> {
    request_id: &'a str,
    /// Request sent to answer received, ns.
    total_ns: u64,
    #[serde(flatten)]
    outcome: &'a Outcome,
}

pub(crate) fn run(arguments: &InvokeArgs) -> Result<ExitCode, InvokeCommandError> {
    let event = event::read(&arguments.event)?;
    let invocation = Invocation::new(&event, Duration::from_secs(arguments.time_limit))?;
    let instance = Instances::of_user().find(&arguments.name)?;
    let mut agent = AgentClient::connect(&instance.vsock_socket(), CONNECT_LIMIT)?;
    let begin = Instant::now();
    let outcome = Outcome::of(agent.invoke(&invocation)).map_err(InvokeCommandError::Invoke)?;
    if arguments.json {
        let total_ns = nanoseconds(begin.elapsed());
        output::json(&Report { request_id: invocation.request_id(), total_ns, outcome: &outcome });
    } else {
        outcome.print();
    }
    Ok(outcome.exit_code())
}
