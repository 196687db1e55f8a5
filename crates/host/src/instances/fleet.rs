//! Which request gets which microVM, and when: warm ones first, then new ones, then the queue.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::timeout;
use uuid::Uuid;

use super::ledger::{Budget, Cost, Ledger};
use super::members::{Member, Members};
use super::monitor::{Launcher, Monitor, guest_mib};
use super::tally::Tallies;
use crate::functions::{SnapshotPlace, Version};
use crate::metrics::{Ending, Metrics, StartKind};
use firn_run::AgentClient;

/// What a monitor takes besides guest memory: its own program, page tables, what the guest writes to its disk at first.
const MONITOR_BYTES: u64 = 16 << 20;

/// What the daemon allows itself.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    /// DRAM for all microVMs, in bytes.
    pub(crate) memory: u64,
    /// MicroVMs at once.
    pub(crate) monitors: usize,
    /// Whether a version is booked by what its microVMs were measured to take, once they were.
    pub(crate) measured: bool,
    /// Requests that may wait for a microVM.
    pub(crate) queue: usize,
    /// How long a request may wait for a microVM.
    pub(crate) queue_wait: Duration,
    /// How long a microVM is kept after its last request.
    pub(crate) keep_alive: Duration,
}

/// The microVMs.
#[derive(Debug)]
pub(crate) struct Fleet {
    pub(crate) launcher: Launcher,
    pub(crate) metrics: Metrics,
    pub(super) limits: Limits,
    pub(super) runtime: Handle,
    pub(super) begun: Instant,
    state: Mutex<State>,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) ledger: Ledger,
    lines: HashMap<Uuid, Line>,
    pub(super) waiting: VecDeque<Waiting>,
    pub(super) members: Members,
    pub(super) tallies: Tallies,
    /// MicroVMs that end to make room.
    ending: usize,
    pub(super) closed: bool,
}

/// The microVMs of one revision.
#[derive(Debug, Default)]
struct Line {
    idle: Vec<Idle>,
    count: usize,
    retired: bool,
}

#[derive(Debug)]
struct Idle {
    vm: Vm,
    since: Instant,
}

#[derive(Debug)]
pub(super) struct Waiting {
    wanted: Wanted,
    reply: oneshot::Sender<Seat>,
}

/// Which microVM is asked for.
#[derive(Debug, Clone)]
pub(crate) struct Wanted {
    pub(crate) version: Arc<Version>,
    /// Whether one that has served requests will not do.
    pub(crate) new: bool,
}

/// A microVM, with what it is booked for.
#[derive(Debug)]
pub(crate) struct Vm {
    pub(crate) monitor: Monitor,
    pub(crate) agent: AgentClient,
    pub(crate) booking: Booking,
}

/// Room for one microVM, given back when dropped.
#[derive(Debug)]
pub(crate) struct Booking {
    fleet: Arc<Fleet>,
    cost: Cost,
    member: u64,
}

/// A request in flight, until dropped.
#[derive(Debug)]
pub(crate) struct Flight {
    fleet: Arc<Fleet>,
    function: String,
}

/// What a request gets.
#[derive(Debug)]
pub(crate) enum Seat {
    Warm(Box<Vm>),
    Start(Booking),
}

/// Why a request gets no microVM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AcquireError {
    #[error("Rate Exceeded.")]
    Concurrency,
    #[error("too many requests wait for a microVM")]
    QueueFull,
    #[error("no microVM was free in time")]
    Waited,
    #[error("the function's memory is more than the daemon may use")]
    TooLarge,
    #[error("the daemon is stopping")]
    Closed,
}

impl Fleet {
    pub(crate) fn new(launcher: Launcher, limits: Limits) -> Arc<Self> {
        let Limits { memory, monitors, measured, .. } = limits;
        let budget = Budget { memory, monitors, measured };
        let state = State {
            ledger: Ledger::new(budget),
            lines: HashMap::new(),
            waiting: VecDeque::new(),
            members: Members::default(),
            tallies: Tallies::default(),
            ending: 0,
            closed: false,
        };
        let fleet = Arc::new(Self {
            launcher,
            metrics: Metrics::default(),
            limits,
            runtime: Handle::current(),
            begun: Instant::now(),
            state: Mutex::new(state),
        });
        fleet.launcher.stand_by();
        let weak = Arc::downgrade(&fleet);
        fleet.runtime.spawn(async move {
            let mut ticks = tokio::time::interval(Duration::from_secs(1));
            loop {
                ticks.tick().await;
                let Some(fleet) = weak.upgrade() else { return };
                fleet.watch();
            }
        });
        fleet
    }

    /// Counts a request of a function. Where `limit` are in flight, those in the queue among them, it is turned away at once, as by
    /// AWS Lambda.
    pub(crate) fn enter(
        self: &Arc<Self>,
        function: &str,
        limit: Option<u32>,
    ) -> Result<Flight, AcquireError> {
        if self.lock().ledger.enter(function, limit) {
            Ok(Flight { fleet: Arc::clone(self), function: function.to_owned() })
        } else {
            Err(AcquireError::Concurrency)
        }
    }

    /// A warm microVM, or room for a new one; waits for it in the queue where it has to.
    pub(crate) async fn acquire(self: &Arc<Self>, wanted: Wanted) -> Result<Seat, AcquireError> {
        let waiting = {
            let mut state = self.lock();
            if state.closed {
                return Err(AcquireError::Closed);
            }
            if !state.ledger.could_fit(&cost(&wanted.version)) {
                return Err(AcquireError::TooLarge);
            }
            if let Some(seat) = self.try_seat(&mut state, &wanted) {
                return Ok(seat);
            }
            if state.waiting.len() >= self.limits.queue {
                return Err(AcquireError::QueueFull);
            }
            let (reply, waiting) = oneshot::channel();
            state.waiting.push_back(Waiting { wanted, reply });
            self.count(&state);
            waiting
        };
        match timeout(self.limits.queue_wait, waiting).await {
            Ok(Ok(seat)) => Ok(seat),
            Ok(Err(_)) => Err(AcquireError::Closed),
            Err(_) => Err(AcquireError::Waited),
        }
    }

    /// Keeps a microVM for the next request.
    pub(crate) fn release(self: &Arc<Self>, vm: Vm) {
        let mut state = self.lock();
        let State { lines, members, closed, .. } = &mut *state;
        match lines.get_mut(&vm.booking.cost.revision) {
            Some(line) if !line.retired && !*closed => {
                members.idle(vm.booking.member);
                line.idle.push(Idle { vm, since: Instant::now() });
            }
            _ => self.end(vm),
        }
        drop(state);
        self.dispatch();
    }

    /// A microVM has started, for a request.
    pub(crate) fn began(&self, booking: &Booking, monitor: &Monitor, start: StartKind) {
        self.lock().members.began(booking.member, monitor.process(), start);
    }

    /// A microVM is started to be frozen.
    pub(crate) fn publishes(&self, booking: &Booking) {
        self.lock().members.publishes(booking.member);
    }

    /// Has monitors stand by in place of those that were used.
    pub(crate) fn stand_by(self: &Arc<Self>) {
        let fleet = Arc::clone(self);
        self.runtime.spawn(async move {
            if !fleet.lock().closed {
                fleet.launcher.stand_by();
            }
        });
    }

    /// Counts a request that has ended: how it found a microVM and how long it took, where it got one.
    pub(crate) fn tally(&self, version: &Version, ending: Ending, taken: Option<(StartKind, u64)>) {
        self.metrics.ended(&version.function, ending);
        self.lock().tallies.count(version, ending, taken);
    }

    /// Ends a microVM.
    pub(crate) fn end(self: &Arc<Self>, vm: Vm) {
        self.runtime.spawn(Arc::clone(self).ended(vm));
    }

    /// Ends a microVM. Its booking goes when its process has gone.
    async fn ended(self: Arc<Self>, vm: Vm) {
        let Vm { monitor, booking, agent } = vm;
        drop(agent);
        self.lock().members.ending(booking.member);
        monitor.end().await;
        drop(booking);
    }

    /// Ends the microVMs of a revision, those that are busy after their request.
    pub(crate) fn retire(self: &Arc<Self>, revision: Uuid) {
        let mut state = self.lock();
        state.ledger.forget(revision);
        if let Some(line) = state.lines.get_mut(&revision) {
            line.retired = true;
            for idle in std::mem::take(&mut line.idle) {
                self.end(idle.vm);
            }
        }
    }

    /// Lets nobody in any more, and waits until all microVMs have ended.
    pub(crate) async fn close(self: &Arc<Self>, limit: Duration) {
        {
            let mut state = self.lock();
            state.closed = true;
            self.launcher.standbys.end();
            state.waiting.clear();
            let idle: Vec<Idle> =
                state.lines.values_mut().flat_map(|line| std::mem::take(&mut line.idle)).collect();
            for idle in idle {
                self.end(idle.vm);
            }
        }
        let deadline = Instant::now() + limit;
        while self.lock().ledger.monitors() > 0 && Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn try_seat(self: &Arc<Self>, state: &mut State, wanted: &Wanted) -> Option<Seat> {
        let seat = match self.warm(state, wanted) {
            Some(vm) => {
                state.members.busy(vm.booking.member);
                Seat::Warm(Box::new(vm))
            }
            None => Seat::Start(self.book(state, &wanted.version)?),
        };
        self.count(state);
        Some(seat)
    }

    /// An idle microVM: the one that was used last, for it holds most in caches.
    fn warm(self: &Arc<Self>, state: &mut State, wanted: &Wanted) -> Option<Vm> {
        if wanted.new {
            return None;
        }
        let line = state.lines.get_mut(&wanted.version.revision)?;
        while let Some(mut idle) = line.idle.pop() {
            if idle.vm.monitor.is_alive() {
                return Some(idle.vm);
            }
            self.end(idle.vm);
        }
        None
    }

    fn book(self: &Arc<Self>, state: &mut State, version: &Version) -> Option<Booking> {
        let cost = cost(version);
        if !state.ledger.book(&cost) {
            self.make_room(state);
            return None;
        }
        state.lines.entry(cost.revision).or_default().count += 1;
        let member = state.members.add(Member::of(version));
        Some(Booking { fleet: Arc::clone(self), cost, member })
    }

    /// Ends the microVM that has been idle the longest, one at a time.
    pub(super) fn make_room(self: &Arc<Self>, state: &mut State) {
        if state.ending > 0 {
            return;
        }
        let lines = state.lines.values_mut().filter(|line| !line.idle.is_empty());
        let Some(line) = lines.min_by_key(|line| line.idle.first().map(|idle| idle.since)) else {
            return;
        };
        let idle = line.idle.remove(0);
        state.ending += 1;
        let fleet = Arc::clone(self);
        self.runtime.spawn(async move {
            let Vm { monitor, booking, agent } = idle.vm;
            drop(agent);
            fleet.lock().members.ending(booking.member);
            monitor.end().await;
            fleet.lock().ending -= 1;
            drop(booking);
        });
    }

    /// Gives what has become free to those that wait, in their order.
    pub(super) fn dispatch(self: &Arc<Self>) {
        let mut undelivered = Vec::new();
        let mut state = self.lock();
        for waiting in std::mem::take(&mut state.waiting) {
            if waiting.reply.is_closed() {
                continue;
            }
            match self.try_seat(&mut state, &waiting.wanted) {
                Some(seat) => undelivered.extend(waiting.reply.send(seat).err()),
                None => state.waiting.push_back(waiting),
            }
        }
        self.count(&state);
        drop(state);
        // Who waited has gone meanwhile. What is dropped takes the lock, so it is dropped here.
        for seat in undelivered {
            match seat {
                Seat::Warm(vm) => self.release(*vm),
                Seat::Start(booking) => drop(booking),
            }
        }
    }

    /// Ends microVMs that were idle for long, or have ended by themselves.
    pub(super) fn end_idle(self: &Arc<Self>, state: &mut State) {
        for line in state.lines.values_mut() {
            let keep = |idle: &mut Idle| {
                idle.since.elapsed() < self.limits.keep_alive && idle.vm.monitor.is_alive()
            };
            let (kept, over) = std::mem::take(&mut line.idle)
                .into_iter()
                .map(|mut idle| (keep(&mut idle), idle))
                .partition::<Vec<_>, _>(|(keep, _)| *keep);
            line.idle = kept.into_iter().map(|(_, idle)| idle).collect();
            for (_, idle) in over {
                self.end(idle.vm);
            }
        }
    }

    pub(super) fn count(&self, state: &State) {
        let gauge = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        self.metrics.monitors.set(gauge(state.ledger.monitors()));
        self.metrics.standby.set(gauge(self.launcher.standbys.len()));
        self.metrics.queued.set(gauge(state.waiting.len()));
        self.metrics.private_bytes.set(state.ledger.private_bytes());
        self.metrics.shared_bytes.set(state.ledger.shared_bytes());
    }
}

/// What a microVM of `version` may take at worst.
fn cost(version: &Version) -> Cost {
    let shared = match &version.snapshot {
        Some(snapshot) if matches!(snapshot.place, SnapshotPlace::Directory(_)) => snapshot.bytes,
        // A pool's memory is its manager's.
        _ => 0,
    };
    let private = (u64::from(guest_mib(version)) << 20) + MONITOR_BYTES;
    Cost { revision: version.revision, private, shared }
}

impl Drop for Booking {
    fn drop(&mut self) {
        let mut state = self.fleet.lock();
        state.ledger.cancel(&self.cost);
        state.members.remove(self.member);
        if let Some(line) = state.lines.get_mut(&self.cost.revision) {
            line.count -= 1;
            if line.count == 0 {
                state.lines.remove(&self.cost.revision);
            }
        }
        drop(state);
        self.fleet.dispatch();
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.fleet.lock().ledger.leave(&self.function);
    }
}
