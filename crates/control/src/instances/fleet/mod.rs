//! Placement: gives each request an idle microVM, else room for a new one, else a place in the
//! queue.

mod locked;
mod provisioned;
mod status;
mod watch;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tokio::time::timeout;
use uuid::Uuid;

use firn_run::AgentClient;

use super::launcher::{Launcher, guest_mib};
use super::ledger::{Budget, Cost, Ledger, Shortage};
use super::microvm::Microvm;
use super::network::FunctionNetwork;
use super::request_stats::RequestStats;
use super::table::{InstanceId, InstanceTable};
use crate::functions::{SnapshotPlace, Version};
use crate::metrics::{Metrics, Outcome, StartKind};
use locked::{Locked, Runtime, StateLock};
use provisioned::Provisioned;

/// Memory of a monitor besides guest memory, bytes: its program and page tables.
const MONITOR_BYTES: u64 = 16 << 20;

/// How long killed processes have to end, so that their sockets can be removed.
const KILL_LIMIT: Duration = Duration::from_secs(2);

/// The daemon's limits.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    /// Memory (DRAM) of all microVMs, bytes.
    pub(crate) memory: u64,
    /// Number of microVMs.
    pub(crate) monitors: usize,
    /// Whether reservations follow the measured memory use, once there is a measurement.
    pub(crate) measured: bool,
    /// Requests that can wait for a microVM.
    pub(crate) queue: usize,
    /// How long a request waits for a microVM.
    pub(crate) queue_wait: Duration,
    /// How long an idle microVM is kept.
    pub(crate) keep_alive: Duration,
    /// Whether idle microVMs are paused.
    pub(crate) pause_idle: bool,
}

/// All microVMs of the daemon.
#[derive(Debug)]
pub(crate) struct Fleet {
    pub(crate) launcher: Arc<Launcher>,
    pub(crate) metrics: Metrics,
    limits: Limits,
    runtime: Runtime,
    started_at: Instant,
    state: StateLock,
}

#[derive(Debug)]
struct State {
    ledger: Ledger,
    revisions: HashMap<Uuid, Revision>,
    waiting: VecDeque<Waiter>,
    instances: InstanceTable,
    provisioned: Provisioned,
    stats: RequestStats,
    /// MicroVMs that are being ended to make room.
    evicting: usize,
    /// When a manager of the pool last could not start because of clients of the one before it.
    pool_lost: Option<Instant>,
    closed: bool,
}

/// The microVMs of one revision.
#[derive(Debug, Default)]
struct Revision {
    idle: Vec<Idle>,
    count: usize,
    retired: bool,
}

#[derive(Debug)]
struct Idle {
    vm: Vm,
    since: Instant,
}

/// A request in the queue.
#[derive(Debug)]
struct Waiter {
    request: LeaseRequest,
    reply: oneshot::Sender<Lease>,
}

/// The microVM that a request needs.
#[derive(Debug, Clone)]
pub(crate) struct LeaseRequest {
    pub(crate) version: Arc<Version>,
    /// Whether it has to be a new microVM.
    pub(crate) new: bool,
}

/// A running microVM and its reservation.
#[derive(Debug)]
pub(crate) struct Vm {
    pub(crate) microvm: Microvm,
    pub(crate) agent: AgentClient,
    pub(crate) reservation: Reservation,
}

/// Memory reserved for one microVM, released when dropped.
#[derive(Debug)]
pub(crate) struct Reservation {
    fleet: Arc<Fleet>,
    cost: Cost,
    instance: InstanceId,
}

/// Counts a request as in flight, until dropped.
#[derive(Debug)]
pub(crate) struct InFlight {
    fleet: Arc<Fleet>,
    function: String,
}

/// What a request gets.
#[derive(Debug)]
pub(crate) enum Lease {
    /// An idle microVM.
    Warm(Box<Vm>),
    /// Room for a new microVM.
    Start(Reservation),
}

/// A request gets no microVM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AcquireError {
    /// The function's limit of requests in flight is reached.
    #[error("Rate Exceeded.")]
    Concurrency,
    /// The queue is full.
    #[error("too many requests wait for a microVM")]
    QueueFull,
    /// The request waited for the longest time allowed.
    #[error("no microVM was free in time (--queue-wait){}", because(.0))]
    TimedOut(Option<Shortage>),
    /// The microVM could not start even if no other ran.
    #[error("the function's microVM does not fit into the daemon's limits: {0}")]
    TooLarge(Shortage),
    /// The daemon is stopping.
    #[error("the daemon is stopping")]
    Closed,
}

fn because(shortage: &Option<Shortage>) -> String {
    shortage.map(|shortage| format!(": {shortage}")).unwrap_or_default()
}

impl AcquireError {
    /// Whether the request was refused for lack of capacity, so that a later attempt can succeed.
    #[must_use]
    pub fn is_throttling(self) -> bool {
        matches!(self, Self::Concurrency | Self::QueueFull | Self::TimedOut(_))
    }
}

impl Fleet {
    /// A fleet without microVMs. It starts the standby monitors, and a task that runs until the
    /// fleet is dropped.
    pub(crate) fn new(launcher: Launcher, limits: Limits) -> Arc<Self> {
        let Limits { memory, monitors, measured, .. } = limits;
        let budget = Budget { memory, monitors, scratch: launcher.scratch.size(), measured };
        let state = State {
            ledger: Ledger::new(budget),
            revisions: HashMap::new(),
            waiting: VecDeque::new(),
            instances: InstanceTable::default(),
            provisioned: Provisioned::default(),
            stats: RequestStats::default(),
            evicting: 0,
            pool_lost: None,
            closed: false,
        };
        let policy = launcher.network.as_ref().and_then(FunctionNetwork::policy);
        let fleet = Arc::new(Self {
            metrics: Metrics::new(policy.cloned()),
            launcher: Arc::new(launcher),
            limits,
            runtime: Runtime::current(),
            started_at: Instant::now(),
            state: StateLock::new(state),
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

    /// Counts a request of a function as in flight. Fails if `limit` requests of the function are
    /// in flight or in the queue.
    pub(crate) fn begin_request(
        self: &Arc<Self>,
        function: &str,
        limit: Option<u32>,
    ) -> Result<InFlight, AcquireError> {
        if self.state.lock().ledger.begin_request(function, limit) {
            Ok(InFlight { fleet: Arc::clone(self), function: function.to_owned() })
        } else {
            Err(AcquireError::Concurrency)
        }
    }

    /// An idle microVM, or room for a new one. Waits in the queue if there is neither.
    pub(crate) async fn acquire(
        self: &Arc<Self>,
        request: LeaseRequest,
    ) -> Result<Lease, AcquireError> {
        let cost = self.cost(&request.version);
        let waiting = {
            let mut state = self.lock();
            if state.closed {
                return Err(AcquireError::Closed);
            }
            if let Some(shortage) = state.ledger.never_fits(&cost) {
                return Err(AcquireError::TooLarge(shortage));
            }
            if let Some(lease) = self.try_lease(&mut state, &request) {
                return Ok(lease);
            }
            if state.waiting.len() >= self.limits.queue {
                return Err(AcquireError::QueueFull);
            }
            let (reply, waiting) = oneshot::channel();
            state.waiting.push_back(Waiter { request, reply });
            self.update_gauges(&state);
            waiting
        };
        match timeout(self.limits.queue_wait, waiting).await {
            Ok(Ok(lease)) => Ok(lease),
            Ok(Err(_)) => Err(AcquireError::Closed),
            Err(_) => Err(AcquireError::TimedOut(self.state.lock().ledger.shortage(&cost))),
        }
    }

    /// Keeps a microVM for the next request.
    pub(crate) fn release(self: &Arc<Self>, mut vm: Vm) {
        if self.limits.pause_idle {
            vm.microvm.pause();
        }
        let mut locked = self.lock();
        let (state, later) = locked.parts();
        let State { revisions, instances, closed, pool_lost, .. } = state;
        let bars_pool = pool_lost.is_some_and(|lost| vm.microvm.is_client_since_before(lost));
        match revisions.get_mut(&vm.reservation.cost.revision) {
            Some(revision) if !revision.retired && !*closed && !bars_pool => {
                instances.idle(vm.reservation.instance);
                revision.idle.push(Idle { vm, since: Instant::now() });
            }
            _ => later.end(vm),
        }
        drop(locked);
        self.dispatch();
    }

    /// Records that a microVM has started for a request.
    pub(crate) fn started(&self, vm: &mut Vm) {
        let process = vm.microvm.process();
        self.state.lock().instances.started(vm.reservation.instance, process);
    }

    /// Keeps a microVM that has started before there is a request for it.
    pub(crate) fn provide(self: &Arc<Self>, mut vm: Vm) {
        let process = vm.microvm.process();
        self.state.lock().instances.initialised(vm.reservation.instance, process);
        self.release(vm);
    }

    /// Records that a microVM starts to be frozen.
    pub(crate) fn publishing(&self, reservation: &Reservation) {
        self.state.lock().instances.publishing(reservation.instance);
    }

    /// Replaces used standby monitors, in the background.
    pub(crate) fn stand_by(self: &Arc<Self>) {
        let fleet = Arc::clone(self);
        self.runtime.spawn_blocking(move || {
            if !fleet.state.lock().closed {
                fleet.launcher.stand_by();
            }
        });
    }

    /// Counts a request that has ended. `latency` is how it got a microVM, and its latency in ns.
    pub(crate) fn count_request(
        &self,
        version: &Version,
        outcome: Outcome,
        latency: Option<(StartKind, u64)>,
    ) {
        self.state.lock().stats.count(version, outcome, latency);
    }

    /// Ends a microVM, in the background.
    pub(crate) fn end(self: &Arc<Self>, vm: Vm) {
        self.runtime.spawn(Arc::clone(self).end_and_wait(vm));
    }

    /// Ends a microVM. Its reservation is released after its process has ended.
    async fn end_and_wait(self: Arc<Self>, vm: Vm) {
        let Vm { microvm, reservation, agent } = vm;
        drop(agent);
        self.state.lock().instances.ending(reservation.instance);
        microvm.end().await;
        drop(reservation);
    }

    /// Ends the microVMs of a revision: idle ones now, busy ones after their request.
    pub(crate) fn retire(self: &Arc<Self>, revision: Uuid) {
        let mut locked = self.lock();
        let (state, later) = locked.parts();
        state.ledger.forget(revision);
        state.provisioned.forget(revision);
        if let Some(revision) = state.revisions.get_mut(&revision) {
            revision.retired = true;
            for idle in std::mem::take(&mut revision.idle) {
                later.end(idle.vm);
            }
        }
    }

    /// Ends the microVMs that are clients of the pool: idle ones now, busy ones after their
    /// request. For a pool whose manager has ended: no other can start as long as it has clients,
    /// which requests could keep alive for ever.
    pub(crate) fn end_pool_clients(self: &Arc<Self>) {
        let mut locked = self.lock();
        let (state, later) = locked.parts();
        let now = Instant::now();
        state.pool_lost = Some(now);
        for revision in state.revisions.values_mut() {
            let is_client = |idle: &mut Idle| idle.vm.microvm.is_client_since_before(now);
            for idle in revision.idle.extract_if(.., is_client) {
                later.end(idle.vm);
            }
        }
        drop(locked);
        let launcher = Arc::clone(&self.launcher);
        self.runtime.spawn_blocking(move || {
            launcher.ready.forget(|_| true);
            launcher.standbys.end_pool_clients();
        });
    }

    /// Whether the daemon is stopping.
    pub(crate) fn is_closed(&self) -> bool {
        self.state.lock().closed
    }

    /// Refuses new requests, ends all microVMs and waits for that: starts are cut off, requests
    /// that are served have time until `limit`.
    pub(crate) async fn close(self: &Arc<Self>, limit: Duration) {
        {
            let mut locked = self.lock();
            let (state, later) = locked.parts();
            state.closed = true;
            state.waiting.clear();
            let revisions = state.revisions.values_mut();
            for idle in revisions.flat_map(|revision| std::mem::take(&mut revision.idle)) {
                later.end(idle.vm);
            }
        }
        self.launcher.standbys.end();
        self.launcher.ready.end();
        self.launcher.processes.close();
        self.all_ended(limit).await;
        self.launcher.processes.kill();
        self.all_ended(KILL_LIMIT).await;
    }

    /// Waits until no microVM is left, at most `limit`.
    async fn all_ended(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        while self.state.lock().ledger.monitors() > 0 && Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    fn try_lease(
        self: &Arc<Self>,
        state: &mut Locked<'_>,
        request: &LeaseRequest,
    ) -> Option<Lease> {
        let lease = match self.take_idle(state, request) {
            Some(vm) => {
                state.instances.busy(vm.reservation.instance);
                Lease::Warm(Box::new(vm))
            }
            None => Lease::Start(self.reserve(state, &request.version)?),
        };
        self.update_gauges(state);
        Some(lease)
    }

    /// The most recently used idle microVM, which has the most data in processor caches.
    fn take_idle(&self, locked: &mut Locked<'_>, request: &LeaseRequest) -> Option<Vm> {
        if request.new {
            return None;
        }
        let (state, later) = locked.parts();
        let revision = state.revisions.get_mut(&request.version.revision)?;
        while let Some(mut idle) = revision.idle.pop() {
            if idle.vm.microvm.is_alive() {
                return Some(idle.vm);
            }
            later.end(idle.vm);
        }
        None
    }

    /// The largest memory use of a microVM of `version`.
    fn cost(&self, version: &Version) -> Cost {
        let shared = match &version.snapshot {
            Some(snapshot) if matches!(snapshot.place, SnapshotPlace::Directory(_)) => {
                snapshot.bytes
            }
            // The pool's manager accounts for the pool's memory.
            _ => 0,
        };
        let guest = u64::from(guest_mib(version)) << 20;
        let (revision, private) = (version.revision, guest + MONITOR_BYTES);
        let disk = self.launcher.scratch.disk(version);
        let disk_in_memory = self.launcher.scratch.is_in_memory();
        Cost { revision, private, shared, disk, disk_in_memory }
    }

    fn reserve(self: &Arc<Self>, state: &mut Locked<'_>, version: &Version) -> Option<Reservation> {
        let cost = self.cost(version);
        if !state.ledger.reserve(&cost) {
            self.make_room(state);
            return None;
        }
        state.revisions.entry(cost.revision).or_default().count += 1;
        let instance = state.instances.add(version);
        Some(Reservation { fleet: Arc::clone(self), cost, instance })
    }

    /// Ends the microVM that has been idle for the longest time, one at a time.
    fn make_room(self: &Arc<Self>, locked: &mut Locked<'_>) {
        let (state, later) = locked.parts();
        if state.evicting > 0 {
            return;
        }
        let State { revisions, provisioned, instances, .. } = &mut *state;
        let revisions = revisions.iter_mut();
        let revisions = revisions
            .filter(|(id, revision)| provisioned.spare(**id, revision.idle.len(), instances) > 0);
        let oldest = revisions.min_by_key(|(_, one)| one.idle.first().map(|idle| idle.since));
        let Some((_, revision)) = oldest else { return };
        let idle = revision.idle.remove(0);
        state.evicting += 1;
        let fleet = Arc::clone(self);
        later.run(async move {
            let Vm { microvm, reservation, agent } = idle.vm;
            drop(agent);
            fleet.state.lock().instances.ending(reservation.instance);
            microvm.end().await;
            fleet.state.lock().evicting -= 1;
            drop(reservation);
        });
    }

    /// Gives free capacity to waiting requests, in their order.
    fn dispatch(self: &Arc<Self>) {
        let mut undelivered = Vec::new();
        let mut state = self.lock();
        for waiter in std::mem::take(&mut state.waiting) {
            if waiter.reply.is_closed() {
                continue;
            }
            match self.try_lease(&mut state, &waiter.request) {
                Some(lease) => undelivered.extend(waiter.reply.send(lease).err()),
                None => state.waiting.push_back(waiter),
            }
        }
        self.update_gauges(&state);
        drop(state);
        // These requests were cancelled meanwhile. Dropping a lease takes the lock.
        for lease in undelivered {
            match lease {
                Lease::Warm(vm) => self.release(*vm),
                Lease::Start(reservation) => drop(reservation),
            }
        }
    }

    fn update_gauges(&self, state: &State) {
        let gauge = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        self.metrics.monitors.set(gauge(state.ledger.monitors()));
        self.metrics.standby.set(gauge(self.launcher.standbys.len()));
        let (clones, bytes) = self.launcher.ready.usage();
        self.metrics.ready.set(gauge(clones));
        self.metrics.ready_bytes.set(bytes);
        self.metrics.queued.set(gauge(state.waiting.len()));
        self.metrics.private_bytes.set(state.ledger.private_bytes());
        self.metrics.shared_bytes.set(state.ledger.shared_bytes());
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut state = self.fleet.state.lock();
        state.ledger.release(&self.cost);
        state.instances.remove(self.instance);
        if let Some(revision) = state.revisions.get_mut(&self.cost.revision) {
            revision.count -= 1;
            if revision.count == 0 {
                state.revisions.remove(&self.cost.revision);
            }
        }
        drop(state);
        self.fleet.dispatch();
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.fleet.state.lock().ledger.end_request(&self.function);
    }
}
