//! `firn thaw`: a microVM from a snapshot.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use clap::Args;

use firn_base::{format_bytes, format_milliseconds};
use firn_memory::planners::parse;
use firn_net::PublishedPort;
use firn_run::{
    Descriptors, HostSpec, InvokeSpec, Listener, Origin, Outcome, ReplaySpec, StartError,
    StartReport, StartSpec, ThawSpec,
};

use crate::clock;
use crate::commands::invoke::{self, FUNCTION_FAILED};
use crate::detach;
use crate::event;
use crate::host_args::MonitorHostArgs;
use crate::net_arg::{Connected, NetArgs, published};
use crate::output;
use crate::snapshot_args::SnapshotArgs;
use crate::supervisor;

/// Arguments of `firn thaw`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn thaw --invoke '{\"name\": \"Ada\"}' snapshots/hello
  firn thaw --name h1 --detach snapshots/hello
  firn thaw --planner firecracker:readahead=off --invoke @event.json --json snapshots/hello
  firn thaw --net proxy --publish 127.0.0.1:8080:80 snapshots/web
  firn thaw --pool pool.sock --planner pass --invoke '{}' hello

With --invoke the microVM answers one request and ends. Without it, the microVM runs until it is stopped.
Any number of microVMs can be thawed from one snapshot at the same time. A snapshot that `firn player` made replays its
trace, checks all its memory and ends; it uses only the options --planner, --input and --json.")]
pub(crate) struct ThawArgs {
    #[command(flatten)]
    snapshot: SnapshotArgs,
    /// Name of the microVM: a-z, 0-9 and -
    #[arg(long)]
    name: Option<String>,
    /// Where guest memory comes from, as NAME[:KEY=VALUE,...]; see `firn plan --planner all`
    /// [default: firecracker, or firn from a pool]
    #[arg(long, value_name = "PLANNER")]
    planner: Option<String>,
    /// A player: print `held` after its last touch, and check all memory once standard input is
    /// closed
    #[arg(long, hide = true)]
    hold: bool,
    /// A player with several traces: the trace to replay [default: its first]
    #[arg(long, value_name = "TRACE", conflicts_with = "invoke")]
    input: Option<String>,
    /// Send this event first: JSON, @FILE, or - for standard input
    #[arg(long, value_name = "EVENT")]
    invoke: Option<String>,
    /// After --invoke, keep the microVM running
    #[arg(long, requires = "invoke")]
    keep: bool,
    /// Time limit in seconds for the guest to wake, and for the function to answer
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    time_limit: u64,
    /// The root file system, where it has moved since the freeze
    #[arg(long, value_name = "FILE")]
    root: Option<PathBuf>,
    #[command(flatten)]
    network: NetArgs,
    /// Copy the guest's serial console to a file
    #[arg(long, value_name = "FILE")]
    console: Option<PathBuf>,
    /// Return once the microVM is awake, and keep it running in the background
    #[arg(long)]
    detach: bool,
    /// After the answer, compare guest memory with the image: every page that was not written since
    #[arg(long, requires_all = ["invoke", "json"])]
    compare: bool,
    /// Print one JSON object: times, counts, memory, and the answer
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    monitor: MonitorHostArgs,
}

pub(crate) fn run(arguments: &ThawArgs) -> anyhow::Result<ExitCode> {
    let request_ns = clock::request();
    let planner = arguments.planner.as_deref();
    let planner = planner.unwrap_or_else(|| arguments.snapshot.default_planner());
    parse(planner)?;
    if arguments.detach {
        return detach::detach();
    }
    let event = arguments.invoke.as_deref().map(event::read).transpose()?;
    let invoke =
        event.map(|event| InvokeSpec { event, keep: arguments.keep, compare: arguments.compare });
    let mut descriptors = Descriptors::default();
    let (source, root) = arguments.snapshot.source(arguments.root.as_deref(), &mut descriptors)?;
    let replay = ReplaySpec {
        input: arguments.input.clone(),
        hold: arguments.hold,
        ..ReplaySpec::default()
    };
    let thaw = ThawSpec {
        source,
        planner: planner.to_owned(),
        preloaded: false,
        root,
        invoke,
        replay,
        record: None,
    };
    let has_disks = thaw.root.is_some();
    let supervisor = supervisor::spawn(&arguments.monitor)?;
    let (name, console) = (arguments.name.as_deref(), arguments.console.as_deref());
    let (_claimed, host) = HostSpec::claim(name, console, has_disks, &mut descriptors)?;
    let Connected { network, ports } = arguments.network.reconnect(has_disks, &mut descriptors)?;
    let software_kvm = arguments.monitor.host.software_kvm;
    let host = HostSpec { software_kvm, network, ..host };
    let limit = Duration::from_secs(arguments.time_limit);
    let spec = StartSpec::new(Origin::Thaw(thaw), host, limit);
    let spec = StartSpec { request_ns: Some(request_ns), ..spec };
    let (json, published) = (arguments.json, ports.ports().to_vec());
    let printer = Arc::new(Printer { json, published, exit_code: AtomicU8::new(0) });
    let listener: Arc<dyn Listener> = printer.clone();
    match supervisor.run(spec, descriptors, &listener) {
        Ok(()) => Ok(ExitCode::from(printer.exit_code.load(Ordering::SeqCst))),
        // The function's own failure, of its after-restore hooks, is an answer.
        Err(StartError::Function(failed)) => {
            invoke::note_logs(&failed.logs);
            output::json(&failed.error);
            invoke::note_limit(&failed.error);
            Ok(ExitCode::from(FUNCTION_FAILED))
        }
        Err(error) => Err(error.into()),
    }
}

/// Prints what a start reports.
struct Printer {
    json: bool,
    published: Vec<PublishedPort>,
    exit_code: AtomicU8,
}

impl Listener for Printer {
    fn answered(&self, outcome: &Outcome) {
        self.exit_code.store(invoke::exit_code(outcome), Ordering::SeqCst);
        if !self.json {
            invoke::print(outcome);
        }
    }

    fn started(&self, report: &StartReport) {
        let report = StartReport { published: self.published.clone(), ..report.clone() };
        if self.json {
            output::json(&report);
        } else {
            print(&report);
        }
    }

    fn held(&self) {
        output::line("held");
        // Standard input that cannot be read is closed.
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
    }

    fn note(&self, text: &str) {
        output::note(&format!("firn: {text}"));
    }
}

/// Prints a report for people.
fn print(report: &StartReport) {
    let parts: Vec<String> = report
        .times
        .parts()
        .into_iter()
        .map(|(name, ns)| format!("{name} {}", format_milliseconds(ns)))
        .collect();
    let (counters, parts) = (&report.counters, parts.join(", "));
    let total = format_milliseconds(report.times.total_ns);
    let memory = format!(
        "{} read, {} private, {} shared, {} of a pool, {} copied ahead",
        format_bytes(counters.read_bytes),
        format_bytes(counters.private_bytes),
        format_bytes(counters.shared_bytes),
        format_bytes(counters.pool_bytes),
        format_bytes(counters.copy_bytes),
    );
    if let Some(replay) = &report.replay {
        let replay_ns = report.times.replay_ns.unwrap_or_default();
        output::line(&format!(
            "{} thawed by {} in {total}: {parts}; {} touches of {} pages, {} ns a page; {} KVM faults, {} exits, {} minor and \
             {} major faults, {memory}, {} of page tables, {} of processors; all memory checked in {}",
            replay.trace,
            report.planner,
            replay.touches,
            replay.pages,
            replay_ns.checked_div(replay.pages).unwrap_or_default(),
            counters.kvm.page_faults,
            counters.kvm.exits,
            counters.minor_faults,
            counters.major_faults,
            format_bytes(counters.page_table_bytes),
            format_milliseconds(counters.cpu_ns),
            format_milliseconds(report.times.verify_ns.unwrap_or_default()),
        ));
        return;
    }
    let summary = format!(
        "{}: thawed by {} in {total}: {parts}; {} guest pages, {} KVM faults, {memory}{}",
        report.name.as_deref().unwrap_or_default(),
        report.planner,
        counters.guest_pages,
        counters.kvm.page_faults,
        published(&report.published),
    );
    // The first line on standard output reports that the microVM is ready. Where there is an
    // answer, that line is the answer.
    if report.outcome.is_some() {
        output::note(&summary);
    } else {
        output::line(&summary);
    }
}
