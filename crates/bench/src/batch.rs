//! Players as processes: a batch of them starts together, and all of them must succeed.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use firn_base::now_ns;
use firn_pool::Client;
use firn_run::jail::{Jail, JailMode};
use firn_run::monitor::{Monitor, Progress};
use firn_run::{
    Descriptors, HostSpec, Making, Origin, ReplaySpec, SourceSpec, StartError, StartReport,
    StartSpec, ThawSpec,
};
use firn_snapshot::Verify;
use firn_vmm::{KVM_DEVICE, Shape};
use parking_lot::Mutex;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal, setpriority_pgrp};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use thiserror::Error;

use crate::players::{Place, PooledPlayer};

/// A limit for guests with Linux. Players have none.
const TIME_LIMIT: Duration = Duration::from_secs(60);
/// The niceness of a process that is to disturb no other.
const LOWEST_PRIORITY: i32 = 19;

/// Why a batch is not a measurement.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BatchError {
    /// A microVM cannot be started.
    #[error("cannot start microVM {instance} of the batch")]
    Start {
        /// Its number in the batch, from 1.
        instance: u32,
        /// The reason.
        source: Box<StartError>,
    },
    /// A microVM failed.
    #[error("microVM {instance} of the batch failed")]
    Failed {
        /// Its number in the batch, from 1.
        instance: u32,
        /// The reason.
        source: Box<StartError>,
    },
    /// A process cannot be watched.
    #[error("cannot watch the process of microVM {instance} of the batch")]
    Watch {
        /// Its number in the batch, from 1.
        instance: u32,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A signal ended the measurement.
    #[error("ended by signal {0}")]
    Interrupted(i32),
}

/// Stops a measurement on a signal: the running players are killed, and the next step fails.
///
/// The measurement then returns, and temporary directories are removed.
#[derive(Debug)]
pub struct Interrupt {
    state: Arc<Mutex<State>>,
    signals: signal_hook::iterator::Handle,
}

#[derive(Debug, Default)]
struct State {
    signal: Option<i32>,
    running: Vec<OwnedFd>,
}

impl Interrupt {
    /// From here on SIGINT, SIGTERM and SIGHUP stop the measurement instead of the process.
    ///
    /// # Errors
    ///
    /// The error of the operating system, if signals cannot be caught or a thread cannot be
    /// started.
    pub fn catch() -> io::Result<Self> {
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
        let state = Arc::<Mutex<State>>::default();
        let interrupt = Self { state: state.clone(), signals: signals.handle() };
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            for signal in signals.forever() {
                let mut state = state.lock();
                state.signal = Some(signal);
                for process in &state.running {
                    // It may have ended just now.
                    let _ = pidfd_send_signal(process, Signal::KILL);
                }
            }
        })?;
        Ok(interrupt)
    }

    /// The signal that arrived, if one did.
    #[must_use]
    pub fn signal(&self) -> Option<i32> {
        self.state.lock().signal
    }

    pub(crate) fn check(&self) -> Result<(), BatchError> {
        self.signal().map_or(Ok(()), |signal| Err(BatchError::Interrupted(signal)))
    }
}

impl Drop for Interrupt {
    fn drop(&mut self) {
        self.signals.close();
    }
}

/// The microVMs of a batch. They are killed and waited for on drop.
pub(crate) struct Batch<'a> {
    pub(crate) instances: VecDeque<Instance>,
    interrupt: &'a Interrupt,
}

/// A monitor that was prepared for a start.
pub(crate) enum Prepared {
    /// It is a standby monitor, which was started in advance.
    Standby(Monitor),
    /// It has a ready clone.
    Ready(Monitor),
}

/// A microVM in a process of its own.
pub(crate) struct Instance {
    pub(crate) number: u32,
    /// When it was requested, ns of CLOCK_MONOTONIC.
    request_ns: u64,
    monitor: Monitor,
    /// Its end, if it ended before it touched its last page.
    ended: Option<Result<Box<StartReport>, StartError>>,
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        self.instances.clear();
        self.interrupt.state.lock().running.clear();
    }
}

/// A player to start.
#[derive(Clone, Copy)]
pub(crate) struct Player<'a> {
    /// The `firn-monitor` program that it is a process of.
    pub(crate) program: &'a Path,
    pub(crate) snapshot: Place<'a>,
    pub(crate) planner: &'a str,
    /// Whether the image is in the page cache already, so that the plan's own preload is skipped.
    pub(crate) preloaded: bool,
    /// Whether it also measures its time in page faults.
    pub(crate) faults: bool,
    /// The input that it replays; its first one by default.
    pub(crate) input: Option<&'a str>,
    /// Whether it serves a second invocation.
    pub(crate) warm: bool,
    /// Whether it ends without checking all its memory.
    pub(crate) unchecked: bool,
    /// How its monitor is jailed.
    pub(crate) jail: &'a Jail,
}

/// The jails of a measurement's monitors.
#[derive(Clone, Debug)]
pub struct Jails {
    jailed: Arc<Jail>,
    unjailed: Arc<Jail>,
}

impl Default for Jails {
    fn default() -> Self {
        Self::with(Jail::new(JailMode::Auto))
    }
}

impl Jails {
    /// Jails for a measurement that counts, or limits, what all monitors take together by the
    /// control groups of this process, in which they stay.
    #[must_use]
    pub fn in_one_group() -> Self {
        Self::with(in_one_group())
    }

    fn with(jail: Jail) -> Self {
        Self { jailed: Arc::new(jail), unjailed: Arc::new(Jail::new(JailMode::Off)) }
    }

    pub(crate) fn of(&self, jailed: bool) -> &Jail {
        if jailed { &self.jailed } else { &self.unjailed }
    }
}

/// A jail for monitors that stay in the control groups of this process.
pub(crate) fn in_one_group() -> Jail {
    Jail::without_limits(JailMode::Auto, "the measurement has one control group for all monitors")
}

impl Player<'_> {
    /// The request. `request_ns` is when the measured time begins, `connected` whether the monitor
    /// has a connection to the pool's manager.
    fn spec(
        &self,
        descriptors: &mut Descriptors,
        request_ns: u64,
        connected: bool,
    ) -> Result<StartSpec, StartError> {
        let source = match self.snapshot {
            Place::Pool(PooledPlayer { name, .. }) if connected => {
                Ok(SourceSpec::pool_of_standby(name, Verify::Once))
            }
            Place::Directory(path) => SourceSpec::directory(path, descriptors),
            Place::Pool(PooledPlayer { socket, name }) => {
                SourceSpec::pool(socket, name, Verify::Once, descriptors)
            }
        };
        let thaw = ThawSpec {
            source: source?,
            planner: self.planner.to_owned(),
            preloaded: self.preloaded,
            root: None,
            invoke: None,
            record: None,
            replay: ReplaySpec {
                input: self.input.map(ToOwned::to_owned),
                hold: true,
                fault_time: self.faults,
                warm: self.warm,
                unchecked: self.unchecked,
            },
        };
        let spec = StartSpec::new(Origin::Thaw(thaw), HostSpec::default(), TIME_LIMIT);
        Ok(StartSpec { request_ns: Some(request_ns), ..spec })
    }

    /// Starts the microVM in a monitor that was prepared, or in a process that is started for it.
    /// The measured time begins at `request_ns`.
    fn start(&self, prepared: Option<Prepared>, request_ns: u64) -> Result<Monitor, StartError> {
        let mut monitor = match prepared {
            Some(Prepared::Ready(mut monitor)) => {
                monitor.resume(request_ns, None)?;
                return Ok(monitor);
            }
            Some(Prepared::Standby(monitor)) => monitor,
            None => self.spawn()?,
        };
        let mut descriptors = Descriptors::default();
        let spec = self.spec(&mut descriptors, request_ns, monitor.has_manager())?;
        monitor.start(spec, &descriptors)?;
        Ok(monitor)
    }

    fn spawn(&self) -> Result<Monitor, StartError> {
        Monitor::spawn(self.jail, self.program, KVM_DEVICE.as_ref())
    }

    /// The shape of its microVM.
    pub(crate) fn shape(&self) -> Result<Shape, StartError> {
        let mut descriptors = Descriptors::default();
        let spec = self.spec(&mut descriptors, now_ns(), false)?;
        self.spawn()?.plan(spec, &descriptors, TIME_LIMIT)
    }

    /// A standby monitor that has made the VM of its microVM.
    pub(crate) fn stand_by(&self, shape: &Shape) -> Result<Monitor, StartError> {
        let mut monitor = self.spawn()?;
        let pool = match self.snapshot {
            Place::Pool(PooledPlayer { socket, .. }) => Some(socket.as_path()),
            Place::Directory(_) => None,
        };
        monitor.stand_by(shape, pool)?;
        monitor.wait_ready(TIME_LIMIT)?;
        Ok(monitor)
    }

    /// Waits until the pool's manager has made what it makes in advance.
    pub(crate) fn settle(&self) -> Result<(), StartError> {
        if let Place::Pool(PooledPlayer { socket, .. }) = self.snapshot {
            Client::connect(socket)?.settle()?;
        }
        Ok(())
    }

    /// A ready clone of its snapshot.
    pub(crate) fn make_ready(&self) -> Result<(Monitor, Making), StartError> {
        let mut makings = 0;
        loop {
            self.settle()?;
            let mut monitor = self.spawn()?;
            let mut descriptors = Descriptors::default();
            let spec = self.spec(&mut descriptors, now_ns(), false)?;
            monitor.make_ready(spec, &descriptors)?;
            let making = monitor.wait_made_ready(TIME_LIMIT)?;
            makings += 1;
            if making.no_copy.is_none() || makings == Making::LIMIT {
                return Ok((monitor, making));
            }
        }
    }
}

impl<'a> Batch<'a> {
    pub(crate) fn new(interrupt: &'a Interrupt) -> Self {
        Self { instances: VecDeque::new(), interrupt }
    }

    /// Starts one more microVM, with a number from 1, in a prepared monitor if there is one.
    pub(crate) fn start(
        &mut self,
        player: Player<'_>,
        number: u32,
        prepared: Option<Prepared>,
    ) -> Result<(), BatchError> {
        self.start_after(now_ns(), player, number, prepared)
    }

    /// The same for a request of an earlier time, which has waited.
    fn start_after(
        &mut self,
        request_ns: u64,
        player: Player<'_>,
        number: u32,
        prepared: Option<Prepared>,
    ) -> Result<(), BatchError> {
        let instance = number;
        let monitor = player
            .start(prepared, request_ns)
            .map_err(|source| BatchError::Start { instance, source: Box::new(source) })?;
        let process = process_of(&monitor);
        self.instances.push_back(Instance { number, request_ns, monitor, ended: None });
        if let Some(process) = process {
            let process = pidfd_open(process, PidfdFlags::empty())
                .map_err(|source| BatchError::Watch { instance, source: source.into() })?;
            self.interrupt.state.lock().running.push(process);
        }
        Ok(())
    }
}

/// What a batch came to.
pub(crate) struct Reports<T> {
    pub(crate) reports: Vec<StartReport>,
    /// The first request to the last page of the last microVM, ns.
    pub(crate) burst_ns: u64,
    pub(crate) held: T,
}

/// Starts `count` players together, taking turns with `players`, waits for all of them, and returns
/// their reports. They start in the prepared monitors, as far as there are any.
///
/// At most `at_once` of them run together. The others are requested with them, and each waits until
/// an earlier one has ended, which then does not check all its memory.
///
/// `held` is called when every player has touched its last page and none checks all its memory yet:
/// that check reads pages into the page cache that other players may not have touched.
pub(crate) fn run<T>(
    players: &[Player<'_>],
    count: u32,
    at_once: u32,
    prepared: Vec<Prepared>,
    interrupt: &Interrupt,
    held: impl FnOnce() -> T,
) -> Result<Reports<T>, BatchError> {
    let mut batch = Batch::new(interrupt);
    interrupt.check()?;
    let mut prepared = prepared.into_iter();
    let (mut requests, mut reports) = (Vec::new(), Vec::new());
    let mut waiting_since = None;
    for (number, player) in (1..=count).zip(players.iter().cycle()) {
        let mut request_ns = now_ns();
        if number > at_once {
            request_ns = *waiting_since.get_or_insert(request_ns);
            if let Some(mut first) = batch.instances.pop_front() {
                first.wait_until_held(None);
                first.release();
                requests.push(first.request_ns);
                let report = first.report();
                interrupt.check()?;
                reports.push(report?);
            }
        }
        let gives_way = number.saturating_add(at_once) <= count;
        let player = Player { unchecked: player.unchecked || gives_way, ..*player };
        batch.start_after(request_ns, player, number, prepared.next())?;
        // A signal before this process was listed has not ended it.
        interrupt.check()?;
    }
    for instance in &mut batch.instances {
        instance.wait_until_held(None);
    }
    let held = held();
    for instance in &mut batch.instances {
        instance.release();
    }
    requests.extend(batch.instances.iter().map(|instance| instance.request_ns));
    let mut last = Vec::new();
    while let Some(instance) = batch.instances.pop_front() {
        last.push(instance.report());
    }
    interrupt.check()?;
    for report in last {
        reports.push(report?);
    }
    let ends = requests.iter().zip(&reports).map(|(begin, report)| begin + report.times.total_ns);
    let burst_ns = ends.max().zip(requests.first()).map(|(end, begin)| end - begin);
    Ok(Reports { reports, burst_ns: burst_ns.unwrap_or_default(), held })
}

fn process_of(monitor: &Monitor) -> Option<Pid> {
    i32::try_from(monitor.pid()).ok().and_then(Pid::from_raw)
}

impl Instance {
    /// Waits until the player has touched its last page, at most for `limit`. Returns the end of a
    /// microVM that ends before that.
    pub(crate) fn wait_until_held(
        &mut self,
        limit: Option<Duration>,
    ) -> Option<&Result<Box<StartReport>, StartError>> {
        self.ended = match self.monitor.progress(limit) {
            Ok(Progress::Held) => None,
            Ok(Progress::Started(report)) => Some(Ok(report)),
            Err(error) => Some(Err(error)),
        };
        self.ended.as_ref()
    }

    /// Whether its process has ended, or its state is unknown.
    pub(crate) fn has_ended(&mut self) -> bool {
        !self.monitor.is_alive()
    }

    /// Gives its process, which leads a process group of its own, the lowest priority.
    pub(crate) fn lower_priority(&self) {
        // A process that has ended needs none.
        let _ = setpriority_pgrp(process_of(&self.monitor), LOWEST_PRIORITY);
    }

    /// Lets the player check all its memory.
    pub(crate) fn release(&mut self) {
        if self.ended.is_none() {
            self.ended = self.monitor.release().err().map(Err);
        }
    }

    /// Waits for its end.
    pub(crate) fn report(self) -> Result<StartReport, BatchError> {
        let Self { number: instance, mut monitor, ended, .. } = self;
        let ended = ended.unwrap_or_else(|| monitor.started(None));
        let report = ended.and_then(|report| monitor.wait().map(|()| *report));
        report.map_err(|source| BatchError::Failed { instance, source: Box::new(source) })
    }
}

#[cfg(test)]
#[path = "batch_tests.rs"]
mod tests;
