//! `firn serve`: functions behind AWS Lambda's API.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueEnum};
use thiserror::Error;
use tracing_subscriber::EnvFilter;

use firn_host::{Credentials, CredentialsError, FunctionSettings, ServeError, ServeOptions};
use firn_memory::planners::{ParsePlannerError, parse};
use firn_vmm::Virtualization;

use crate::assets::{GuestFileError, GuestFiles};
use crate::host_args::{HostArgs, HostError};
use crate::output;

/// Arguments of `firn serve`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn serve
  firn serve --data /srv/firn --pool pool.sock --keep-alive 60
  aws --endpoint-url http://127.0.0.1:9700 --region us-east-1 lambda list-functions

A function's own planner and image are the environment variables FIRN_PLANNER and FIRN_IMAGE of its configuration.
What the daemon does goes to standard error; RUST_LOG chooses how much of it.")]
pub(crate) struct ServeArgs {
    /// Address to listen on
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:9700")]
    listen: SocketAddr,
    /// Directory of the daemon: functions, code, snapshots [default: serve, beside the cache's parts]
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Keep snapshots in the pool of this manager
    #[arg(long, value_name = "SOCKET")]
    pool: Option<PathBuf>,
    /// How functions are thawed that do not say it [default: firecracker, or pass_shared from a pool]
    #[arg(long, value_name = "PLANNER")]
    planner: Option<String>,
    /// Memory that all microVMs together may take [default: what is available now, less an eighth]
    #[arg(long, value_name = "SIZE", value_parser = crate::size::parse)]
    memory: Option<u64>,
    /// MicroVMs at once
    #[arg(long, value_name = "N", default_value_t = 256)]
    monitors: usize,
    /// Requests that may wait for a microVM; more are turned away
    #[arg(long, value_name = "N", default_value_t = 1000)]
    queue: usize,
    /// Seconds that a request may wait for a microVM
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    queue_wait: u64,
    /// Seconds that a microVM is kept after its last request
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    keep_alive: u64,
    /// Seconds that a microVM may take to start, and a function to initialise
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    start_limit: u64,
    /// Region in the functions' ARNs
    #[arg(long, default_value = "us-east-1")]
    region: String,
    /// Account in the functions' ARNs: 12 digits
    #[arg(long, default_value = "000000000000", value_parser = account)]
    account: String,
    /// Take only requests that are signed with one of the keys in this file, which has the form of ~/.aws/credentials
    #[arg(long, value_name = "FILE")]
    credentials: Option<PathBuf>,
    /// How the log is written
    #[arg(long, value_enum, default_value_t = Log::Text)]
    log: Log,
    #[command(flatten)]
    files: GuestFiles,
    #[command(flatten)]
    host: HostArgs,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Log {
    /// Lines for people
    Text,
    /// JSON, one object a line
    Json,
}

/// Why the daemon did not serve.
#[derive(Debug, Error)]
pub(crate) enum ServeCommandError {
    #[error(transparent)]
    Host(#[from] HostError),
    #[error(transparent)]
    GuestFile(#[from] GuestFileError),
    #[error(transparent)]
    Planner(#[from] ParsePlannerError),
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    #[error("no folder for functions: HOME and FIRN_CACHE are not set; name one with --data")]
    NoData,
    #[error("finding this program")]
    Program(#[source] std::io::Error),
    #[error("reading how much memory is available: name a --memory")]
    Memory(#[source] std::io::Error),
    #[error(transparent)]
    Serve(#[from] ServeError),
}

pub(crate) fn run(arguments: ServeArgs) -> Result<ExitCode, ServeCommandError> {
    arguments.host.require_linux(Virtualization::detect())?;
    arguments.files.check(&FunctionSettings::default())?;
    let default = if arguments.pool.is_some() { "pass_shared" } else { "firecracker" };
    let planner = arguments.planner.unwrap_or_else(|| default.to_owned());
    parse(&planner)?;
    let memory = match arguments.memory {
        Some(memory) => memory,
        None => available_memory().map_err(ServeCommandError::Memory)? / 8 * 7,
    };
    let credentials = arguments.credentials.as_deref().map(Credentials::read).transpose()?;
    let options = ServeOptions {
        listen: arguments.listen,
        data: match arguments.data {
            Some(data) => data,
            None => crate::lab::cache_dir().ok_or(ServeCommandError::NoData)?.join("serve"),
        },
        program: std::env::current_exe().map_err(ServeCommandError::Program)?,
        boot_options: [arguments.files.options(), host_options(&arguments.host)].concat(),
        images: !arguments.files.name_root(),
        thaw_options: host_options(&arguments.host),
        pool: arguments.pool,
        planner,
        memory,
        monitors: arguments.monitors,
        queue: arguments.queue,
        queue_wait: Duration::from_secs(arguments.queue_wait),
        keep_alive: Duration::from_secs(arguments.keep_alive),
        start_limit: Duration::from_secs(arguments.start_limit),
        region: arguments.region,
        account: arguments.account,
        credentials,
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match arguments.log {
        Log::Text => log.with_ansi(false).init(),
        Log::Json => log.json().init(),
    }
    firn_host::serve(&options, |address| {
        output::line(&format!("firn serves AWS Lambda's API on http://{address}"));
    })?;
    Ok(ExitCode::SUCCESS)
}

fn host_options(host: &HostArgs) -> Vec<String> {
    let mut options = vec!["--kvm".to_owned(), host.kvm.display().to_string()];
    if host.software_kvm {
        options.push("--software-kvm".to_owned());
    }
    options
}

/// `MemAvailable` of proc_meminfo(5), in bytes.
fn available_memory() -> std::io::Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.map(|kib| kib << 10).ok_or_else(|| std::io::ErrorKind::InvalidData.into())
}

fn account(text: &str) -> Result<String, String> {
    if text.len() == 12 && text.bytes().all(|byte| byte.is_ascii_digit()) {
        Ok(text.to_owned())
    } else {
        Err("an account is 12 digits".to_owned())
    }
}
