//! From a player's snapshot to its report.

use std::sync::mpsc::Receiver;
use std::sync::{Arc, OnceLock};

use firn_memory::GuestMemory;
use firn_memory::planners::Planner;
use firn_player::format::{mode, register};
use firn_snapshot::Snapshot;
use firn_vmm::{Argument, End, HostConfig, Microvm};

use super::registers::{Meters, Reports, Wrong, window};
use super::{host, traces_of};
use crate::descriptors::Descriptors;
use crate::error::StartError;
use crate::guest::{Ended, GuestKind, Listener};
use crate::life::{Clock, KvmDevice, Mapped, Running};
use crate::report::{Replay, StartReport};
use crate::source::Source;
use crate::spec::ReplaySpec;
use crate::start::{Order, live};

/// The argument of the first instruction that selects the input.
const INPUT_ARGUMENT: Argument = Argument::Third;
/// The argument with the bits of [`mode`].
const MODE_ARGUMENT: Argument = Argument::Fourth;

/// A player that is thawed.
pub(crate) struct Player {
    input: u64,
    pub(super) trace: String,
    fault_time: bool,
    warm: bool,
    unchecked: bool,
    hold: bool,
    tsc_khz: u32,
    window: Option<(Arc<OnceLock<Meters>>, Receiver<Reports>)>,
}

impl Player {
    pub(crate) fn new(source: &Source, spec: &ReplaySpec) -> Result<Self, StartError> {
        let traces = traces_of(source.snapshot().manifest()).ok_or(StartError::NotPlayer)?;
        let input = spec.input.as_deref();
        let mut numbered = (0..).zip(&traces);
        let found = numbered.find(|(_, name)| input.is_none_or(|input| input == **name));
        let (input, trace) = found.ok_or_else(|| StartError::NoInput {
            name: input.unwrap_or_default().to_owned(),
            known: traces.join(", "),
        })?;
        Ok(Self {
            input,
            trace: (*trace).to_owned(),
            fault_time: spec.fault_time,
            warm: spec.warm,
            unchecked: spec.unchecked,
            hold: spec.hold,
            tsc_khz: 0,
            window: None,
        })
    }

    /// Connects the registers with the microVM. `hold` is called when the last invocation has ended
    /// and all is counted, the use of memory excepted where there is one invocation, before the
    /// second pass, which touches memory that the trace does not.
    pub(super) fn connect(&mut self, microvm: &Microvm, hold: Option<Box<dyn Fn() + Send + Sync>>) {
        if let Some((meters, _)) = &self.window {
            meters.get_or_init(|| Meters {
                kvm: microvm.kvm_counters(),
                memory: microvm.shared_memory(),
                hold,
                hold_at: if self.warm { register::WARM } else { register::DONE },
            });
        }
    }

    /// Serves the player until it ends itself, by a triple fault, as it does when it has reported
    /// everything.
    pub(super) fn run(&self, microvm: &mut Microvm) -> Result<Reports, StartError> {
        match microvm.run()? {
            End::TripleFault => {
                let reports = self.window.as_ref().and_then(|(_, reports)| reports.try_recv().ok());
                reports.ok_or(StartError::Ended)
            }
            End::Failure(failure) => Err(failure.into()),
            End::Shutdown | End::Reset | End::Stopped => Err(StartError::Ended),
        }
    }
}

impl GuestKind for Player {
    fn host(
        &mut self,
        _snapshot: &Snapshot,
        _descriptors: &mut Descriptors,
    ) -> Result<HostConfig, StartError> {
        let (window, meters, reports) = window();
        self.window = Some((meters, reports));
        Ok(host(vec![window]))
    }

    fn prepare(&mut self, mapped: &mut Mapped<'_>) {
        let machine = mapped.machine_mut();
        machine.set_argument(INPUT_ARGUMENT, self.input);
        let bit = |set: bool, bit: u64| if set { bit } else { 0 };
        let modes = bit(self.fault_time, mode::TIMED)
            | bit(self.warm, mode::TWICE)
            | bit(self.unchecked, mode::UNCHECKED);
        self.tsc_khz = machine.tsc_khz();
        machine.set_argument(MODE_ARGUMENT, modes | u64::from(self.tsc_khz) << mode::KHZ_SHIFT);
    }

    fn restored(&mut self, microvm: &Microvm, listener: &Arc<dyn Listener>) {
        let hold = self.hold.then(|| held(listener.clone(), microvm.shared_memory()));
        self.connect(microvm, hold);
    }

    fn follow(
        self,
        running: Running<'_>,
        _listener: &Arc<dyn Listener>,
    ) -> Result<Ended, StartError> {
        let Running { mut microvm, mut run } = running;
        let reports = self.run(&mut microvm);
        let writes = run.writes();
        drop(microvm);
        run.background.finish()?;
        if let Some(failure) = run.background.loader_failure() {
            return Err(StartError::Load(firn_base::ErrorChain::new(failure)));
        }
        let mut reports = reports?;
        let (done_ns, counters) = reports.done.take().ok_or(StartError::Ended)?;
        check(&reports, &run.report.planner)?;
        let counters = counters.map_err(StartError::Measure)?;
        let writes = writes?;
        run.ends_at(done_ns);
        let resumed_ns = run.resumed_ns();
        let mut report = run.report;
        let times = &mut report.times;
        times.replay_ns = Some(done_ns.saturating_sub(resumed_ns));
        times.fault_ns = self.fault_time.then(|| ticks_ns(reports.waited, self.tsc_khz));
        let ns = |ticks| ticks_ns(ticks, self.tsc_khz);
        times.connect_ns = (reports.connected != 0).then(|| ns(reports.connected));
        times.warm_ns = reports.warm.map(ns);
        let warm_ns = times.warm_ns.unwrap_or_default();
        times.verify_ns = Some(reports.ended_ns.saturating_sub(done_ns + warm_ns));
        report.loader = run.background.loaded();
        report.counters = counters;
        report.writes.clone_from(&writes);
        let Reports { touches, pages, repeated, read_only_loads, .. } = reports;
        let trace = self.trace;
        let touch_times = if self.fault_time { reports.touch_times.to_vec() } else { Vec::new() };
        report.replay =
            Some(Replay { trace, touches, pages, repeated, read_only_loads, touch_times });
        Ok(Ended { report: Some(Box::new(report)), writes })
    }
}

/// The second pass touches all memory: from then on it does not matter how a pager serves it.
fn held(listener: Arc<dyn Listener>, memory: Arc<GuestMemory>) -> Box<dyn Fn() + Send + Sync> {
    Box::new(move || {
        if let Some(pager) = memory.pager() {
            pager.widen();
        }
        listener.held();
    })
}

/// Thaws the player of a source by a planner, lets it replay a trace and check all its memory, and
/// returns its report. The source keeps what a pool granted.
///
/// # Errors
/// See [`StartError`]; [`StartError::Wrong`] names the guest pages with wrong contents.
pub fn replay(
    source: &Source,
    spec: &ReplaySpec,
    planner: &dyn Planner,
    kvm: KvmDevice,
    clock: &Clock,
) -> Result<StartReport, StartError> {
    let player = Player::new(source, spec)?;
    let listener: Arc<dyn Listener> = Arc::new(Silent);
    let order = Order { kvm, clock, descriptors: Descriptors::default(), hold: None, record: None };
    let ended = live(player, source, planner, order, &listener)?.ok_or(StartError::Ended)?;
    let report = ended.report.ok_or(StartError::Ended)?;
    Ok(*report)
}

/// The report and the error say all that a replay in this process has to tell.
struct Silent;

impl Listener for Silent {
    fn started(&self, _: &StartReport) {}
    fn note(&self, _: &str) {}
}

/// Whether a player that has ended found everything right in the memory that `planner` restored.
pub(super) fn check(reports: &Reports, planner: &str) -> Result<(), StartError> {
    if !reports.wrong_own && reports.wrong_in_loop.count == 0 && reports.wrong_in_pass.count == 0 {
        return Ok(());
    }
    Err(StartError::Wrong { planner: planner.to_owned(), wrong: describe(reports) })
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
