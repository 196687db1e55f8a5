//! `firn lab`: builds the lab and runs commands in it.

use std::borrow::Cow;
use std::io::{self, Write};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand};
use firn_base::{format_bytes, parse_size};
use firn_lab::{BuildError, LabError, RunConfig};
use serde::Serialize;

use crate::output;

/// Commands of `firn lab`.
#[derive(Debug, Subcommand)]
pub(crate) enum LabCommand {
    /// Build the lab and the guest's files from Debian packages into firn's cache (without root;
    /// keeps what is up to date)
    Build {
        /// Build only the guest's files, for a host that runs Linux guests itself
        #[arg(long)]
        guest_only: bool,
        /// Build only the module for the lab's kernel that `snapbpf:prefetch=kernel` needs
        #[arg(long, conflicts_with = "guest_only")]
        snapbpf: bool,
    },
    /// Run a command in the lab and exit with its exit code
    #[command(after_help = "\
In the lab:
  /in, /out     the inputs; --out copies the contents of /out back
  /bin/firn     this firn, and busybox's commands
  /cache        the guest's files (FIRN_CACHE), read-only
  /scratch      an empty ext4 of 8 GiB (TMPDIR, and the working folder)
  /dev/kvm, /dev/dax0.0

Exit code: the command's own (128 + n if signal n ended it), 124 after --timeout, 125 if the lab itself failed.

Examples:
  firn lab run -- uname -r
  firn lab run --memory 6G --timeout 60 -- firn doctor
  firn lab run --in ./test-binary --timeout 600 -- /in/test-binary --test-threads=1
  firn lab run --out results -- sh -c 'firn doctor --json > /out/doctor.json'")]
    Run(RunArgs),
    /// Serve one request in the lab's machine; the lab starts it
    #[command(hide = true)]
    Init {
        /// The block device with the request.
        payload: PathBuf,
        /// The port to the caller.
        channel: PathBuf,
    },
}

/// Arguments of `firn lab run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Copy a file or folder into the lab, as /in/NAME
    #[arg(long = "in", value_name = "PATH")]
    inputs: Vec<PathBuf>,
    /// Copy the contents of the lab's /out into this folder
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Memory of the lab's machine beside its processors, such as 6G
    #[arg(long, value_name = "SIZE", default_value = "4G", value_parser = |text: &str| mebibytes(text, 512..=65536))]
    memory: u64,
    /// Processors of the lab's machine
    #[arg(long, value_name = "N", default_value_t = RunConfig::CPUS, value_parser = clap::value_parser!(u8).range(1..=16))]
    cpus: u8,
    /// Let the lab's clock count instructions, 1 ns each: slower, with one processor, and
    /// reproducible
    #[arg(long, conflicts_with = "cpus")]
    icount: bool,
    /// Add words to the command line of the lab's kernel
    #[arg(long, value_name = "WORDS")]
    cmdline: Option<String>,
    /// Stop the command after this many seconds, counted from the start of the lab
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    timeout: Option<u64>,
    /// Set a variable in the command's environment
    #[arg(long = "env", value_name = "K=V", value_parser = variable)]
    environment: Vec<(String, String)>,
    /// Keep the persistent memory (/dev/dax0.0) in this file across runs; created if absent
    #[arg(long, value_name = "FILE")]
    pmem: Option<PathBuf>,
    /// Size of /dev/dax0.0, such as 512M, if it is created
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = |text: &str| mebibytes(text, 64..=1 << 20))]
    pmem_size: u64,
    /// Add a second NVDIMM with an empty ext4 of 1.5 GiB for `mount -o dax=always /dev/pmem1`
    #[arg(long)]
    fsdax: bool,
    /// Print one JSON object with exit code, output and error output when the command has exited
    #[arg(long)]
    json: bool,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<String>,
}

impl From<RunArgs> for RunConfig {
    fn from(arguments: RunArgs) -> Self {
        Self {
            command: arguments.command,
            inputs: arguments.inputs,
            out: arguments.out,
            memory_mib: arguments.memory,
            cpus: arguments.cpus,
            icount: arguments.icount,
            cmdline: arguments.cmdline,
            timeout: arguments.timeout.map(Duration::from_secs),
            environment: arguments.environment,
            pmem: arguments.pmem,
            pmem_size_mib: arguments.pmem_size,
            fsdax: arguments.fsdax,
            capture: arguments.json,
        }
    }
}

fn mebibytes(text: &str, allowed: RangeInclusive<u64>) -> Result<u64, String> {
    let bytes = parse_size(text).map_err(|error| error.to_string())?;
    let size = bytes >> 20;
    if bytes.is_multiple_of(1 << 20) && allowed.contains(&size) {
        return Ok(size);
    }
    let [least, most] = [allowed.start(), allowed.end()].map(|size| format_bytes(size << 20));
    Err(format!("use whole MiB from {least} to {most}, such as 2G"))
}

fn variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("expected NAME=VALUE".to_owned()),
    }
}

/// The output of `firn lab run --json`.
#[derive(Serialize)]
struct Report<'a> {
    exit_code: u8,
    stdout: Cow<'a, str>,
    stderr: Cow<'a, str>,
}

/// Runs a command of `firn lab`.
///
/// # Errors
///
/// The lab itself failed, or the run was stopped; see [`LabError::exit_code`].
pub(crate) fn run(command: LabCommand) -> Result<ExitCode, LabError> {
    match command {
        LabCommand::Build { snapbpf: true, .. } => {
            firn_lab::build_snapbpf(&progress)?;
            Ok(ExitCode::SUCCESS)
        }
        LabCommand::Build { guest_only, .. } => {
            let firn = std::env::current_exe().map_err(|source| BuildError::File {
                action: "find",
                path: "firn".into(),
                source,
            })?;
            let agent = firn.with_file_name("firn-agent");
            let build = if guest_only { firn_lab::build_guest } else { firn_lab::build };
            build(&agent, &progress)?;
            Ok(ExitCode::SUCCESS)
        }
        LabCommand::Run(arguments) => run_command(&arguments.into()),
        LabCommand::Init { payload, channel } => {
            firn_lab::init(&payload, &channel)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Prints a line of a build's progress.
pub(crate) fn progress(text: &str) {
    output::note(&format!("firn: {text}"));
}

/// Runs a command in the lab and prints its report if its output was captured. Returns the
/// command's exit code.
///
/// # Errors
///
/// The lab itself failed, or the run was stopped.
pub(crate) fn run_command(config: &RunConfig) -> Result<ExitCode, LabError> {
    let outcome = firn_lab::run(config)?;
    if let Some(captured) = outcome.captured {
        let report = Report {
            exit_code: outcome.exit_code,
            stdout: String::from_utf8_lossy(&captured.stdout),
            stderr: String::from_utf8_lossy(&captured.stderr),
        };
        let mut stdout = io::stdout().lock();
        serde_json::to_writer(&mut stdout, &report)
            .map_err(|error| LabError::Output(error.into()))?;
        writeln!(stdout).map_err(LabError::Output)?;
    }
    Ok(ExitCode::from(outcome.exit_code))
}

#[cfg(test)]
#[path = "lab_tests.rs"]
mod tests;
