//! `firn record`: one invocation of a frozen function, with every page that it touches written down
//! as a trace.

use std::io::Write;
use std::num::NonZero;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use firn_base::{error_chain, format_bytes};
use parking_lot::Mutex;
use serde::Serialize;
use tempfile::NamedTempFile;

use firn_memory::HostFacts;
use firn_memory::trace::{GapUnit, TraceOrigin};
use firn_run::{
    Descriptors, Holder, HostSpec, InvokeSpec, Listener, OpenedFile, Origin, Outcome, Recorded,
    RecordingFile, ReplaySpec, Source, SourceSpec, StartReport, StartSpec, ThawSpec, Touched,
};
use firn_snapshot::{PageSet, Snapshot, Verifier};
use firn_vmm::{FreePagesError, KvmStats, free_pages};

use super::invoke;
use crate::event;
use crate::host_args::MonitorHostArgs;
use crate::output;
use crate::signature_args::VerifierArgs;
use crate::supervisor;

/// Permissions of a trace's file.
const READABLE: u32 = 0o644;

/// Arguments of `firn record`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn record snapshots/hello --invoke @guest/functions/hello/input-a.json --input a --out hello-a.trace
  firn record snapshots/hello --invoke @input-a.json --input a --out a.trace --holders a.json
  firn record snapshots/hello --invoke @input-a.json --input a --again 300000 --out hello-a2.trace
  firn lab run --icount --in snapshots --out traces -- \\
      firn record /in/snapshots/hello --invoke '{\"name\": \"Ada\"}' --input a --out /out/hello-a.trace

Every page costs an exit from the guest and a message: a recording is far slower than a thaw. Between touches
it counts what the guest works: in `firn lab run --icount` instructions, elsewhere nanoseconds in guest mode. It
needs root, tracefs, and a function that was frozen on one vCPU; --again needs Linux 6.8.")]
pub(crate) struct RecordArgs {
    /// Directory of the snapshot
    snapshot: PathBuf,
    #[command(flatten)]
    signed: VerifierArgs,
    /// The event: JSON, @FILE, or - for standard input
    #[arg(long, value_name = "EVENT")]
    invoke: String,
    /// Name of the event in the trace, such as `a`
    #[arg(long, value_name = "NAME")]
    input: String,
    /// Also record accesses that are no first touches, and a second invocation in the same microVM:
    /// at most one access of each page in so much of the guest's work (instructions, or ns)
    #[arg(long, value_name = "PERIOD")]
    again: Option<NonZero<u64>>,
    /// Also ask the guest at the end what holds each page that was touched (kernel, page cache,
    /// programs, by name), print the counts and write all pages as JSON to this file
    #[arg(long, value_name = "FILE")]
    holders: Option<PathBuf>,
    /// The trace's file; one that exists is replaced
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// The command that the trace names as its source, where that is another one
    #[arg(long, value_name = "COMMAND")]
    command: Option<String>,
    /// Seconds that the guest may take to wake, and the function to answer
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    time_limit: u64,
    /// The root file system, where it has moved since the freeze
    #[arg(long, value_name = "FILE")]
    root: Option<PathBuf>,
    /// Copy the guest's serial console to a file
    #[arg(long, value_name = "FILE")]
    console: Option<PathBuf>,
    /// Print one JSON object: counts and the answer
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    monitor: MonitorHostArgs,
}

/// What was recorded.
#[derive(Debug, Serialize)]
struct Report {
    function: String,
    input: String,
    out: PathBuf,
    /// Length of the trace's file, bytes.
    bytes: usize,
    /// First touches and later writes.
    touches: usize,
    /// Guest pages that were touched.
    pages: u64,
    /// Guest pages that were written.
    written_pages: u64,
    /// Accesses that were recorded again, with --again.
    again: Option<AgainReport>,
    /// What held the touched pages, with --holders.
    holders: Option<Vec<Holder>>,
    /// Guest pages that the allocator held free at the freeze, where its kernel describes them.
    free_pages: Option<u64>,
    /// Touches through a leaf that could not be found out; the trace has 4 KiB for them.
    unknown_leaves: u64,
    /// What gaps count.
    gaps: GapUnit,
    /// The sum of all gaps.
    worked: u64,
    /// Stays of the vCPU in guest mode.
    stays: u64,
    /// Stays that ended in a halt, and count nothing.
    halts: u64,
    /// The shortest stay, which was subtracted from each as what entering and leaving costs.
    shortest_stay: u64,
    /// What KVM counted.
    kvm: KvmStats,
    outcome: Outcome,
}

/// What `--again` recorded.
#[derive(Debug, Serialize)]
struct AgainReport {
    /// Accesses before the request.
    request: usize,
    /// Repeats of the first invocation.
    repeats: usize,
    /// Accesses of the second invocation.
    second: usize,
}

pub(crate) fn run(arguments: &RecordArgs) -> anyhow::Result<ExitCode> {
    let event = event::read(&arguments.invoke)?;
    let verifier = arguments.signed.verifier()?;
    let source = Source::open_signed(&arguments.snapshot, verifier.as_ref())?;
    let snapshot = source.snapshot();
    let manifest = snapshot.manifest();
    if manifest.description.vcpus != 1 {
        bail!(
            "the snapshot has {} vCPUs, and touches are ordered on one vCPU only: freeze the function with --vcpus 1",
            manifest.description.vcpus
        );
    }
    let function = manifest
        .description
        .function
        .as_ref()
        .context("the snapshot holds no function: freeze one with `firn freeze`")?;
    let origin = origin(arguments, &function.name)?;
    // What cannot be written is found out before minutes of recording.
    let file = aside(&arguments.out)?;
    let holders = arguments.holders.as_deref();
    let holders = holders.map(|path| aside(path).map(|file| (path, file))).transpose()?;
    let free = free(snapshot)?;

    let (recording, outcome, kvm) = record(arguments, event, verifier)?;
    if outcome.error.is_some() {
        output::note("firn: the function failed: no trace is written");
        invoke::print(&outcome);
        return Ok(ExitCode::from(invoke::exit_code(&outcome)));
    }
    let (mut trace, totals) =
        recording.trace(origin, manifest.layout.clone(), snapshot.zero_map().clone())?;
    let worked = trace.work();
    if let Some(free) = free {
        trace = trace.with_free(free)?;
    }
    let bytes = trace.encode()?;
    publish(file, &bytes, &arguments.out)?;
    let described = totals.pages.as_ref();
    let touched = described.map(|pages| Touched::of(&trace, &totals.instructions, pages));
    let touched = touched.transpose()?;
    if let Some((path, file)) = holders {
        let touched =
            touched.as_ref().context("the trace is recorded, but not what held the pages")?;
        publish(file, &serde_json::to_vec(touched)?, path)?;
    }
    let report = Report {
        function: function.name.clone(),
        input: arguments.input.clone(),
        out: arguments.out.clone(),
        bytes: bytes.len(),
        touches: trace.touches().len(),
        pages: trace.touched_pages(),
        written_pages: trace.written_pages(),
        again: trace.again().map(|again| AgainReport {
            request: again.request,
            repeats: again.repeats.len(),
            second: again.second.len(),
        }),
        holders: touched.map(|touched| touched.holders),
        free_pages: trace.free().map(PageSet::count),
        unknown_leaves: totals.unknown_leaves,
        gaps: trace.origin().gaps,
        worked,
        stays: totals.time.stays,
        halts: totals.time.halts,
        shortest_stay: totals.time.shortest,
        kvm,
        outcome,
    };
    if arguments.json {
        output::json(&report);
    } else {
        print(&report);
    }
    Ok(ExitCode::SUCCESS)
}

/// The pages that the guest held free at the freeze. A guest whose kernel does not describe itself
/// is recorded without.
fn free(snapshot: &Snapshot) -> anyhow::Result<Option<PageSet>> {
    match free_pages(snapshot) {
        Ok(runs) => Ok(Some(PageSet::of(&runs, snapshot.manifest().layout.pages()))),
        Err(error @ (FreePagesError::NoDescription | FreePagesError::Unknown(_))) => {
            output::note(&format!(
                "firn: the trace is without free pages: {}",
                error_chain(&error)
            ));
            Ok(None)
        }
        Err(error) => Err(error).context("cannot find the pages that the guest held free"),
    }
}

/// Thaws, identifies and invokes under a recorder, and ends the microVM.
fn record(
    arguments: &RecordArgs,
    event: String,
    verifier: Option<Verifier>,
) -> anyhow::Result<(RecordingFile, Outcome, KvmStats)> {
    let mut descriptors = Descriptors::default();
    let root = arguments.root.as_deref();
    let moved = root.map(|path| OpenedFile::open(path, &mut descriptors)).transpose()?;
    let path = &arguments.snapshot;
    let (source, root) = match moved {
        Some(root) => (SourceSpec::directory(path, &mut descriptors)?, Some(root)),
        None => SourceSpec::directory_with_root(path, verifier.as_ref(), &mut descriptors)?,
    };
    let source = match verifier {
        Some(verifier) => source.signed(verifier),
        None => source,
    };
    let what = Recorded::Trace { again: arguments.again, holders: arguments.holders.is_some() };
    let (file, record) = RecordingFile::create(what, &mut descriptors)?;
    let thaw = ThawSpec {
        source,
        // The contents of memory come from no plan.
        planner: "firecracker".to_owned(),
        preloaded: false,
        root,
        invoke: Some(InvokeSpec { event, keep: false, compare: false }),
        replay: ReplaySpec::default(),
        record: Some(record),
    };
    let supervisor = supervisor::spawn(&arguments.monitor)?;
    let console = arguments.console.as_deref();
    let (_claimed, host) = HostSpec::claim(None, console, true, &mut descriptors)?;
    let software_kvm = arguments.monitor.host.software_kvm;
    let limit = Duration::from_secs(arguments.time_limit);
    let host = HostSpec { software_kvm, ..host };
    let spec = StartSpec::new(Origin::Thaw(thaw), host, limit);
    let answers = Arc::new(Answers::default());
    let listener: Arc<dyn Listener> = answers.clone();
    output::note("firn: the guest waits at every page that it touches for the first time");
    supervisor.run(spec, descriptors, &listener)?;
    let mut outcomes = std::mem::take(&mut *answers.outcomes.lock()).into_iter();
    let outcome = outcomes.next().context("the function gave no answer")?;
    if outcomes.next().is_some_and(|second| second.error.is_some()) {
        bail!("the function failed in its second invocation: no trace is written");
    }
    let kvm = answers.kvm.lock().take().unwrap_or_default();
    Ok((file, outcome, kvm))
}

/// What a recorded guest answers.
#[derive(Default)]
struct Answers {
    outcomes: Mutex<Vec<Outcome>>,
    kvm: Mutex<Option<KvmStats>>,
}

impl Listener for Answers {
    fn answered(&self, outcome: &Outcome) {
        self.outcomes.lock().push(outcome.clone());
    }

    fn started(&self, report: &StartReport) {
        *self.kvm.lock() = Some(report.counters.kvm);
    }

    fn note(&self, text: &str) {
        output::note(&format!("firn: {text}"));
    }
}

/// Where the trace comes from. No path of this machine is part of it.
fn origin(arguments: &RecordArgs, function: &str) -> anyhow::Result<TraceOrigin> {
    let command = arguments.command.clone().unwrap_or_else(|| {
        let input = &arguments.input;
        format!("firn record {function} --invoke @input-{input}.json --input {input}")
    });
    let facts = HostFacts::read()?;
    let (place, gaps) = if firn_lab::counts_instructions() {
        ("the lab, instructions counted", GapUnit::Instructions)
    } else if firn_lab::is_here() {
        ("the lab", GapUnit::Nanoseconds)
    } else {
        ("a host with hardware KVM", GapUnit::Nanoseconds)
    };
    Ok(TraceOrigin {
        function: function.to_owned(),
        input: arguments.input.clone(),
        command,
        host: format!("{place}; Linux {}", facts.kernel),
        gaps,
    })
}

/// Makes a file beside its place; dropped, it is removed.
fn aside(path: &Path) -> anyhow::Result<NamedTempFile> {
    let folder =
        path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    NamedTempFile::new_in(folder).with_context(|| unwritten(path))
}

/// Puts the file into its place, whole.
fn publish(mut file: NamedTempFile, bytes: &[u8], path: &Path) -> anyhow::Result<()> {
    let put = || -> std::io::Result<()> {
        file.write_all(bytes)?;
        file.as_file().set_permissions(std::fs::Permissions::from_mode(READABLE))?;
        file.as_file().sync_all()?;
        file.persist(path).map_err(|error| error.error)?;
        Ok(())
    };
    put().with_context(|| unwritten(path))
}

fn unwritten(path: &Path) -> String {
    format!("cannot write the recording to {}", path.display())
}

fn print(report: &Report) {
    invoke::print(&report.outcome);
    let unit = match report.gaps {
        GapUnit::Instructions => "instructions",
        GapUnit::Nanoseconds => "ns in guest mode",
    };
    let again = report.again.as_ref().map_or_else(String::new, |again| {
        format!("; {} repeats; {} accesses of a second invocation", again.repeats, again.second)
    });
    output::note(&format!(
        "{}: input {}: {} touches of {} pages, {} written{again}; {} leaves unknown; {} {unit}; trace of {} in {}",
        report.function,
        report.input,
        report.touches,
        report.pages,
        report.written_pages,
        report.unknown_leaves,
        report.worked,
        format_bytes(report.bytes as u64),
        report.out.display(),
    ));
    for holder in report.holders.iter().flatten() {
        output::note(&output::plain(&format!(
            "{:>6} pages, {:>5} written, in {:>3} chunks, {:>3} of them alone: {}",
            holder.pages, holder.written_pages, holder.chunks, holder.own_chunks, holder.name
        )));
    }
}
