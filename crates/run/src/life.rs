//! The states of a start: each is made from the one before, and only so.
//!
//! [`Source`] → [`Planned`] → [`Mapped`] → [`Restored`] → [`Running`] → [`StartReport`].

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use firn_base::{ErrorChain, cpu_ns, nanoseconds, now_ns};
use firn_memory::copy_ahead::{WriteReport, observe};
use firn_memory::loader::Loader;
use firn_memory::pager::Pager;
use firn_memory::planners::{self, Planner};
use firn_memory::{
    AfterResume, GuestMemory, Plan, ProcessCounters, Sources, execute_in, verify_plan,
};
use firn_snapshot::{Grant, NoCopy, Snapshot};
use firn_vmm::{
    FirstRun, FrozenMachine, HostConfig, KvmCounters, Microvm, OpenKvm, OpenKvmError, Shape,
    Standby,
};

use crate::background::Background;
use crate::error::StartError;
use crate::jail;
use crate::report::{
    Counters, Making, REPORT_VERSION, ReadyUse, ReplicaCost, StandbyUse, StartReport, StartTimes,
};
use crate::source::Source;

/// When a start began.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// When the process got its order, ns of CLOCK_MONOTONIC.
    pub begun_ns: u64,
    /// When the request came in, if known, ns of CLOCK_MONOTONIC.
    pub request_ns: Option<u64>,
    /// Whether the process waited for the request as a standby monitor.
    pub stood_by: bool,
}

impl Clock {
    /// Starts now, by a request whose time is not known.
    #[must_use]
    pub fn now() -> Self {
        Self { begun_ns: now_ns(), request_ns: None, stood_by: false }
    }

    /// The moment from which `total_ns` counts.
    pub(crate) fn since(&self) -> u64 {
        self.request_ns.unwrap_or(self.begun_ns)
    }

    pub(crate) fn process_start_ns(&self) -> Option<u64> {
        self.request_ns.map(|request| self.begun_ns.saturating_sub(request))
    }
}

/// The KVM of this process, with what a standby monitor made on it; or why it has none, which the
/// start reports once it needs it.
pub struct KvmDevice(pub(crate) Result<Standby, ErrorChain>);

impl From<&Path> for KvmDevice {
    /// Opens the device.
    fn from(path: &Path) -> Self {
        OpenKvm::open(path).into()
    }
}

impl From<Result<OpenKvm, OpenKvmError>> for KvmDevice {
    fn from(opened: Result<OpenKvm, OpenKvmError>) -> Self {
        Self(opened.map(Standby::from).map_err(|error| ErrorChain::of(&error)))
    }
}

/// A plan for a source. Its loader works already.
pub struct Planned<'a> {
    source: &'a Source,
    /// Closed when guest memory is mapped: it gives access to all extents of the pool.
    medium: Option<File>,
    plan: Plan,
    loader: Option<Loader>,
    report: StartReport,
    since: u64,
}

/// Guest memory as the plan has it before the resume, and the machine to restore.
pub struct Mapped<'a> {
    source: &'a Source,
    plan: Option<Plan>,
    machine: FrozenMachine<'a>,
    memory: GuestMemory,
    loader: Option<Loader>,
    after_resume: Option<AfterResume>,
    report: StartReport,
    since: u64,
}

/// A microVM with all its state whose vCPUs do not run.
pub struct Restored<'a> {
    /// The microVM.
    pub microvm: Microvm,
    source: &'a Source,
    plan: Option<Plan>,
    loader: Option<Loader>,
    after_resume: Option<AfterResume>,
    report: StartReport,
    begin_ns: u64,
    since: u64,
}

/// A microVM whose vCPUs run.
pub struct Running<'a> {
    /// The microVM.
    pub microvm: Microvm,
    /// What is known of the start.
    pub run: Run<'a>,
}

/// The part of a running start that other threads use while the microVM's thread serves it.
pub struct Run<'a> {
    pub(crate) source: Option<&'a Source>,
    pub(crate) plan: Option<Plan>,
    pub(crate) background: Background,
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) report: StartReport,
    pub(crate) first_run: FirstRun,
    /// The moment from which `resume_ns` counts.
    pub(crate) begin_ns: u64,
    /// The moment from which `total_ns` counts.
    pub(crate) since: u64,
}

impl Source {
    /// Makes the plan, and starts the loader, which works beside the rest of the start.
    ///
    /// # Errors
    /// [`StartError::Plan`], [`StartError::Load`].
    pub fn plan(&self, planner: &dyn Planner, clock: &Clock) -> Result<Planned<'_>, StartError> {
        let begin = Instant::now();
        let plan = planners::plan(self.snapshot(), self.grant(), planner)?;
        let plan_ns = nanoseconds(begin.elapsed());
        let medium = self.grant().and_then(Grant::take_medium);
        let sources = self.sources(medium.as_ref())?;
        let begin = Instant::now();
        if self.verify {
            verify_plan(&plan, self.snapshot(), &sources)?;
        }
        let verified = self.verify.then(|| nanoseconds(begin.elapsed()));
        let loader = Loader::start(&plan, &sources, clock.since())?;
        let mut report = self.report(clock);
        report.check_ns = report.check_ns.or(verified);
        report.times.load_ns += verified.unwrap_or_default();
        report.planner.clone_from(&plan.planner);
        report.times.plan_ns = plan_ns;
        Ok(Planned { source: self, medium, plan, loader, report, since: clock.since() })
    }

    fn sources<'a>(&'a self, medium: Option<&'a File>) -> Result<Sources<'a>, StartError> {
        Ok(Sources::of(self.snapshot(), self.grant().zip(medium))?)
    }

    /// Plans, and checks that this host can run the machine, without a start. Returns the shape of
    /// the microVM.
    pub(crate) fn shape(&self, planner: &dyn Planner, kvm: KvmDevice) -> Result<Shape, StartError> {
        let plan = planners::plan(self.snapshot(), self.grant(), planner)?;
        let machine = open_machine(self.snapshot(), kvm)?;
        Ok(machine.shape(plan.largest_leaf()))
    }

    /// The state after the plan and its execution for a recorder, which has guest memory of its
    /// own. Every fault is handled in the vCPU's own thread.
    ///
    /// # Errors
    /// [`StartError::Incompatible`].
    pub(crate) fn recorded(
        &self,
        memory: GuestMemory,
        kvm: KvmDevice,
        clock: &Clock,
    ) -> Result<Mapped<'_>, StartError> {
        let mut mapped = self.unplanned(memory, "recorder", kvm, clock)?;
        mapped.machine.fault_in_vcpu_threads();
        Ok(mapped)
    }

    /// The same for guest memory that a [`PageFaultHandler`](crate::PageFaultHandler) fills.
    ///
    /// # Errors
    /// [`StartError::Incompatible`].
    pub fn served(
        &self,
        memory: GuestMemory,
        kvm: KvmDevice,
        clock: &Clock,
    ) -> Result<Mapped<'_>, StartError> {
        self.unplanned(memory, "page fault handler", kvm, clock)
    }

    fn unplanned(
        &self,
        memory: GuestMemory,
        name: &str,
        kvm: KvmDevice,
        clock: &Clock,
    ) -> Result<Mapped<'_>, StartError> {
        // It gives access to all extents of the pool.
        drop(self.grant().and_then(Grant::take_medium));
        let machine = open_machine(self.snapshot(), kvm)?;
        let report = StartReport { planner: name.to_owned(), ..self.report(clock) };
        Ok(Mapped {
            source: self,
            plan: None,
            machine,
            memory,
            loader: None,
            after_resume: None,
            report,
            since: clock.since(),
        })
    }

    fn report(&self, clock: &Clock) -> StartReport {
        let snapshot = self.snapshot();
        StartReport {
            snapshot: Some(snapshot.path().to_owned()),
            memory: snapshot.manifest().layout.total_bytes(),
            standby: clock.stood_by.then_some(StandbyUse::Miss),
            check_ns: self.grant().and_then(Grant::check_time).map(nanoseconds),
            replica: self.grant().and_then(Grant::replica).map(ReplicaCost::from),
            times: StartTimes {
                process_start_ns: clock.process_start_ns(),
                load_ns: nanoseconds(self.opening),
                ..StartTimes::default()
            },
            ..StartReport::empty()
        }
    }
}

fn open_machine(snapshot: &Snapshot, kvm: KvmDevice) -> Result<FrozenMachine<'_>, StartError> {
    let kvm = kvm.0.map_err(StartError::Incompatible)?;
    Ok(FrozenMachine::open_on(snapshot, kvm)?)
}

impl<'a> Planned<'a> {
    /// The plan.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Checks that this host can run the machine, and executes the plan up to the resume. Guest
    /// memory tracks writes from then on, or else the VM is made meanwhile.
    ///
    /// # Errors
    /// [`StartError::Incompatible`], [`StartError::Execute`].
    pub fn map(self, kvm: KvmDevice, tracks_writes: bool) -> Result<Mapped<'a>, StartError> {
        let Self { source, medium, plan, loader, mut report, since } = self;
        let begin = Instant::now();
        let mut machine = open_machine(source.snapshot(), kvm)?;
        if !tracks_writes {
            machine.make_beside(plan.largest_leaf());
        }
        let loaded = Instant::now();
        let sources = source.sources(medium.as_ref())?;
        let mut executed = execute_in(&plan, &sources, machine.take_reservation())?;
        if tracks_writes {
            executed.memory.track_writes();
        }
        report.times.load_ns += nanoseconds(loaded - begin);
        report.times.execute_ns = nanoseconds(loaded.elapsed());
        report.times.set_steps(&executed.report);
        report.execute = executed.report;
        Ok(Mapped {
            source,
            plan: Some(plan),
            machine,
            memory: executed.memory,
            loader,
            after_resume: Some(executed.after_resume),
            report,
            since,
        })
    }
}

impl<'a> Mapped<'a> {
    /// The machine, to change what a guest starts with.
    pub fn machine_mut(&mut self) -> &mut FrozenMachine<'a> {
        &mut self.machine
    }

    /// The snapshot.
    #[must_use]
    pub fn snapshot(&self) -> &'a Snapshot {
        self.source.snapshot()
    }

    /// Makes the microVM and restores its state.
    ///
    /// # Errors
    /// [`StartError::Restore`].
    pub fn restore(self, host: HostConfig) -> Result<Restored<'a>, StartError> {
        let begin_ns = now_ns();
        let Self { source, plan, mut machine, memory, loader, after_resume, .. } = self;
        let Self { mut report, since, .. } = self;
        if machine.is_ready_for(&memory) {
            // What is left to make has no file to map.
            jail::begin_to_narrow();
        }
        let (microvm, restored) = Microvm::restore(machine, memory, host)?;
        if report.standby.is_some() && restored.standby {
            report.standby = Some(StandbyUse::Hit);
        }
        report.restore = Some(restored);
        Ok(Restored { microvm, source, plan, loader, after_resume, report, begin_ns, since })
    }
}

impl<'a> Restored<'a> {
    /// What it takes while it waits for its request. `begin` is when its making began.
    pub(crate) fn making(&self, begin: Instant) -> Result<Making, StartError> {
        let usage = self.microvm.memory().usage();
        let usage = usage.map_err(|error| StartError::Measure(ErrorChain::of(&error)))?;
        let (grant, report) = (self.source.grant(), &self.report);
        let copies = grant.and_then(Grant::copies);
        Ok(Making {
            ns: nanoseconds(begin.elapsed()),
            dram_bytes: usage.private + usage.copies + usage.page_tables + usage.monitor,
            copy_bytes: usage.copies,
            pool_bytes: usage.pool,
            no_copy: copies
                .and_then(|copies| copies.absent)
                .filter(|reason| *reason != NoCopy::Unneeded),
            planner: report.planner.clone(),
        })
    }

    /// Leaves this process what its guest's run needs. The second time it does nothing.
    ///
    /// # Errors
    /// [`StartError::Jail`].
    pub(crate) fn narrow(&self) -> Result<(), StartError> {
        self.source.confined()?;
        jail::narrow(self.microvm.largest_file(), self.microvm.most_sockets())
    }

    /// Lets the vCPUs begin with their part of [`Restored::release`].
    pub(crate) fn begin_release(&mut self) -> Result<(), StartError> {
        Ok(self.microvm.begin_release()?)
    }

    /// Gives the microVM, which was [held](FrozenMachine::hold), what it lacks for the request of
    /// `clock`. What was done before is no part of the start's times.
    pub(crate) fn release(
        &mut self,
        generation: Option<uuid::Uuid>,
        making: Making,
        clock: &Clock,
        begin_ns: u64,
    ) -> Result<(), StartError> {
        self.microvm.release(generation)?;
        (self.begin_ns, self.since) = (begin_ns, clock.since());
        let report = &mut self.report;
        (report.ready, report.making) = (Some(ReadyUse::Hit), Some(making));
        report.standby = Some(StandbyUse::Hit);
        report.times =
            StartTimes { process_start_ns: clock.process_start_ns(), ..StartTimes::default() };
        Ok(())
    }

    /// Starts the vCPUs, and with them what the plan has after the resume.
    ///
    /// # Errors
    /// [`StartError::Resume`].
    pub fn resume(mut self) -> Result<Running<'a>, StartError> {
        self.narrow()?;
        self.microvm.resume()?;
        Ok(self.run())
    }

    /// Starts what the plan has after the resume, while the vCPUs wait for
    /// [`Microvm::resume`](firn_vmm::Microvm::resume).
    ///
    /// # Errors
    /// [`StartError::Jail`].
    pub fn pause(self) -> Result<Running<'a>, StartError> {
        self.narrow()?;
        Ok(self.run())
    }

    fn run(self) -> Running<'a> {
        let Self { microvm, source, plan, loader, after_resume, report, begin_ns, since } = self;
        let (memory, first_run) = (microvm.shared_memory(), microvm.first_run());
        let background = Background::start(after_resume, memory.clone(), loader);
        let source = Some(source);
        let run = Run { source, plan, background, memory, report, first_run, begin_ns, since };
        Running { microvm, run }
    }
}

impl Run<'_> {
    /// Writes of the guest to sealed memory, where it ran on copies: what was expected, and what
    /// was written, for [`Source::learn`].
    ///
    /// # Errors
    /// [`StartError::Measure`].
    pub fn writes(&self) -> Result<Option<WriteReport>, StartError> {
        let (Some(source), Some(plan)) = (self.source, &self.plan) else { return Ok(None) };
        let writes = observe(&self.memory, plan, source.snapshot(), source.grant());
        writes.map_err(|error| StartError::Measure(ErrorChain::of(&error)))
    }

    /// Waits for the loader and for what the plan has after the resume. Returns a note if the
    /// loader failed, which fails nothing.
    ///
    /// # Errors
    /// [`StartError::Schedule`].
    pub fn finish(&mut self) -> Result<Option<String>, StartError> {
        self.background.finish()?;
        Ok(self.background.loader_failure())
    }

    /// When the first vCPU began to run, ns of CLOCK_MONOTONIC; now, where none has.
    pub(crate) fn resumed_ns(&self) -> u64 {
        self.first_run.ns().unwrap_or_else(now_ns)
    }

    /// Sets the times of a start that ends now.
    pub(crate) fn ends_now(&mut self) {
        self.ends_at(now_ns());
    }

    /// The same for a start that ends at a moment, ns of CLOCK_MONOTONIC.
    pub(crate) fn ends_at(&mut self, end_ns: u64) {
        let resumed_ns = self.resumed_ns();
        let times = &mut self.report.times;
        times.resume_ns = resumed_ns.saturating_sub(self.begin_ns);
        times.total_ns = end_ns.saturating_sub(self.since);
    }
}

/// Reads the counters of a microVM, in its own thread.
pub(crate) fn counters(microvm: &mut Microvm) -> Result<Counters, ErrorChain> {
    read_counters(&microvm.kvm_counters(), microvm.memory(), || ())
}

/// Reads the counters of this process and of its microVM. `hold` may wait. The use of memory is
/// read after it, because that takes processor time from other microVMs that it waits for; what the
/// kernel reclaims meanwhile is missing.
pub(crate) fn read_counters(
    kvm: &KvmCounters,
    memory: &GuestMemory,
    hold: impl FnOnce(),
) -> Result<Counters, ErrorChain> {
    // First what reading changes.
    let cpu_ns = cpu_ns();
    let process = ProcessCounters::read();
    let copies = memory.vm_memory().chunk_copies();
    let pager = memory.pager().map(Pager::report);
    let kvm = kvm.read();
    hold();
    let process = process.map_err(|error| ErrorChain::of(&error))?;
    let kvm = kvm.map_err(|error| ErrorChain::of(&error))?;
    let usage = memory.usage().map_err(|error| ErrorChain::of(&error))?;
    Ok(Counters::new(cpu_ns, &process, kvm, copies, &usage, pager))
}

impl StartReport {
    pub(crate) fn empty() -> Self {
        Self { version: REPORT_VERSION, pid: std::process::id(), ..Self::default() }
    }
}
