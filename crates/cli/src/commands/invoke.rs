//! `firn invoke`: one request to the function of a running microVM.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;

use firn_base::nanoseconds;
use firn_run::{AgentClient, FunctionError, Instances, Invocation, Outcome};

use crate::event;
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

/// The exit code of a command that ends with an outcome.
pub(crate) fn exit_code(outcome: &Outcome) -> u8 {
    if outcome.error.is_some() { FUNCTION_FAILED } else { 0 }
}

/// Prints answer or error, and logs, for people.
pub(crate) fn print(outcome: &Outcome) {
    note_logs(&outcome.logs);
    match (&outcome.answer, &outcome.error) {
        (Some(answer), _) => output::json_text(answer.get()),
        (None, Some(error)) => {
            output::json(error);
            note_limit(error);
        }
        (None, None) => {}
    }
}

/// Prints what the function has written.
pub(crate) fn note_logs(logs: &str) {
    let logs = output::plain(logs);
    if !logs.is_empty() {
        output::note(logs.trim_end());
    }
}

/// Names the option that sets the time limit, if the function exceeded it.
pub(crate) fn note_limit(error: &FunctionError) {
    if error.is_time_out() {
        output::note("firn: --time-limit sets how long the function may take");
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

pub(crate) fn run(arguments: &InvokeArgs) -> anyhow::Result<ExitCode> {
    let event = event::read(&arguments.event)?;
    let invocation = Invocation::new(&event, Duration::from_secs(arguments.time_limit))?;
    let instance = Instances::of_user().find(&arguments.name)?;
    let mut agent = AgentClient::connect(&instance.vsock_socket(), CONNECT_LIMIT)?;
    let begin = Instant::now();
    let outcome = Outcome::of(agent.invoke(&invocation))?;
    if arguments.json {
        let total_ns = nanoseconds(begin.elapsed());
        output::json(&Report { request_id: invocation.request_id(), total_ns, outcome: &outcome });
    } else {
        print(&outcome);
    }
    Ok(ExitCode::from(exit_code(&outcome)))
}
