//! `firn boot`: a function in a microVM, from nothing.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;

use firn_base::{format_milliseconds, parse_size};
use firn_net::PublishedPort;
use firn_run::{
    BootSpec, Descriptors, Function, HostSpec, Listener, OpenedFile, Origin, StartReport, StartSpec,
};
use firn_vmm::CpuModel;

use crate::assets::GuestFiles;
use crate::clock;
use crate::detach;
use crate::net_arg::{Connected, NetArgs, published};
use crate::output;
use crate::supervisor;

/// Guest memory of a function without a setting for it, bytes.
const DEFAULT_MEMORY: u64 = 256 << 20;

/// Arguments of `firn boot`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn boot guest/functions/hello
  firn boot --name empty
  firn boot --name builder --memory 512M --vcpus 2 --detach guest/functions/json
  firn boot --console console.txt my-function.py
  firn boot --net proxy --egress allow:10.0.0.0/8:5432 my-function.py
  firn boot --net proxy --egress deny:tracker.example.com my-function.py
  firn boot --net proxy --publish 8080:80 my-function.py
  firn boot --net tap:tap0,address=10.0.0.2/24,gateway=10.0.0.1,dns=10.0.0.1 my-function.py
  firn boot --image science --memory 512M my-function.py

The microVM runs until it is stopped: by Ctrl-C, `firn freeze`, or its own end.")]
pub(crate) struct BootArgs {
    /// The function: a directory with handler.py, or one Python file; none, and the guest waits for
    /// one
    function: Option<PathBuf>,
    /// Name of the microVM: a-z, 0-9 and -
    #[arg(long)]
    name: Option<String>,
    /// Guest memory, such as 256M or 2G [default: what the function's function.toml sets, or 256M]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    memory: Option<u64>,
    /// Size of the disk that the guest writes to, such as 2G; its file system grows with it
    /// [default: that of the file --overlay, 576M]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    disk: Option<u64>,
    /// Number of vCPUs, 1 to 32 [default: what the function's function.toml sets, or 1]
    #[arg(long, value_name = "N")]
    vcpus: Option<u8>,
    /// The guest's processor: x86-64-v2, x86-64-v3, x86-64-v4, or host for all that this one has
    /// [default: the best of the named]
    #[arg(long, value_name = "MODEL")]
    cpu: Option<CpuModel>,
    /// Seconds that booting, and then loading the function, may take
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    time_limit: u64,
    /// Words to add to the kernel's command line
    #[arg(long, value_name = "WORDS")]
    cmdline: Option<String>,
    #[command(flatten)]
    network: NetArgs,
    /// Copy the guest's serial console to a file
    #[arg(long, value_name = "FILE")]
    console: Option<PathBuf>,
    /// Return once the function is loaded, and let the microVM run in the background
    #[arg(long)]
    detach: bool,
    /// Print one JSON object when the function is loaded
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    files: GuestFiles,
    #[command(flatten)]
    monitor: crate::host_args::MonitorHostArgs,
}

pub(crate) fn run(arguments: &BootArgs) -> anyhow::Result<ExitCode> {
    let request_ns = clock::request();
    let function = arguments.function.as_deref().map(Function::from_path).transpose()?;
    let settings =
        function.as_ref().map(|function| function.settings().clone()).unwrap_or_default();
    let root = arguments.files.check(&settings)?;
    let required = settings.memory_mib.map(|mib| mib.saturating_mul(1 << 20));
    if arguments.detach {
        return detach::detach();
    }
    let mut descriptors = Descriptors::default();
    let mut open = |path: &Path| OpenedFile::open(path, &mut descriptors);
    let boot = BootSpec {
        kernel: open(&arguments.files.kernel)?,
        initramfs: open(&arguments.files.initramfs)?,
        root: open(&root)?,
        overlay: open(&arguments.files.overlay)?,
        disk_size: arguments.disk.unwrap_or(0),
        network: arguments.network.net.device(),
        cmdline: arguments.cmdline.clone(),
        vcpus: arguments.vcpus.or(settings.vcpus).unwrap_or(1),
        cpu: arguments.cpu.map(|model| model.to_string()),
        memory: arguments.memory.or(required).unwrap_or(DEFAULT_MEMORY),
        function,
    };
    let supervisor = supervisor::spawn(&arguments.monitor)?;
    let (name, console) = (arguments.name.as_deref(), arguments.console.as_deref());
    let (_claimed, host) = HostSpec::claim(name, console, true, &mut descriptors)?;
    let Connected { network, ports } = arguments.network.connect(&mut descriptors)?;
    let software_kvm = arguments.monitor.host.software_kvm;
    let host = HostSpec { software_kvm, network, ..host };
    let limit = Duration::from_secs(arguments.time_limit);
    let spec = StartSpec::new(Origin::Boot(Box::new(boot)), host, limit);
    let spec = StartSpec { request_ns: Some(request_ns), ..spec };
    let (json, published) = (arguments.json, ports.ports().to_vec());
    let listener: Arc<dyn Listener> = Arc::new(Printer { json, published });
    supervisor.run(spec, descriptors, &listener)?;
    Ok(ExitCode::SUCCESS)
}

/// Prints what a boot reports.
struct Printer {
    json: bool,
    published: Vec<PublishedPort>,
}

impl Listener for Printer {
    fn started(&self, report: &StartReport) {
        let report = StartReport { published: self.published.clone(), ..report.clone() };
        if self.json {
            output::json(&report);
        } else {
            print(&report);
        }
    }

    fn note(&self, text: &str) {
        output::note(&format!("firn: {text}"));
    }
}

fn print(report: &StartReport) {
    let name = report.name.as_deref().unwrap_or_default();
    let function = match &report.function {
        Some(function) => format!("{function} is loaded"),
        None => "booted without a function".to_owned(),
    };
    let times = &report.times;
    let parts = [
        ("start", Some(times.start_to_resume_ns())),
        ("boot", times.boot_ns),
        ("load", times.function_ns),
    ];
    let parts: Vec<String> = parts
        .into_iter()
        .filter_map(|(part, ns)| Some(format!("{part} {}", format_milliseconds(ns?))))
        .collect();
    let (parts, pid, ports) = (parts.join(", "), report.pid, published(&report.published));
    output::line(&format!("{name}: {function} ({parts}); process {pid}{ports}"));
    output::line(&format!(
        "ask it with `firn invoke {name} EVENT`, freeze it with `firn freeze {name} DIRECTORY`"
    ));
}
