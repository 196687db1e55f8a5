//! From a player's snapshot to its report.

use std::error::Error as StdError;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use firn_base::{nanoseconds, now_ns};
use firn_memory::copy_ahead;
use firn_memory::loader::{LoadError, Loader};
use firn_memory::planners::{self, PlanSnapshotError, Planner};
use firn_memory::{
    ExecuteError, ExecuteReport, GuestMemory, Plan, Sources, StepError, Work, execute,
};
use firn_snapshot::{Grant, Snapshot};
use firn_vmm::{
    Argument, End, FrozenMachine, IncompatibleError, Microvm, RestoreError, RunError, VcpuFailure,
    VcpuThreadError,
};
use thiserror::Error;

use super::freeze::host;
use super::registers::{Meters, Reports, Wrong, window};
use super::report::{PlayerReport, PlayerTimes};
use super::traces_of;

/// Which of the first instruction's arguments says which input is replayed.
pub(super) const INPUT_ARGUMENT: Argument = Argument::Third;
/// Which of them says whether the guest measures how long its touches take.
const TIMED_ARGUMENT: Argument = Argument::Fourth;

/// Why a replay has no report.
#[derive(Debug, Error)]
pub enum ReplayError {
    /// The snapshot is not of a player.
    #[error("the snapshot is not of a player: make one with `firn player`")]
    NotPlayer,
    /// The player has no such input.
    #[error("the snapshot's player does not replay {name}: its traces are {known}")]
    NoInput {
        /// What was asked for.
        name: String,
        /// What there is.
        known: String,
    },
    /// This host cannot run it.
    #[error(transparent)]
    Incompatible(#[from] IncompatibleError),
    /// There is no plan.
    #[error(transparent)]
    Plan(#[from] PlanSnapshotError),
    /// The plan could not be carried out.
    #[error(transparent)]
    Execute(#[from] ExecuteError),
    /// The loader failed.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A step after the resume failed.
    #[error(transparent)]
    Schedule(#[from] StepError),
    /// The microVM could not be made.
    #[error(transparent)]
    Restore(#[from] RestoreError),
    /// Its processor could not be started.
    #[error("starting the guest's processor")]
    Resume(#[source] VcpuThreadError),
    /// Serving it failed.
    #[error(transparent)]
    Run(#[from] RunError),
    /// KVM could not run it any further.
    #[error("the player could not run on")]
    Failure(#[source] VcpuFailure),
    /// It ended before its reports were complete.
    #[error("the player ended before it had reported: its program, lists or page tables are wrong")]
    Ended,
    /// Something could not be measured.
    #[error("measuring the player")]
    Measure(#[source] Box<dyn StdError + Send + Sync>),
    /// The player found memory that is not what it must be.
    #[error("{planner} restored wrong memory: {wrong}")]
    Wrong {
        /// The planner.
        planner: String,
        /// What is wrong.
        wrong: String,
    },
}

/// What had passed when a replay was asked for.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// When this program began, ns of CLOCK_MONOTONIC.
    pub begin_ns: u64,
    /// When the request came in, if that is known, ns of CLOCK_MONOTONIC.
    pub request_ns: Option<u64>,
    /// What opening the snapshot took, ns.
    pub open_ns: u64,
    /// Called when the clock has stopped and everything is counted, before the second pass, which touches memory
    /// that the trace does not.
    pub hold: Option<fn()>,
    /// Whether the guest measures how long its touches take, which takes it some time itself.
    pub faults: bool,
}

/// Thaws the player of a snapshot by a planner, lets it replay a trace and check all its memory, and reports. `input`
/// names the trace, where it has several; the first without. A snapshot in a pool needs a `grant`.
///
/// # Errors
/// See [`ReplayError`]; [`ReplayError::Wrong`] names the guest pages that are not what they must be.
pub fn replay(
    snapshot: &Snapshot,
    grant: Option<&Grant>,
    input: Option<&str>,
    planner: &dyn Planner,
    kvm: &Path,
    clock: Clock,
) -> Result<PlayerReport, ReplayError> {
    let begin = Instant::now();
    let plan = planners::plan(snapshot, grant, planner)?;
    replay_plan(snapshot, grant, input, &plan, kvm, clock, begin.elapsed())
}

/// The same by a plan that is made already.
pub(super) fn replay_plan(
    snapshot: &Snapshot,
    grant: Option<&Grant>,
    input: Option<&str>,
    plan: &Plan,
    kvm: &Path,
    clock: Clock,
    planned: Duration,
) -> Result<PlayerReport, ReplayError> {
    let (number, trace) = input_of(snapshot, input)?;
    let sources = Sources::of(snapshot, grant)?;
    let since = clock.request_ns.unwrap_or(clock.begin_ns);
    // Before everything else: it works beside the rest.
    let loader = Loader::start(plan, &sources, since)?;
    let load = Instant::now();
    let mut frozen = FrozenMachine::open(snapshot, kvm)?;
    frozen.set_argument(INPUT_ARGUMENT, number);
    frozen.set_argument(TIMED_ARGUMENT, clock.faults.into());
    let tsc_khz = frozen.tsc_khz();
    let loaded = Instant::now();
    let executed = execute(plan, &sources)?;
    let mapped = Instant::now();
    let (window, meters, reports) = window();
    let host = host(vec![window]);
    let (mut microvm, restored) = Microvm::restore(frozen, executed.memory, host, None)?;
    meters.get_or_init(|| Meters {
        kvm: microvm.kvm_counters(),
        memory: microvm.shared_memory(),
        hold: clock.hold.map(|hold| held(hold, microvm.shared_memory())),
    });
    microvm.resume().map_err(ReplayError::Resume)?;
    let (resumed, resumed_ns) = (Instant::now(), now_ns());

    let memory = microvm.shared_memory();
    let schedule = executed.after_resume;
    let schedule = std::thread::spawn(move || schedule.run(&memory).map(drop));
    let reports = run(&mut microvm, &reports);
    // The second pass only reads.
    let writes = copy_ahead::observe(&microvm.shared_memory(), plan, snapshot, grant);
    // Where it cannot be told, the pool finds out by itself.
    let written = microvm.written().ok().flatten();
    drop(microvm);
    // A restore whose schedule fails is a failed restore.
    schedule.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    let loader = loader.map(Loader::finish).transpose()?;
    let mut reports = reports?;
    let Some((done_ns, counters)) = reports.done.take() else {
        return Err(ReplayError::Ended);
    };
    check(&reports, &plan.planner)?;
    let counters = counters.map_err(ReplayError::Measure)?;
    let writes = writes.map_err(|error| ReplayError::Measure(Box::new(error)))?;
    let replay_ns = done_ns.saturating_sub(resumed_ns);
    Ok(PlayerReport {
        trace: trace.to_owned(),
        planner: plan.planner.clone(),
        touches: reports.touches,
        pages: reports.pages,
        times: PlayerTimes {
            process_start_ns: clock.request_ns.map(|at| clock.begin_ns.saturating_sub(at)),
            load_ns: clock.open_ns + nanoseconds(loaded - load),
            plan_ns: nanoseconds(planned),
            execute_ns: nanoseconds(mapped - loaded),
            preload_ns: steps_ns(&executed.report, |work| matches!(work, Work::Preload { .. })),
            index_ns: steps_ns(&executed.report, |work| matches!(work, Work::Index { .. })),
            install_ns: steps_ns(&executed.report, |work| matches!(work, Work::Install { .. })),
            resume_ns: nanoseconds(resumed - mapped),
            replay_ns,
            total_ns: done_ns.saturating_sub(since),
            fault_ns: clock.faults.then(|| ticks_ns(reports.waited, tsc_khz)),
            verify_ns: reports.ended_ns.saturating_sub(done_ns),
        },
        packed_regions: executed.report.packed_regions,
        packed_bytes: executed.report.packed_bytes,
        zero_bytes: executed.report.zero_bytes,
        loader,
        replica: None,
        writes,
        written,
        check_ns: None,
        kvm_index: restored.kvm_index,
        pager: counters.pager,
        kvm: counters.kvm,
        chunk_copies: counters.chunk_copies,
        minor_faults: counters.process.minor_faults,
        major_faults: counters.process.major_faults,
        read_bytes: counters.process.read_bytes,
        private_bytes: counters.memory.private,
        shared_bytes: counters.memory.shared,
        pool_bytes: counters.memory.pool,
        copy_bytes: counters.memory.copies,
        page_table_bytes: counters.memory.page_tables,
        monitor_bytes: counters.memory.monitor,
        cpu_ns: counters.cpu_ns,
    })
}

/// What is done when the clock has stopped. The second pass touches all memory: nobody measures any more how a pager serves it.
fn held(hold: fn(), memory: Arc<GuestMemory>) -> Box<dyn Fn() + Send + Sync> {
    Box::new(move || {
        if let Some(pager) = memory.pager() {
            pager.widen();
        }
        hold();
    })
}

/// The number and the name of the input that a replay is of.
pub(super) fn input_of<'a>(
    snapshot: &'a Snapshot,
    input: Option<&str>,
) -> Result<(u64, &'a str), ReplayError> {
    let traces = traces_of(snapshot.manifest()).ok_or(ReplayError::NotPlayer)?;
    let mut numbered = (0..).zip(&traces);
    let found = numbered.find(|(_, name)| input.is_none_or(|input| input == **name));
    found.map(|(number, name)| (number, *name)).ok_or_else(|| ReplayError::NoInput {
        name: input.unwrap_or_default().to_owned(),
        known: traces.join(", "),
    })
}

/// The time of the steps before the resume that do such work.
fn steps_ns(report: &ExecuteReport, is: impl Fn(&Work) -> bool) -> u64 {
    report.steps.iter().filter(|step| is(&step.step.work)).map(|step| step.ns).sum()
}

/// Serves a player until it ends itself, by a triple fault, as it does when it has reported everything.
pub(super) fn run(
    microvm: &mut Microvm,
    reports: &Receiver<Reports>,
) -> Result<Reports, ReplayError> {
    match microvm.run()? {
        End::TripleFault => reports.try_recv().map_err(|_| ReplayError::Ended),
        End::Failure(failure) => Err(ReplayError::Failure(failure)),
        End::Shutdown | End::Reset | End::Stopped => Err(ReplayError::Ended),
    }
}

/// Whether a player that has ended found everything right in the memory that `planner` restored.
pub(super) fn check(reports: &Reports, planner: &str) -> Result<(), ReplayError> {
    if !reports.wrong_own && reports.wrong_in_loop.count == 0 && reports.wrong_in_pass.count == 0 {
        return Ok(());
    }
    Err(ReplayError::Wrong { planner: planner.to_owned(), wrong: describe(reports) })
}

fn describe(reports: &Reports) -> String {
    let list = |what: &str, wrong: &Wrong| {
        let pages: Vec<String> = wrong.pages.iter().map(|page| format!("{page:#x}")).collect();
        let more = if wrong.count > wrong.pages.len() as u64 { " and more" } else { "" };
        format!("{what} {} ({}{more})", wrong.count, pages.join(", "))
    };
    if reports.wrong_own {
        return "the player's own lists, program or page tables, above the trace's memory"
            .to_owned();
    }
    let lists = [
        ("guest pages in the timed loop:", &reports.wrong_in_loop),
        ("guest pages in the second pass:", &reports.wrong_in_pass),
    ];
    let lists = lists.into_iter().filter(|(_, wrong)| wrong.count > 0);
    lists.map(|(what, wrong)| list(what, wrong)).collect::<Vec<_>>().join("; ")
}

/// Ticks of a time-stamp counter in ns.
fn ticks_ns(ticks: u64, khz: u32) -> u64 {
    let ns = u128::from(ticks) * 1_000_000 / u128::from(khz.max(1));
    u64::try_from(ns).unwrap_or(u64::MAX)
}
