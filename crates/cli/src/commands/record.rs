//! `firn record`: one invocation of a frozen function, with every page that it touches written down
//! as a trace.

use std::io::Write;
use std::num::NonZero;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use firn_base::{error_chain, format_bytes};
use serde::Serialize;
use tempfile::NamedTempFile;

use firn_memory::HostFacts;
use firn_memory::pager::{PageStore, end_process};
use firn_memory::recorders::{Recorder, Recording};
use firn_memory::trace::{GapUnit, Trace, TraceOrigin};
use firn_run::{Interruption, Invocation, Outcome, RecordedRun, Source};
use firn_snapshot::{PageSet, Snapshot};
use firn_vmm::{
    FreePagesError, GuestTimeTotals, Handle, KvmStats, Microvm, fault_attribution, free_pages,
};

use super::invoke;
use crate::event;
use crate::host_args::HostArgs;
use crate::output;
use crate::signature_args::VerifierArgs;

/// Permissions of a trace's file.
const READABLE: u32 = 0o644;

/// Arguments of `firn record`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn record snapshots/hello --invoke @guest/functions/hello/input-a.json --input a --out hello-a.trace
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
    host: HostArgs,
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

/// What the guest did, before it is a trace.
struct Recorded {
    outcome: Outcome,
    kvm: KvmStats,
    recording: Recording,
    time: GuestTimeTotals,
}

pub(crate) fn run(arguments: &RecordArgs) -> anyhow::Result<ExitCode> {
    let limit = Duration::from_secs(arguments.time_limit);
    let invocation = Invocation::new(&event::read(&arguments.invoke)?, limit)?;
    let interruption = Interruption::catch()?;
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
    let free = free(snapshot)?;

    let Recorded { outcome, kvm, recording, time } =
        record(arguments, &source, &invocation, limit, &interruption)?;
    if outcome.error.is_some() {
        output::note("firn: the function failed: no trace is written");
        invoke::print(&outcome);
        return Ok(ExitCode::from(invoke::exit_code(&outcome)));
    }
    let worked = recording.touches.iter().map(|touch| touch.gap).sum();
    let mut trace = Trace::new(
        origin,
        manifest.layout.clone(),
        snapshot.zero_map().clone(),
        recording.touches,
    )?;
    if let Some(free) = free {
        trace = trace.with_free(free)?;
    }
    if let Some(again) = recording.again {
        trace = trace.with_again(again)?;
    }
    let bytes = trace.encode()?;
    publish(file, &bytes, &arguments.out)?;
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
        free_pages: trace.free().map(PageSet::count),
        unknown_leaves: recording.unknown_leaves,
        gaps: trace.origin().gaps,
        worked,
        stays: time.stays,
        halts: time.halts,
        shortest_stay: time.shortest,
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

/// Thaws with a recorder, identifies, invokes, and ends the microVM.
fn record(
    arguments: &RecordArgs,
    source: &Source,
    invocation: &Invocation,
    limit: Duration,
    interruption: &Interruption,
) -> anyhow::Result<Recorded> {
    let run = RecordedRun {
        source,
        kvm: &arguments.host.kvm,
        software_kvm: arguments.host.software_kvm,
        root: arguments.root.as_deref(),
        console: arguments.console.as_deref(),
        invocation,
        limit,
        interruption,
        faults_in_vcpu_threads: true,
    };
    let store = PageStore::of(source.snapshot());
    let (attribution, control) = fault_attribution();
    let layout = &source.snapshot().manifest().layout;
    let observer = Box::new(attribution);
    let (memory, recorder) = match arguments.again {
        Some(period) => Recorder::start_sampled(store, layout, observer, end_process, period),
        None => Recorder::start(store, layout, observer, end_process),
    }?;
    let begin = |microvm: &mut Microvm| {
        control.attach(microvm)?;
        output::note("firn: the guest waits at every page that it touches for the first time");
        Ok::<_, anyhow::Error>(())
    };
    let answered = |first: &Outcome, handle: &Handle, mut agent| {
        if arguments.again.is_some() && first.error.is_none() {
            recorder.start_second()?;
            let second = run.invoke(&mut agent)?;
            if second.error.is_some() {
                bail!("the function failed in its second invocation: no trace is written");
            }
        }
        recorder.stop_recording();
        let stats = handle.call(|microvm| microvm.kvm_stats())?;
        stats.context("cannot read KVM's counters")
    };
    let note = |text: &str| output::note(&format!("firn: {text}"));
    let led = run.run(memory, begin, || recorder.start_request(), answered, note);
    let recording = recorder.finish()?;
    let time = control.finish()?;
    let (outcome, kvm) = led?;
    Ok(Recorded { outcome, kvm, recording, time })
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
    format!("cannot write the trace to {}", path.display())
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
}
