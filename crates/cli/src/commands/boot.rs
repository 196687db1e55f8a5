//! `firn boot`: a function in a microVM, from nothing.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use clap::Args;
use firn_base::{error_chain, format_milliseconds, nanoseconds, parse_size};
use serde::Serialize;
use thiserror::Error;

use firn_run::{
    AgentClient, Function, FunctionPathError, IdentifyError, Identity, IdentityError, LoadError,
    LoadOptions,
};
use firn_vmm::{
    BootConfig, BootError, CpuModel, Microvm, OpenFile, OpenFileError, OpenKvm, OpenKvmError,
    Virtualization,
};

use crate::assets::{GuestFileError, GuestFiles};
use crate::detach;
use crate::output;
use crate::session::{self, After, ConsoleTail, Interruption, SessionError};

/// Guest memory of a function that says nothing about it, bytes.
const DEFAULT_MEMORY: u64 = 256 << 20;

/// Arguments of `firn boot`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn boot guest/functions/hello
  firn boot --name empty
  firn boot --name builder --memory 512M --vcpus 2 --detach guest/functions/json
  firn boot --console console.txt my-function.py
  firn boot --image science --memory 512M my-function.py

The microVM runs until it is stopped: by Ctrl-C, `firn freeze`, or its own end.")]
pub(crate) struct BootArgs {
    /// The function: a directory with handler.py, or one Python file; none, and the guest waits for one
    function: Option<PathBuf>,
    /// Name of the microVM: a-z, 0-9 and -
    #[arg(long)]
    name: Option<String>,
    /// Guest memory, such as 256M or 2G [default: what the function's function.toml says, or 256M]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    memory: Option<u64>,
    /// Number of vCPUs, 1 to 4 [default: what the function's function.toml says, or 1]
    #[arg(long, value_name = "N")]
    vcpus: Option<u8>,
    /// The guest's processor: x86-64-v2, x86-64-v3, x86-64-v4, or host for all that this one has [default: the best of the named]
    #[arg(long, value_name = "MODEL")]
    cpu: Option<CpuModel>,
    /// Seconds that booting, and then loading the function, may take
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    time_limit: u64,
    /// Words to add to the kernel's command line
    #[arg(long, value_name = "WORDS")]
    cmdline: Option<String>,
    /// Copy the guest's serial console to a file
    #[arg(long, value_name = "FILE")]
    console: Option<PathBuf>,
    /// Return once the function is loaded, and let the microVM run in the background
    #[arg(long)]
    detach: bool,
    /// Print one JSON object when the function is loaded
    #[arg(long)]
    json: bool,
    /// End with standard input, as with a signal
    #[arg(long, hide = true)]
    end_with_input: bool,
    #[command(flatten)]
    files: GuestFiles,
    #[command(flatten)]
    host: crate::host_args::HostArgs,
}

/// Why a function was not booted.
#[derive(Debug, Error)]
pub(crate) enum BootCommandError {
    #[error(transparent)]
    Detach(#[from] detach::DetachError),
    #[error(transparent)]
    Host(#[from] crate::host_args::HostError),
    #[error(transparent)]
    Function(#[from] FunctionPathError),
    #[error(transparent)]
    GuestFile(#[from] GuestFileError),
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error(transparent)]
    Open(#[from] OpenFileError),
    #[error(transparent)]
    Kvm(#[from] OpenKvmError),
    #[error(transparent)]
    Boot(#[from] BootError),
    #[error("starting the guest's processors")]
    Resume(#[source] firn_vmm::VcpuThreadError),
    /// The causes are part of the reason, so that the console comes last.
    #[error("{reason}{console}")]
    NoAgent { reason: String, console: ConsoleTail },
    #[error(transparent)]
    Identify(#[from] IdentifyError),
    #[error(transparent)]
    Load(#[from] LoadError),
}

/// How a cold boot went; times in ns.
#[derive(Debug, Serialize)]
pub(crate) struct BootReport {
    /// Name of the microVM.
    pub(crate) name: String,
    /// Process id of its monitor.
    pub(crate) pid: u32,
    /// Name of the function.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) function: Option<String>,
    /// Guest memory, bytes.
    pub(crate) memory: u64,
    /// The guest's processor: a named model, or host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cpu: Option<String>,
    /// Start of the command to a running vCPU.
    pub(crate) start_ns: u64,
    /// Running vCPU to an agent that answers.
    pub(crate) boot_ns: u64,
    /// Function sent to function imported.
    pub(crate) load_ns: u64,
}

pub(crate) fn run(arguments: &BootArgs) -> Result<ExitCode, BootCommandError> {
    let begin = Instant::now();
    arguments.host.require_linux(Virtualization::detect())?;
    let function = arguments.function.as_deref().map(Function::from_path).transpose()?;
    let settings =
        function.as_ref().map(|function| function.settings().clone()).unwrap_or_default();
    let root = arguments.files.check(&settings)?;
    let asked = settings.memory_mib.map(|mib| mib.saturating_mul(1 << 20));
    let memory = arguments.memory.or(asked).unwrap_or(DEFAULT_MEMORY);
    let vcpus = arguments.vcpus.or(settings.vcpus).unwrap_or(1);
    if arguments.detach {
        return Ok(detach::detach()?);
    }
    let interruption = Interruption::catch()?;
    if arguments.end_with_input {
        session::end_with_input()?;
    }
    let instance = session::claim(arguments.name.as_deref())?;
    let identity = Identity::fresh()?;
    let console = session::console(arguments.console.as_deref())?;
    let config = BootConfig {
        kernel: OpenFile::open(&arguments.files.kernel)?,
        initramfs: OpenFile::open(&arguments.files.initramfs)?,
        cmdline: arguments.cmdline.clone(),
        vcpus,
        cpu: arguments.cpu,
        memory,
        root: OpenFile::open(&root)?,
        overlay: OpenFile::open(&arguments.files.overlay)?,
        host: session::host(&instance, console.clone(), identity.generation)?,
    };
    let mut microvm = Microvm::boot(config, OpenKvm::open(&arguments.host.kvm)?)?;
    microvm.resume().map_err(BootCommandError::Resume)?;
    let started = Instant::now();
    let limit = Duration::from_secs(arguments.time_limit);
    let cpu = microvm.cpu_model().map(|model| model.to_string());

    session::run(microvm, &instance, &interruption, |_, alive| {
        let mut agent =
            AgentClient::wait_for(&instance.vsock_socket(), limit, || alive.load(Ordering::SeqCst))
                .map_err(|error| BootCommandError::NoAgent {
                    reason: error_chain(&error),
                    console: ConsoleTail::of(&console),
                })?;
        let booted = Instant::now();
        agent.identify(&identity, limit)?;
        let options = LoadOptions {
            time_limit: limit,
            memory_mib: memory >> 20,
            environment: BTreeMap::new(),
        };
        if let Some(function) = &function {
            agent.load(function, &options)?;
        }
        let report = BootReport {
            name: instance.name().to_owned(),
            pid: std::process::id(),
            function: function.as_ref().map(|function| function.name().to_owned()),
            memory,
            cpu,
            start_ns: nanoseconds(started - begin),
            boot_ns: nanoseconds(booted - started),
            load_ns: nanoseconds(booted.elapsed()),
        };
        if arguments.json {
            output::json(&report);
        } else {
            print(&report);
        }
        Ok::<_, BootCommandError>(((), After::Serve))
    })?;
    Ok(ExitCode::SUCCESS)
}

fn print(report: &BootReport) {
    output::line(&format!(
        "{}: {} (start {}, boot {}, load {}); process {}",
        report.name,
        report.function.as_ref().map_or_else(
            || "booted without a function".to_owned(),
            |function| format!("{function} is loaded"),
        ),
        format_milliseconds(report.start_ns),
        format_milliseconds(report.boot_ns),
        format_milliseconds(report.load_ns),
        report.pid,
    ));
    output::line(&format!(
        "ask it with `firn invoke {0} EVENT`, freeze it with `firn freeze {0} DIRECTORY`",
        report.name
    ));
}
