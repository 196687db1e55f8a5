//! The side of the process that starts a monitor.

use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use firn_agent::protocol::RoleCredentials;
use firn_base::{ErrorChain, error_chain, now_ns};
use firn_memory::planners::{parse, plan};
use firn_memory::{OwnDevices, Prefetch};
use firn_net::Policy;
use firn_pool::Client;
use firn_snapshot::{Snapshot, SnapshotDirectory};
use firn_vmm::{Shape, Tracepoints};
use thiserror::Error;

use super::connection::{Connection, ReceiveError};
use super::setup::Setup;
use super::{Event, Order, ThreadTracepoints};
use crate::descriptors::Descriptors;
use crate::error::StartError;
use crate::instance::Instances;
use crate::jail::{Jail, JailMode, Limited, Process, Program, Spawners, Wall, memory_limit};
use crate::report::{Making, StartReport};
use crate::spec::{Origin, SourceSpec, StartSpec, ThawSpec};

/// An option that shows in a list of processes whose monitor it is: it names the directory of its
/// supervisor's microVMs.
const OWNER_OPTION: &str = "--owner";

/// Bytes that are kept of what a monitor writes to standard error.
const MAX_STDERR: u64 = 64 << 10;
/// Notes of a monitor that are kept until they are taken.
const MAX_NOTES: usize = 64;
/// How long a monitor that has closed its connection may take to end.
const CLOSING: Duration = Duration::from_secs(10);
/// How often the end of a process is looked for.
const PAUSE: Duration = Duration::from_millis(2);

/// A monitor's process and the connection to it. Dropped, the process is killed.
#[derive(Debug)]
pub struct Monitor {
    child: Process,
    connection: Option<Arc<Connection>>,
    stderr: Option<JoinHandle<Vec<u8>>>,
    notes: Vec<String>,
    has_manager: bool,
    /// The directory of the snapshot that a clone was made ready from.
    directory: Option<Arc<SnapshotDirectory>>,
    /// Prepares the next monitor's start once this one's is done, or has failed.
    next: Weak<Spawners>,
    /// Dropped last, when the process has ended.
    limits: Option<Limited>,
    /// Why its limits are no whole wall.
    missing: Option<String>,
    /// Whether it has reported what it needs of memory, which it does once, before its guest runs.
    has_size: bool,
    mode: JailMode,
    /// Whether it is to record a trace.
    traces: bool,
    /// Alive as long as it reads them.
    tracepoints: Option<Tracepoints>,
    /// The rules of its guest's network.
    policy: Option<Policy>,
    /// The program that reads ahead for it.
    prefetch: Option<Prefetch>,
}

/// A monitor's process cannot be used.
#[derive(Debug, Error)]
pub(super) enum MonitorError {
    #[error("cannot start a monitor")]
    Spawn(#[source] std::io::Error),
    #[error("cannot start {} as a monitor", program.display())]
    Program { program: PathBuf, source: std::io::Error },
    #[error("cannot send the request to the monitor")]
    Send(#[source] std::io::Error),
    #[error(transparent)]
    Receive(#[from] ReceiveError),
    #[error("the monitor sent a message out of order")]
    Order,
    #[error("the monitor ended ({status}){}", after_colon(.stderr))]
    Ended { status: ExitStatus, stderr: String },
    #[error("{0}")]
    Reported(String),
}

impl From<MonitorError> for StartError {
    fn from(error: MonitorError) -> Self {
        Self::Monitor(ErrorChain::of(&error))
    }
}

/// The BPF program of a start whose planner leaves reads to one. A monitor in its jail attaches
/// none. Nothing of the snapshot is parsed before its verifier has confirmed it.
fn prefetch(spec: &StartSpec) -> Result<Option<Prefetch>, StartError> {
    let Origin::Thaw(ThawSpec { source, planner, .. }) = &spec.origin else { return Ok(None) };
    let SourceSpec::Directory { path, verifier, .. } = source else { return Ok(None) };
    // The monitor reports a planner that there is not.
    let Some(planner) = parse(planner).ok().filter(|planner| planner.has_program()) else {
        return Ok(None);
    };
    let snapshot = Snapshot::open_signed(path, verifier.as_deref())?;
    let plan = plan(&snapshot, None, &*planner)?;
    let attached = snapshot.image_file().map(|image| Prefetch::attach(&plan, image));
    Ok(attached.transpose()?.flatten())
}

/// What a monitor that was told to start does next.
#[derive(Debug)]
pub enum Progress {
    /// The start is done.
    Started(Box<StartReport>),
    /// A player waits for its [release](Monitor::release).
    Held,
}

impl Monitor {
    /// Starts a monitor in a jail: `program` is `firn-monitor`, `kvm` the KVM device. It waits
    /// until it gets an order for what to start. It is the kernel's first victim where memory runs
    /// out, and in a process group of its own, so that signals from a terminal reach this process
    /// alone.
    ///
    /// # Errors
    /// [`StartError::Monitor`]; [`StartError::Jail`]: it cannot have the control groups that it
    /// needs.
    pub fn spawn(jail: &Jail, program: &Path, kvm: &Path) -> Result<Self, StartError> {
        let (connection, theirs) = Connection::pair().map_err(MonitorError::Spawn)?;
        let devices = OwnDevices::open().map_err(|error| MonitorError::Spawn(error.into()))?;
        // The thread that starts the monitor may open no device.
        let nowhere = devices.nowhere.try_clone().map_err(MonitorError::Spawn)?;
        let command = || {
            // The environment of a daemon can have keys: this has none.
            let command = Program::new(program, theirs, nowhere)?;
            command.arg(OWNER_OPTION)?.arg(Instances::of_user().directory())
        };
        let command = command().map_err(MonitorError::Spawn)?;
        let (mut spawner, missing) = jail.spawner()?;
        let failed = |source| MonitorError::Program { program: program.to_owned(), source };
        spawner.begin(command).map_err(failed)?;
        // While the program begins.
        let sent = Setup::send(&connection, jail, devices, kvm);
        let (mut child, limits) = spawner.started().map_err(failed)?;
        let pipe = child.stderr.take();
        let read = move || {
            let mut text = Vec::new();
            if let Some(mut pipe) = pipe {
                // A pipe that cannot be read has ended.
                let _ = (&mut pipe).take(MAX_STDERR).read_to_end(&mut text);
                let _ = std::io::copy(&mut pipe, &mut std::io::sink());
            }
            text
        };
        let mut monitor = Self {
            child,
            connection: Some(Arc::new(connection)),
            stderr: None,
            notes: Vec::new(),
            has_manager: false,
            directory: None,
            next: Arc::downgrade(jail.spawners()),
            limits,
            missing,
            has_size: false,
            mode: jail.mode(),
            traces: false,
            tracepoints: None,
            policy: None,
            prefetch: None,
        };
        sent.map_err(MonitorError::Send)?;
        let thread = std::thread::Builder::new().name("monitor-stderr".into()).spawn(read);
        monitor.stderr = Some(thread.map_err(MonitorError::Spawn)?);
        Ok(monitor)
    }

    /// The monitor's process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its control groups.
    #[must_use]
    pub fn limits(&self) -> Option<&Limited> {
        self.limits.as_ref()
    }

    /// Whether the process runs.
    pub fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Tells the monitor to make the VM for a microVM of a shape in advance, instead of what it
    /// made before, and to keep a connection to a pool's manager. Does not wait for that.
    ///
    /// # Errors
    /// [`StartError::Monitor`]; [`StartError::Open`]: the manager of the pool at `pool`, its
    /// socket, does not answer.
    pub fn stand_by(&mut self, shape: &Shape, pool: Option<&Path>) -> Result<(), StartError> {
        let mut descriptors = Descriptors::default();
        let manager = match pool {
            Some(socket) => Some(descriptors.add(Client::connect(socket)?.into_stream())),
            None => None,
        };
        let shape = Box::new(shape.clone());
        self.send(&Order::StandBy { shape, manager }, &descriptors)?;
        self.has_manager = manager.is_some();
        Ok(())
    }

    /// Whether it has a connection to the manager of its owner's pool.
    #[must_use]
    pub fn has_manager(&self) -> bool {
        self.has_manager
    }

    /// Waits until that is done, at most for `limit`. If it failed, the monitor is usable all the
    /// same, and a note has the reason.
    ///
    /// # Errors
    /// As [`Monitor::progress`].
    pub fn wait_ready(&mut self, limit: Duration) -> Result<(), StartError> {
        match self.receive(Some(limit))? {
            Event::Ready(problem) => {
                self.notes.extend(problem);
                Ok(())
            }
            _ => Err(MonitorError::Order.into()),
        }
    }

    /// Tells the monitor to start a microVM; its report comes with [`Monitor::progress`]. A spec
    /// without the time of the request gets the present time.
    ///
    /// # Errors
    /// [`StartError::Monitor`]; of a planner that leaves reads to a BPF program, which this process
    /// attaches, [`StartError::Open`], [`StartError::Plan`] and [`StartError::Load`], too.
    pub fn start(&mut self, spec: StartSpec, descriptors: &Descriptors) -> Result<(), StartError> {
        self.policy = spec.policy();
        let request_ns = spec.request_ns.or_else(|| Some(now_ns()));
        self.prefetch = prefetch(&spec)?;
        self.traces = spec.traces();
        self.send(&Order::Start(Box::new(StartSpec { request_ns, ..spec })), descriptors)
    }

    /// Tells the monitor to make a ready clone: to do all of a start that comes before the identity
    /// and the resume. [`Monitor::wait_made_ready`] waits for it, [`Monitor::resume`] resumes it.
    ///
    /// # Errors
    /// As [`Monitor::start`].
    pub fn make_ready(
        &mut self,
        spec: StartSpec,
        descriptors: &Descriptors,
    ) -> Result<(), StartError> {
        self.policy = spec.policy();
        self.directory = descriptors.directory();
        self.prefetch = prefetch(&spec)?;
        self.send(&Order::MakeReady(Box::new(spec)), descriptors)
    }

    /// Waits until the clone is ready, at most for `limit`.
    ///
    /// # Errors
    /// Why there is none; else as [`Monitor::progress`].
    pub fn wait_made_ready(&mut self, limit: Duration) -> Result<Making, StartError> {
        match self.receive(Some(limit))? {
            Event::MadeReady(making) => Ok(*making),
            _ => Err(MonitorError::Order.into()),
        }
    }

    /// Resumes a clone that is ready, for a request that came in at `request_ns`, ns of
    /// CLOCK_MONOTONIC. The function's hooks may use `credentials`. The report comes with
    /// [`Monitor::progress`]. The microVM of a snapshot that was replaced or removed meanwhile does
    /// not run: the error is [`StartError::Outdated`], of this call for a snapshot in a directory,
    /// and of the report for one in a pool.
    ///
    /// # Errors
    /// [`StartError::Monitor`], [`StartError::Outdated`].
    pub fn resume(
        &mut self,
        request_ns: u64,
        credentials: Option<RoleCredentials>,
    ) -> Result<(), StartError> {
        if let Some(directory) = self.directory.take()
            && !directory.is_current()
        {
            return Err(StartError::Outdated(directory.path().display().to_string()));
        }
        self.send(&Order::Resume { request_ns, credentials }, &Descriptors::default())
    }

    /// Waits for the report of the start, or for a player that waits; at most for `limit`.
    ///
    /// # Errors
    /// The monitor's own [`StartError`]; [`StartError::TimedOut`]; [`StartError::Monitor`], where
    /// the monitor ended without a report.
    pub fn progress(&mut self, limit: Option<Duration>) -> Result<Progress, StartError> {
        loop {
            return match self.receive(limit)? {
                Event::Started(report) => Ok(Progress::Started(report)),
                Event::Held => Ok(Progress::Held),
                Event::Ready(problem) => {
                    self.notes.extend(problem);
                    continue;
                }
                _ => Err(MonitorError::Order.into()),
            };
        }
    }

    /// The same where a player is not to wait.
    ///
    /// # Errors
    /// See [`Monitor::progress`].
    pub fn started(&mut self, limit: Option<Duration>) -> Result<Box<StartReport>, StartError> {
        match self.progress(limit)? {
            Progress::Started(report) => Ok(report),
            Progress::Held => Err(MonitorError::Order.into()),
        }
    }

    /// Lets a player that waits check its memory.
    ///
    /// # Errors
    /// [`StartError::Monitor`].
    pub fn release(&mut self) -> Result<(), StartError> {
        self.send(&Order::Release, &Descriptors::default())
    }

    /// Pauses the vCPUs of the microVM until [`Monitor::unpause`], once the guest's answer has
    /// arrived. Never waits.
    ///
    /// # Errors
    /// [`StartError::Monitor`].
    pub fn pause(&self) -> Result<(), StartError> {
        self.send_now(&Order::Pause)
    }

    /// Lets them run again. Never waits: what is sent to the guest meanwhile arrives.
    ///
    /// # Errors
    /// [`StartError::Monitor`].
    pub fn unpause(&self) -> Result<(), StartError> {
        self.send_now(&Order::Unpause)
    }

    /// Has the monitor open the snapshot of a spec and plan. The monitor ends with that. Returns
    /// the shape of the microVM, for [`Monitor::stand_by`].
    ///
    /// # Errors
    /// Why there is no plan; else as [`Monitor::progress`].
    pub fn plan(
        mut self,
        spec: StartSpec,
        descriptors: &Descriptors,
        limit: Duration,
    ) -> Result<Shape, StartError> {
        self.send(&Order::Plan(Box::new(spec)), descriptors)?;
        match self.receive(Some(limit))? {
            Event::Planned(shape) => Ok(*shape),
            _ => Err(MonitorError::Order.into()),
        }
    }

    /// Notes of the monitor for people, since the last call.
    pub fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    /// Lets the microVM end, and waits for that; kills the process after `limit`.
    pub fn end(mut self, limit: Duration) {
        self.connection = None;
        self.wait_for(limit);
    }

    /// Waits for the end of a monitor that ends by itself: a player, or a microVM that was told to
    /// stop.
    ///
    /// # Errors
    /// [`StartError::Monitor`], where it failed after its report.
    pub fn wait(mut self) -> Result<(), StartError> {
        let status = self.child.wait().map_err(MonitorError::Spawn)?;
        if status.success() {
            return Ok(());
        }
        Err(self.ended(status))
    }

    fn send_now(&self, order: &Order) -> Result<(), StartError> {
        Ok(self.connection()?.send_now(order).map_err(MonitorError::Send)?)
    }

    fn send(&mut self, order: &Order, descriptors: &Descriptors) -> Result<(), StartError> {
        let closed = [ErrorKind::BrokenPipe, ErrorKind::ConnectionReset];
        match self.connection()?.send(order, descriptors) {
            Ok(()) => descriptors.begin_threads(),
            Err(error) if closed.contains(&error.kind()) => Err(self.closed()),
            Err(error) => Err(MonitorError::Send(error).into()),
        }
    }

    /// Waits for an event that is no note, at most for `limit` in all, however many notes come.
    fn receive(&mut self, limit: Option<Duration>) -> Result<Event, StartError> {
        let begin = Instant::now();
        loop {
            let left = limit.map(|limit| limit.saturating_sub(begin.elapsed()));
            if left.is_some_and(|left| left.is_zero()) {
                return Err(self.timed_out(limit));
            }
            let event = match (self.event(left), limit) {
                // It names all of the time, not what was left of it.
                (Err(StartError::TimedOut(_)), Some(limit)) => {
                    return Err(StartError::TimedOut(limit.as_secs()));
                }
                (event, _) => event?,
            };
            match event {
                Some(Event::Note(text)) if self.notes.len() < MAX_NOTES => self.notes.push(text),
                // The report has the answer, and there are notes enough.
                Some(Event::Answered(_) | Event::Note(_)) => {}
                Some(event) => return Ok(event),
                None => return Err(self.closed()),
            }
        }
    }

    /// The next event; `None` once the monitor has closed the connection, as it does at its end.
    pub(super) fn event(&mut self, limit: Option<Duration>) -> Result<Option<Event>, StartError> {
        let mut received = self.connection()?.receive(limit);
        if let Ok((Event::Size { memory, disk }, _)) = received
            && !std::mem::replace(&mut self.has_size, true)
        {
            self.limit_memory(memory_limit(memory, disk))?;
            received = self.connection()?.receive(limit);
        }
        let goes_on = matches!(
            received,
            Ok((Event::Ready(_) | Event::Note(_) | Event::Answered(_) | Event::Observe { .. }, _))
        );
        if let Some(spawners) = self.next.upgrade().filter(|_| !goes_on) {
            spawners.prepare_next();
        }
        match received {
            Ok((Event::Failed(error), _)) => Err(error),
            // Once the guest runs it could be the guest's word.
            Ok((Event::Size { .. }, _)) => Err(MonitorError::Order.into()),
            Ok((Event::Started(mut report), _)) => {
                // The monitor may have another id in a pid namespace of its own.
                report.pid = self.pid();
                // The broker has counted them: the monitor may be taken over.
                report.egress = self.policy.as_ref().map(Policy::counts);
                // Its control groups are this side's.
                if let Some(jail) = &mut report.jail {
                    match &self.missing {
                        Some(reason) => jail.missing.push((Wall::Limits, reason.clone())),
                        None => jail.walls.push(Wall::Limits),
                    }
                }
                Ok(Some(Event::Started(report)))
            }
            Ok((event, _)) => Ok(Some(event)),
            Err(ReceiveError::Closed) => Ok(None),
            Err(ReceiveError::TimedOut) => Err(self.timed_out(limit)),
            Err(error) => Err(MonitorError::from(error).into()),
        }
    }

    /// Opens the tracepoints of a thread of the monitor, for a trace.
    pub(super) fn observe(&mut self, thread: u32) -> Result<(), StartError> {
        // Once the guest runs it could be the guest's word.
        if !std::mem::take(&mut self.traces) {
            return Err(MonitorError::Order.into());
        }
        let mut descriptors = Descriptors::default();
        let mut open = || -> Result<_, StartError> {
            let failed = |error| StartError::session("look at the monitor's threads", error);
            let thread = outer_thread(self.pid(), thread).map_err(failed)?;
            let tracepoints = Tracepoints::of_thread(thread)?;
            let events = tracepoints.events().map_err(failed)?;
            let events = events.map(|event| descriptors.add(event));
            let format = self.tracepoints.insert(tracepoints).format();
            Ok(ThreadTracepoints { format, events })
        };
        let observed = open();
        self.send(&Order::Observed(observed), &descriptors)
    }

    fn timed_out(&mut self, limit: Option<Duration>) -> StartError {
        let _ = self.child.kill();
        StartError::TimedOut(limit.unwrap_or_default().as_secs())
    }

    fn limit_memory(&mut self, bytes: u64) -> Result<(), StartError> {
        let Some(Err(error)) = self.limits.as_ref().map(|limits| limits.limit_memory(bytes)) else {
            return Ok(());
        };
        let reason = error_chain(&error);
        if self.mode == JailMode::Require {
            return Err(StartError::Jail { wall: Wall::Limits, reason });
        }
        self.missing = Some(reason);
        Ok(())
    }

    /// The connection, for another thread that sends.
    pub(super) fn connection(&self) -> Result<Arc<Connection>, StartError> {
        Ok(self.connection.clone().ok_or(MonitorError::Order)?)
    }

    /// Why the monitor ends, which has closed the connection. A hostile one may not end by itself.
    fn closed(&mut self) -> StartError {
        self.wait_for(CLOSING);
        let _ = self.child.kill();
        match self.child.wait() {
            Ok(status) => self.ended(status),
            Err(error) => MonitorError::Spawn(error).into(),
        }
    }

    /// Waits until the process has ended, at most for `limit`.
    fn wait_for(&mut self, limit: Duration) {
        let begin = Instant::now();
        while self.is_alive() && begin.elapsed() < limit {
            std::thread::sleep(PAUSE);
        }
    }

    fn ended(&mut self, status: ExitStatus) -> StartError {
        let stderr = self.stderr.take().and_then(|thread| thread.join().ok()).unwrap_or_default();
        let stderr = String::from_utf8_lossy(&stderr).trim().to_owned();
        match stderr.strip_prefix("firn: error: ") {
            // It ended itself, and reported why.
            Some(error) if status.code().is_some() => MonitorError::Reported(error.to_owned()),
            _ => MonitorError::Ended { status, stderr },
        }
        .into()
    }
}

/// The system-wide id of a thread of a process, by its id in the process's own pid namespace
/// (proc_pid_status(5), NSpid).
fn outer_thread(process: u32, thread: u32) -> std::io::Result<u32> {
    for task in std::fs::read_dir(format!("/proc/{process}/task"))? {
        let task = task?;
        let status = std::fs::read_to_string(task.path().join("status"))?;
        let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
        let inner = ids.and_then(|ids| ids.split_whitespace().last());
        if inner.is_some_and(|inner| inner.parse() == Ok(thread)) {
            let outer = task.file_name().to_str().and_then(|outer| outer.parse().ok());
            return outer.ok_or_else(|| ErrorKind::InvalidData.into());
        }
    }
    Err(ErrorKind::NotFound.into())
}

fn after_colon(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!(": {text}") }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        // Fails where it has ended; then it is only waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
