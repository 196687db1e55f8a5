//! The lab: a Debian machine (L1) with real KVM and a real `/dev/dax0.0`, emulated in software by QEMU, on any x86-64 Linux.
//!
//! `firn lab build` makes it from Debian packages, in firn's cache, without root; `firn lab run` runs one command in it.
//! Correctness and counts are true there; times are not.

mod build;
mod cache;
mod channel;
mod devdax;
mod error;
mod init;
mod machine;
mod request;
mod run;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};

pub(crate) use cache::cache_dir;
pub(crate) use error::LabError;

/// Memory of the lab's machine, in MiB, where nobody says otherwise.
const MEMORY_MIB: u64 = 4096;
/// Processors of the lab's machine, where nobody says otherwise.
const CPUS: u8 = 2;
/// Size of the lab's /dev/dax0.0, in MiB, where nobody says otherwise.
const PMEM_MIB: u64 = 1024;

/// Commands of `firn lab`.
#[derive(Debug, Subcommand)]
pub(crate) enum LabCommand {
    /// Build the lab and the guest's files into firn's cache, from Debian packages (needs no root; keeps what is built)
    Build,
    /// Run a command in the lab and end with its exit code
    #[command(after_help = "\
In the lab:
  /in, /out     the inputs; what is left in /out comes back with --out
  /bin/firn     this firn, and busybox's commands
  /cache        the guest's files (FIRN_CACHE), read-only
  /scratch      an empty ext4 of 8 GiB (TMPDIR, and the working folder)
  /dev/kvm, /dev/dax0.0

Exit code: the command's own (128 + n if signal n ended it), 124 after --timeout, 125 if the lab itself failed.

Examples:
  firn lab run -- uname -r
  firn lab run --in ./test-binary --timeout 600 -- /in/test-binary --test-threads=1
  firn lab run --out results -- sh -c 'firn doctor --json > /out/doctor.json'")]
    Run(RunArgs),
    /// The lab's side within its machine; the lab runs it by itself
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
    /// Pass a file or folder into the lab, as /in/NAME
    #[arg(long = "in", value_name = "PATH")]
    pub(crate) inputs: Vec<PathBuf>,
    /// Unpack what the command leaves in /out into this folder
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// Memory of the lab's machine, in MiB
    #[arg(long, value_name = "MIB", default_value_t = MEMORY_MIB, value_parser = clap::value_parser!(u64).range(512..=65536))]
    pub(crate) memory: u64,
    /// Processors of the lab's machine
    #[arg(long, value_name = "N", default_value_t = CPUS, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub(crate) cpus: u8,
    /// Let the lab's clock count instructions, 1 ns each: slower, with one processor, and the same in every run
    #[arg(long, conflicts_with = "cpus")]
    pub(crate) icount: bool,
    /// Stop the command after so many seconds, counted from the start of the lab
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub(crate) timeout: Option<u64>,
    /// Set a variable in the command's environment
    #[arg(long = "env", value_name = "K=V", value_parser = variable)]
    pub(crate) environment: Vec<(String, String)>,
    /// Keep the persistent memory (/dev/dax0.0) in this file across runs; created if absent
    #[arg(long, value_name = "FILE")]
    pub(crate) pmem: Option<PathBuf>,
    /// Size of /dev/dax0.0, in MiB, where it is created
    #[arg(long, value_name = "MIB", default_value_t = PMEM_MIB, value_parser = clap::value_parser!(u64).range(64..=1_048_576))]
    pub(crate) pmem_size: u64,
    /// Give the lab a second NVDIMM, with an empty ext4 of 512 MiB for `mount -o dax=always /dev/pmem1`
    #[arg(long)]
    pub(crate) fsdax: bool,
    /// Print one JSON object with exit code, output and error output when the command has ended
    #[arg(long)]
    pub(crate) json: bool,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    pub(crate) command: Vec<String>,
}

fn variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("expected NAME=VALUE".to_owned()),
    }
}

/// Set within the lab.
const LAB: &str = "FIRN_LAB";
/// Set to `instructions` within a lab whose clock counts them.
const CLOCK: &str = "FIRN_LAB_CLOCK";
const INSTRUCTIONS: &str = "instructions";

/// Whether this program runs in the lab.
pub(crate) fn is_here() -> bool {
    std::env::var_os(LAB).is_some()
}

/// Whether this program runs in a lab whose clock counts instructions: 1 ns each.
pub(crate) fn counts_instructions() -> bool {
    std::env::var_os(CLOCK).is_some_and(|clock| clock == INSTRUCTIONS)
}

/// Whether there is a lab to run commands in.
pub(crate) fn is_built() -> bool {
    cache_dir().is_some_and(|cache| machine::Lab::open(cache).is_ok())
}

/// Runs a command in the lab as `firn lab run` does by default, and returns its exit code.
///
/// # Errors
///
/// The lab itself failed; see [`LabError::exit_code`].
pub(crate) fn run_command(
    inputs: Vec<PathBuf>,
    command: Vec<String>,
) -> Result<ExitCode, LabError> {
    let arguments = RunArgs {
        inputs,
        out: None,
        memory: MEMORY_MIB,
        cpus: CPUS,
        icount: false,
        timeout: None,
        environment: Vec::new(),
        pmem: None,
        pmem_size: PMEM_MIB,
        fsdax: false,
        json: false,
        command,
    };
    run::run(&arguments).map(ExitCode::from)
}

/// Carries out a command of `firn lab`.
///
/// # Errors
///
/// The lab itself failed, or the run was stopped; see [`LabError::exit_code`].
pub(crate) fn run(command: LabCommand) -> Result<ExitCode, LabError> {
    match command {
        LabCommand::Build => build::build().map(|()| ExitCode::SUCCESS),
        LabCommand::Run(arguments) => run::run(&arguments).map(ExitCode::from),
        LabCommand::Init { payload, channel } => {
            init::init(&payload, &channel)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}
