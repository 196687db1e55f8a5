//! The command line.

use std::path::PathBuf;

use clap::Parser;

use crate::logger::{Level, LoggerConfig};

/// Run one microVM of firn with Firecracker's API
#[derive(Debug, Parser)]
#[command(
    name = "firecracker",
    disable_version_flag = true,
    after_help = "The API and its limits: docs/firecracker.md.

Exit codes: 0 the guest ended, 1 failed, 148 a system call was denied, 152 the configuration file is not valid,
153 wrong arguments."
)]
pub(crate) struct Args {
    /// Path of the API's socket, which must not exist
    #[arg(long, value_name = "PATH", default_value = "/run/firecracker.socket")]
    pub(crate) api_sock: PathBuf,
    /// The microVM's id: 1 to 64 letters, digits and hyphens
    #[arg(long, value_name = "ID", default_value = "anonymous-instance", value_parser = parse_id)]
    pub(crate) id: String,
    /// A JSON file with the microVM's resources. The microVM starts at once
    #[arg(long, value_name = "FILE")]
    pub(crate) config_file: Option<PathBuf>,
    /// Do not serve the API
    #[arg(long, requires = "config_file")]
    pub(crate) no_api: bool,
    /// A JSON file with the guest's metadata
    #[arg(long, value_name = "FILE")]
    pub(crate) metadata: Option<PathBuf>,
    /// Path of the log, a file or named pipe. The default is standard output
    #[arg(long, value_name = "FILE")]
    log_path: Option<String>,
    /// The log's level: Error, Warning, Info, Debug, Trace or Off
    #[arg(long, value_name = "LEVEL", value_parser = parse_level)]
    level: Option<Level>,
    /// The modules that are logged, by the beginning of their path
    #[arg(long, value_name = "MODULE")]
    module: Option<String>,
    /// Log the level of each line
    #[arg(long)]
    show_level: bool,
    /// Log the place in the source of each line
    #[arg(long)]
    show_log_origin: bool,
    /// Path of the metrics, a file or named pipe
    #[arg(long, value_name = "FILE")]
    pub(crate) metrics_path: Option<String>,
    /// The largest body of a request, bytes
    #[arg(long, value_name = "BYTES", default_value_t = 51_200)]
    pub(crate) http_api_max_payload_size: usize,
    /// The most metadata, bytes; by default that of a body
    #[arg(long, value_name = "BYTES")]
    pub(crate) mmds_size_limit: Option<usize>,
    /// When the process that started this one began, µs of CLOCK_MONOTONIC
    #[arg(long, value_name = "US")]
    pub(crate) start_time_us: Option<u64>,
    /// The CPU time of this process then, µs
    #[arg(long, value_name = "US")]
    pub(crate) start_time_cpu_us: Option<u64>,
    /// The CPU time of the process that started this one, µs
    #[arg(long, value_name = "US")]
    pub(crate) parent_cpu_time_us: Option<u64>,
    /// Do not filter system calls
    #[arg(long)]
    pub(crate) no_seccomp: bool,
    /// Print the version
    #[arg(long, short = 'V')]
    pub(crate) version: bool,
}

impl Args {
    /// The log's configuration, if an option has some.
    pub(crate) fn logger(&self) -> Option<LoggerConfig> {
        let config = LoggerConfig {
            log_path: self.log_path.clone(),
            level: self.level,
            show_level: self.show_level.then_some(true),
            show_log_origin: self.show_log_origin.then_some(true),
            module: self.module.clone(),
        };
        (config != LoggerConfig::default()).then_some(config)
    }
}

fn parse_id(text: &str) -> Result<String, String> {
    let is_id = |character: char| character.is_ascii_alphanumeric() || character == '-';
    if (1..=64).contains(&text.len()) && text.chars().all(is_id) {
        Ok(text.to_owned())
    } else {
        Err("use 1 to 64 letters, digits and hyphens".to_owned())
    }
}

fn parse_level(text: &str) -> Result<Level, String> {
    Level::parse(text).ok_or_else(|| "use Error, Warning, Info, Debug, Trace or Off".to_owned())
}
