//! `firn env` and `firn aws`: AWS's clients with a daemon as their endpoint.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use clap::Args;

use crate::output;

/// Where `firn serve` listens by default.
const DEFAULT_ENDPOINT: &str = "http://127.0.0.1:9700";

/// Where the daemon is, and how requests to it are signed.
#[derive(Debug, Args)]
pub(crate) struct ClientArgs {
    /// Endpoint of the daemon
    #[arg(
        long,
        value_name = "URL",
        env = "AWS_ENDPOINT_URL_LAMBDA",
        default_value = DEFAULT_ENDPOINT,
        value_parser = endpoint
    )]
    endpoint: String,
    /// Region of the daemon
    #[arg(long, default_value = "us-east-1")]
    region: String,
    /// Sign requests with a key in this file, in the format of ~/.aws/credentials [default: the
    /// client's own credentials, or any if it has none]
    #[arg(long, value_name = "FILE")]
    credentials: Option<PathBuf>,
}

/// Arguments of `firn env`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  eval $(firn env)
  eval $(firn env --endpoint http://127.0.0.1:4566)

AWS's clients then send requests for AWS Lambda and STS to the daemon, and others to AWS.")]
pub(crate) struct EnvArgs {
    #[command(flatten)]
    client: ClientArgs,
}

/// Arguments of `firn aws`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn aws lambda list-functions
  firn aws --endpoint http://127.0.0.1:4566 lambda list-functions

Options of firn come before the first word of the aws command.")]
pub(crate) struct AwsArgs {
    #[command(flatten)]
    client: ClientArgs,
    /// Words of the aws command
    #[arg(
        value_name = "WORD",
        trailing_var_arg = true,
        allow_hyphen_values = true,
        required = true
    )]
    words: Vec<OsString>,
}

/// The aws command did not start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AwsError {
    /// It is not there.
    #[error(
        "cannot run aws: there is no such program; install AWS's command line interface, for example with pip install awscli"
    )]
    Missing,
    /// It cannot be run, or the file of credentials has no path.
    #[error("cannot run aws")]
    Run(#[source] io::Error),
}

impl ClientArgs {
    /// The variables that clients read. `is_set` tells whether the environment has one.
    fn variables(
        &self,
        is_set: impl Fn(&str) -> bool,
    ) -> io::Result<Vec<(&'static str, OsString)>> {
        let mut variables: Vec<(&str, OsString)> = vec![
            ("AWS_ENDPOINT_URL_LAMBDA", self.endpoint.clone().into()),
            ("AWS_ENDPOINT_URL_STS", self.endpoint.clone().into()),
            ("AWS_DEFAULT_REGION", self.region.clone().into()),
            ("AWS_REGION", self.region.clone().into()),
        ];
        let own = ["AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_SHARED_CREDENTIALS_FILE"];
        if let Some(file) = &self.credentials {
            variables.push(("AWS_SHARED_CREDENTIALS_FILE", std::path::absolute(file)?.into()));
        } else if !own.into_iter().any(is_set) {
            // Clients sign every request. A daemon without credentials accepts any signature.
            variables.push(("AWS_ACCESS_KEY_ID", "firn".into()));
            variables.push(("AWS_SECRET_ACCESS_KEY", "firn".into()));
        }
        Ok(variables)
    }
}

/// The endpoint of AWS Lambda's clients: the variable of the service, then that of all services.
pub(crate) fn default_endpoint() -> String {
    let set = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    set("AWS_ENDPOINT_URL_LAMBDA")
        .or_else(|| set("AWS_ENDPOINT_URL"))
        .unwrap_or_else(|| DEFAULT_ENDPOINT.to_owned())
}

fn is_set(name: &str) -> bool {
    std::env::var_os(name).is_some()
}

pub(crate) fn env(arguments: &EnvArgs) -> anyhow::Result<ExitCode> {
    for (name, value) in arguments.client.variables(is_set)? {
        output::line(&format!("export {name}={};", quoted(&value.to_string_lossy())));
    }
    Ok(ExitCode::SUCCESS)
}

/// Becomes the aws command.
pub(crate) fn aws(arguments: &AwsArgs) -> AwsError {
    let variables = match arguments.client.variables(is_set) {
        Ok(variables) => variables,
        Err(error) => return AwsError::Run(error),
    };
    let error = Command::new("aws").args(&arguments.words).envs(variables).exec();
    match error.kind() {
        io::ErrorKind::NotFound => AwsError::Missing,
        _ => AwsError::Run(error),
    }
}

/// A word of a shell, also after the shell has split it and joined it again, as `eval $(…)` does.
fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/:.-_".contains(c);
    let word = |c: char| if plain(c) { c.to_string() } else { format!("\\{c}") };
    text.chars().map(word).collect()
}

fn endpoint(text: &str) -> Result<String, String> {
    let host = text.strip_prefix("http://").or_else(|| text.strip_prefix("https://"));
    match host {
        Some(host) if !host.is_empty() => Ok(text.to_owned()),
        _ => Err("expected http://HOST:PORT".to_owned()),
    }
}
