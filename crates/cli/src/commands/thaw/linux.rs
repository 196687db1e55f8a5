//! A thaw of a guest with Linux, and, with `--invoke`, its first answer.

use std::error::Error as StdError;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use firn_base::{format_bytes, format_milliseconds, nanoseconds, now_ns};
use serde::Serialize;

use firn_bench::player::ReplicaCost;
use firn_memory::compare::{CompareReport, Original};
use firn_memory::copy_ahead::{self, WriteReport};
use firn_memory::loader::{Loader, LoaderReport};
use firn_memory::pager::{Pager, PagerReport};
use firn_memory::planners::{self, Planner};
use firn_memory::{ChunkCopies, ExecuteReport, ProcessCounters, Sources, execute};
use firn_run::{AgentClient, Identity, Invocation};
use firn_snapshot::{Grant, PageSet, Snapshot};
use firn_vmm::{
    FrozenMachine, Handle, KvmStats, Microvm, RestoreError, RestoreReport, Virtualization,
    open_root_disk,
};

use super::beside::Beside;
use super::{Begun, ThawArgs, ThawCommandError};
use crate::commands::invoke::Outcome;
use crate::event;
use crate::output;
use crate::session::{self, After, Interruption};
use crate::snapshot_args::OpenedSnapshot;

/// Times of a thaw, in ns, in the order in which they pass.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Times {
    /// Request to the first line of this program, or, where it stood by, to the order being read; where the caller said when the
    /// request came in (`FIRN_REQUEST_NS`, or the order).
    pub(crate) process_start_ns: Option<u64>,
    /// Reading the snapshot's header, machine state and zero map, and checking that this host is fit.
    pub(crate) load_ns: u64,
    /// Making the plan.
    pub(crate) plan_ns: u64,
    /// Carrying it out: mapping guest memory.
    pub(crate) execute_ns: u64,
    /// Making the VM and restoring its state, to running vCPUs.
    pub(crate) resume_ns: u64,
    /// Running vCPUs to a guest with an identity of its own.
    pub(crate) identify_ns: u64,
    /// Event sent to answer received.
    pub(crate) invoke_ns: Option<u64>,
    /// Everything: request (or program start) to answer (or identity).
    pub(crate) total_ns: u64,
}

/// What a thaw took and cost.
#[derive(Debug, Serialize)]
pub(crate) struct ThawReport {
    name: String,
    pid: u32,
    snapshot: PathBuf,
    planner: String,
    times: Times,
    /// Checking the bytes of a snapshot in a pool, where this start had to, ns; a part of `load_ns`.
    check_ns: Option<u64>,
    /// What having a replica took, where the planner runs on one; a part of `load_ns`.
    replica: Option<ReplicaCost>,
    execute: ExecuteReport,
    /// What the loader did, where the plan has one: nobody waits for it before a microVM that serves is ready, so it may be at work
    /// then.
    #[serde(skip_serializing_if = "Option::is_none")]
    loader: Option<LoaderReport>,
    restore: RestoreReport,
    /// What the pager did, where one serves guest memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pager: Option<PagerReport>,
    kvm: KvmStats,
    /// What writing to sealed memory took, on media without private mappings.
    chunk_copies: ChunkCopies,
    /// Guest pages that KVM maps: touched, or mapped with a touched one in a larger leaf.
    guest_pages: u64,
    /// Bytes that this process caused to be read from storage.
    read_bytes: u64,
    /// Guest memory in DRAM that belongs to this microVM alone, bytes.
    private_bytes: u64,
    /// Guest memory in DRAM that others can share (page cache), bytes.
    shared_bytes: u64,
    /// Guest memory that is the pool's, a replica included, bytes: no DRAM of the microVM's.
    pool_bytes: u64,
    /// Copies of chunks of the pool's extent that were made ahead for this microVM, bytes: DRAM that belongs to it alone.
    copy_bytes: u64,
    /// What was expected to be written and what was, where the planner runs on copies.
    #[serde(skip_serializing_if = "Option::is_none")]
    writes: Option<WriteReport>,
    /// How guest memory differed from the image after the answer, where that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    compared: Option<CompareReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    outcome: Option<Outcome>,
}

/// Thaws a guest that runs Linux. `opening` is what [`Snapshot::open`] took.
pub(super) fn run(
    arguments: &ThawArgs,
    begun: Begun,
    planner: &dyn Planner,
    opened: &mut OpenedSnapshot,
    opening: Duration,
) -> Result<ExitCode, ThawCommandError> {
    let (snapshot, grant) = (opened.snapshot(), opened.grant());
    arguments.host.require_linux(Virtualization::detect())?;
    let limit = Duration::from_secs(arguments.time_limit);
    let invocation = match &arguments.invoke {
        Some(argument) => Some(Invocation::new(&event::read(argument)?, limit)?),
        None => None,
    };
    let interruption = Interruption::catch()?;
    let since = begun.request.unwrap_or(begun.at);

    let planning = Instant::now();
    let plan = planners::plan(snapshot, grant, planner)?;
    let planned = Instant::now();
    let sources = Sources::of(snapshot, grant)?;
    // Before anything is done with KVM: it works beside the rest.
    let loader = Loader::start(&plan, &sources, since)?;
    let frozen = match begun.kvm {
        Some(kvm) => FrozenMachine::open_on(snapshot, kvm)?,
        None => FrozenMachine::open(snapshot, &arguments.host.kvm)?,
    };
    let loaded = Instant::now();
    let mut executed = execute(&plan, &sources)?;
    if arguments.compare {
        executed.memory.track_writes();
    }
    let mapped = Instant::now();

    let instance = session::claim(arguments.name.as_deref())?;
    let identity = Identity::fresh()?;
    let console = session::console(arguments.console.as_deref())?;
    let host = session::host(&instance, console, identity.generation)?;
    let root = open_root_disk(snapshot, arguments.root.as_deref()).map_err(RestoreError::from)?;
    let (mut microvm, restore) = Microvm::restore(frozen, executed.memory, host, root)?;
    microvm.resume().map_err(ThawCommandError::Resume)?;
    let resumed = Instant::now();

    let guest_memory = microvm.shared_memory();
    let mut written = None;
    let lead = |handle: &Handle, alive: &AtomicBool| {
        let mut beside = Beside::start(executed.after_resume, guest_memory.clone(), loader);
        let mut agent = AgentClient::wait_for(&instance.vsock_socket(), limit, || {
            alive.load(Ordering::SeqCst)
        })?;
        agent.identify(&identity, limit)?;
        let identified = Instant::now();
        let outcome = match &invocation {
            Some(invocation) => Some(Outcome::of(agent.invoke(invocation))?),
            None => None,
        };
        let answered = Instant::now();
        let times = Times {
            process_start_ns: begun.request.map(|request| begun.at.saturating_sub(request)),
            load_ns: nanoseconds(opening + (loaded - planned)),
            plan_ns: nanoseconds(planned - planning),
            execute_ns: nanoseconds(mapped - loaded),
            resume_ns: nanoseconds(resumed - mapped),
            identify_ns: nanoseconds(identified - resumed),
            invoke_ns: outcome.as_ref().map(|_| nanoseconds(answered - identified)),
            total_ns: now_ns().saturating_sub(since),
        };
        if !arguments.json
            && let Some(outcome) = &outcome
        {
            outcome.print();
        }
        let (kvm, chunk_copies, usage, pager) = handle
            .call(|microvm| {
                let kvm = microvm.kvm_stats().map_err(measured)?;
                let usage = microvm.memory_usage().map_err(measured)?;
                let pager = microvm.memory().pager().map(Pager::report);
                Ok((kvm, microvm.chunk_copies(), usage, pager))
            })?
            .map_err(ThawCommandError::Measure)?;
        let counters =
            ProcessCounters::read().map_err(|error| ThawCommandError::Measure(Box::new(error)))?;
        let writes = copy_ahead::observe(&guest_memory, &plan, snapshot, grant)
            .map_err(|error| ThawCommandError::Measure(Box::new(error)))?;
        let compared = if arguments.compare { Some(compared(handle, snapshot)?) } else { None };
        let serves = invocation.is_none() || arguments.keep;
        // Nobody is served any more: the rest of the report is waited for.
        if !serves {
            beside.finish()?;
        }
        let report = ThawReport {
            name: instance.name().to_owned(),
            pid: std::process::id(),
            snapshot: snapshot.path().to_owned(),
            planner: plan.planner.clone(),
            times,
            check_ns: opened.check_ns(),
            replica: opened.replica().map(ReplicaCost::of),
            execute: executed.report,
            loader: beside.loaded(),
            restore,
            pager,
            kvm,
            chunk_copies,
            guest_pages: kvm.mapped_pages(),
            read_bytes: counters.read_bytes,
            private_bytes: usage.private,
            shared_bytes: usage.shared,
            pool_bytes: usage.pool,
            copy_bytes: usage.copies,
            writes,
            compared,
            outcome,
        };
        if arguments.json {
            output::json(&report);
        } else {
            print(&report);
        }
        // Others may have left the loading to this process, which does not end before it is done.
        beside.finish()?;
        let after = if serves { After::Serve } else { After::Stop };
        Ok::<_, ThawCommandError>(((report.outcome, report.writes), after))
    };
    let (outcome, writes) =
        session::run_until(microvm, &instance, &interruption, lead, |microvm| {
            // Where it cannot be told, the pool finds out by itself.
            written = microvm.written().ok().flatten();
        })?;
    opened.wrote(writes.as_ref());
    opened.give_back(written.as_ref());
    Ok(outcome.map_or(ExitCode::SUCCESS, |outcome| outcome.exit_code()))
}

/// Pauses the guest for good, and compares its memory with the image.
fn compared(handle: &Handle, snapshot: &Snapshot) -> Result<CompareReport, ThawCommandError> {
    let failed = |error| ThawCommandError::Compare(error);
    let original = Original::of(snapshot);
    // On the microVM's own thread: meanwhile no device writes.
    let compared = handle.call(move |microvm| {
        let written = microvm.written().map_err(measured)?.unwrap_or_else(|| PageSet::new(0));
        original.compare(microvm.memory(), &written).map_err(measured)
    })?;
    compared.map_err(failed)
}

fn measured(error: impl StdError + Send + Sync + 'static) -> Box<dyn StdError + Send + Sync> {
    Box::new(error)
}

/// Prints what people want to know of a report, but for the answer.
fn print(report: &ThawReport) {
    let times = &report.times;
    let parts = [
        ("process start", times.process_start_ns),
        ("load", Some(times.load_ns)),
        ("plan", Some(times.plan_ns)),
        ("execute", Some(times.execute_ns)),
        ("resume", Some(times.resume_ns)),
        ("identify", Some(times.identify_ns)),
        ("invoke", times.invoke_ns),
    ];
    let parts: Vec<String> = parts
        .iter()
        .filter_map(|(name, ns)| ns.map(|ns| format!("{name} {}", format_milliseconds(ns))))
        .collect();
    let summary = format!(
        "{}: thawed by {} in {}: {}; {} guest pages, {} KVM faults, {} read, {} private, {} shared, {} of a pool, {} copied ahead",
        report.name,
        report.planner,
        format_milliseconds(times.total_ns),
        parts.join(", "),
        report.guest_pages,
        report.kvm.page_faults,
        format_bytes(report.read_bytes),
        format_bytes(report.private_bytes),
        format_bytes(report.shared_bytes),
        format_bytes(report.pool_bytes),
        format_bytes(report.copy_bytes),
    );
    // The first line on standard output says that the microVM is ready; an answer is one.
    if report.outcome.is_some() {
        output::note(&summary);
    } else {
        output::line(&summary);
    }
}
