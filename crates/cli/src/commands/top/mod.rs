//! `firn top`: displays the status of a daemon.

mod screen;
mod view;

use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use thiserror::Error;

use firn_api::{Credentials, CredentialsError, StatusClient, StatusClientError};

use crate::commands::aws::default_endpoint;
use crate::output;
use view::View;

/// Arguments of `firn top`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn top
  firn top --once --json
  firn top --endpoint http://10.0.0.7:9700 --credentials ~/.aws/credentials

In the terminal, q exits. Memory is the resident memory of the monitors' processes.")]
pub(crate) struct TopArgs {
    /// Endpoint of the daemon [default: AWS_ENDPOINT_URL_LAMBDA, AWS_ENDPOINT_URL, or
    /// http://127.0.0.1:9700]
    #[arg(long, value_name = "URL")]
    endpoint: Option<String>,
    /// Sign requests with the first key in this file, in the format of ~/.aws/credentials
    #[arg(long, value_name = "FILE", env = "AWS_SHARED_CREDENTIALS_FILE")]
    credentials: Option<PathBuf>,
    /// Region of the daemon, for which requests are signed
    #[arg(long, env = "AWS_REGION", default_value = "us-east-1")]
    region: String,
    /// Seconds between two updates
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=3600))]
    interval: u32,
    /// Print one table after one interval, and exit; the default if standard output is not a
    /// terminal
    #[arg(long)]
    once: bool,
    /// Print one JSON object after one interval, and exit
    #[arg(long)]
    json: bool,
}

/// The status of a daemon was not displayed.
#[derive(Debug, Error)]
pub(crate) enum TopError {
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    #[error(transparent)]
    Client(#[from] StatusClientError),
    #[error("cannot use the terminal")]
    Terminal(#[source] io::Error),
}

pub(crate) fn run(arguments: &TopArgs) -> Result<ExitCode, TopError> {
    let credentials = arguments.credentials.as_deref().map(Credentials::read).transpose()?;
    let endpoint = arguments.endpoint.clone().unwrap_or_else(default_endpoint);
    let client = StatusClient::new(&endpoint, credentials, &arguments.region)?;
    let interval = Duration::from_secs(arguments.interval.into());
    let first = client.status()?;
    if arguments.json || arguments.once || !io::stdout().is_terminal() {
        let begin = Instant::now();
        std::thread::sleep(interval);
        let view = View::of(&endpoint, Some(&(first, begin)), client.status()?);
        if arguments.json {
            output::json(&view);
        } else {
            output::line(&output::plain(&view.text()));
        }
    } else {
        screen::watch(&endpoint, &client, first, interval).map_err(TopError::Terminal)?;
    }
    Ok(ExitCode::SUCCESS)
}
