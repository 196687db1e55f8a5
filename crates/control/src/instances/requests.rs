//! Serves a request with a microVM, and freezes a version.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_base::nanoseconds;
use firn_memory::ProcessCounters;
use tokio::task::{JoinError, spawn_blocking};

use firn_run::{
    AgentClient, Answer, ConnectError, Failed, FreezeInstanceError, FunctionError, Invocation,
    InvokeError, LambdaLoad, LoadError, PrepareFreezeError, PutError, RoleCredentials,
};
use firn_snapshot::NotFrozen;
use firn_vmm::ControlError;

use super::fleet::{AcquireError, Fleet, Lease, LeaseRequest, Reservation, Vm};
use super::lambda_log::log;
use super::launch_errors::{FreezeError, LaunchError, PlanError};
use super::launcher::{Frozen, Thawed};
use super::microvm::Microvm;
use super::report::{InvocationReport, ProcessUsage};
use super::stream::AnswerSender;
use crate::functions::{CodeError, CodeStore, Version, VersionSnapshot};
use crate::metrics::StartKind;

/// Function errors that end the function's runtime. The microVM serves no more requests.
pub(super) const FATAL: [&str; 3] =
    ["Sandbox.Timedout", "Runtime.ExitError", "Runtime.OutOfMemory"];

/// One request to a version of a function.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) version: Arc<Version>,
    /// The function's limit of requests in flight.
    pub(crate) concurrency: Option<u32>,
    pub(crate) invocation: Arc<Invocation>,
    /// When the request's head arrived.
    pub(crate) received: Instant,
    /// When the request was read and checked.
    pub(crate) accepted: Instant,
}

/// What a function is initialised for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Initialisation {
    /// A request.
    OnDemand,
    /// Requests that may come.
    Provisioned,
    /// The freeze of its version.
    SnapStart,
}

/// The result of a request.
#[derive(Debug)]
pub struct Invoked {
    /// The function's answer or error, or the daemon's failure.
    pub outcome: Result<Result<Answer, Failed>, InvokeFailure>,
    /// What the request cost.
    pub report: InvocationReport,
    /// The log of a request that reached the function, in AWS Lambda's form.
    pub log: String,
}

impl Invoked {
    /// The result of a request whose task panicked.
    pub(crate) fn failed(error: JoinError) -> Self {
        let report = InvocationReport::default();
        Self { outcome: Err(error.into()), report, log: String::new() }
    }
}

/// A request got no answer.
#[derive(Debug, thiserror::Error)]
pub enum InvokeFailure {
    /// It got no microVM.
    #[error(transparent)]
    Acquire(#[from] AcquireError),
    /// The function's after-restore hooks failed.
    #[error("the function could not be restored: {0}")]
    Restore(FunctionError),
    /// Its microVM did not start.
    #[error("no microVM started")]
    Start(#[from] LoadFailure),
    /// Its microVM ended before it answered.
    #[error("the microVM ended before it answered")]
    Lost(#[source] InvokeError),
    /// Its warm microVM had ended before it received the request.
    #[error("the microVM ended before it received the request")]
    Undelivered(#[source] InvokeError),
    /// The task that served it panicked.
    #[error("the task that served the request failed")]
    Task(#[from] JoinError),
}

/// A microVM with the function could not be made.
#[derive(Debug, thiserror::Error)]
pub enum LoadFailure {
    /// The microVM did not start.
    #[error(transparent)]
    Start(#[from] LaunchError),
    /// The agent did not answer.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The stored code cannot be read.
    #[error(transparent)]
    Code(#[from] CodeError),
    /// The agent did not take a file.
    #[error(transparent)]
    Put(#[from] PutError),
    /// The function was not initialised. [`LoadError::Function`] is an error of the function
    /// itself.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The task that loads it panicked.
    #[error("the task that loads the function failed")]
    Task(#[from] JoinError),
}

impl LoadFailure {
    /// See [`LaunchError::is_of_earlier_clients`].
    fn is_of_earlier_clients(&self) -> bool {
        matches!(self, Self::Start(error) if error.is_of_earlier_clients())
    }
}

/// A version was not frozen.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PublishFailure {
    #[error(transparent)]
    Acquire(#[from] AcquireError),
    #[error("no attempt of {attempts} got a microVM; publish again when there is room")]
    NeverFree { attempts: u32, source: Box<PublishFailure> },
    #[error(transparent)]
    Load(#[from] LoadFailure),
    #[error(transparent)]
    Freeze(#[from] FreezeError),
    #[error(transparent)]
    Plan(#[from] PlanError),
}

impl PublishFailure {
    /// See [`LaunchError::is_of_earlier_clients`].
    pub(crate) fn is_of_earlier_clients(&self) -> bool {
        match self {
            Self::Freeze(FreezeError::Place(error)) => error.is_of_earlier_clients(),
            Self::Load(error) => error.is_of_earlier_clients(),
            _ => false,
        }
    }

    /// Whether the snapshot could not be written or published, although its monitor runs.
    pub(crate) fn is_of_place(&self) -> bool {
        let Self::Freeze(FreezeError::Freeze(FreezeInstanceError::Freeze(error))) = self else {
            return false;
        };
        matches!(
            error.source,
            NotFrozen::Supervisor(_) | NotFrozen::Machine(ControlError::Refused(_))
        )
    }

    /// Whether another microVM would fail as well: by the function, its code or its image.
    pub(crate) fn is_of_function(&self) -> bool {
        match self {
            Self::Load(
                LoadFailure::Load(LoadError::Function(_) | LoadError::Refused(_))
                | LoadFailure::Put(PutError::Refused(_))
                | LoadFailure::Code(_)
                | LoadFailure::Start(LaunchError::Image(_)),
            ) => true,
            Self::Freeze(FreezeError::Freeze(FreezeInstanceError::Prepare(error))) => {
                matches!(error, PrepareFreezeError::Function(_) | PrepareFreezeError::Refused(_))
            }
            _ => false,
        }
    }
}

impl InvokeFailure {
    /// Whether the request was refused for lack of capacity.
    #[must_use]
    pub fn is_throttling(&self) -> bool {
        matches!(self, Self::Acquire(error) if error.is_throttling())
    }

    /// Whether a later attempt can succeed: there was no capacity, or the daemon failed.
    pub(crate) fn is_transient(&self) -> bool {
        !matches!(self, Self::Restore(_))
    }
}

/// Serves one request, from the queue to the answer. An answer that the function streams goes to
/// `sender`, if there is one.
///
/// A warm microVM that ended before it received the request is replaced by another. The function
/// runs at most once.
pub(crate) async fn invoke(
    fleet: Arc<Fleet>,
    code: CodeStore,
    request: Request,
    sender: &mut Option<AnswerSender>,
) -> Invoked {
    let Version { function, version, .. } = &*request.version;
    // Counts until the answer has arrived.
    let in_flight = fleet.begin_request(function, request.concurrency);
    loop {
        let mut report = InvocationReport {
            accept_ns: nanoseconds(request.accepted - request.received),
            ..InvocationReport::default()
        };
        let outcome = match &in_flight {
            Ok(_) => serve(&fleet, &code, &request, &mut report, sender).await,
            Err(error) => Err((*error).into()),
        };
        // Each attempt removes a microVM from the fleet, so the loop ends.
        if let Err(error @ InvokeFailure::Undelivered(_)) = &outcome {
            let error = error as &dyn std::error::Error;
            tracing::warn!(function, version, error, "retrying with another microVM");
            continue;
        }
        let total = request.received.elapsed();
        report.total_ns = nanoseconds(total);
        report.reason = outcome.as_ref().err().map(ToString::to_string);
        if let (Ok(_), Some(start)) = (&outcome, report.start) {
            fleet.metrics.started(start, total.as_secs_f64());
        }
        let request_id = request.invocation.request_id();
        let log = outcome.as_ref().map(|o| log(&request.version, request_id, o, &report));
        return Invoked { log: log.unwrap_or_default(), outcome, report };
    }
}

/// Serves a request with one microVM, and fills in the report.
async fn serve(
    fleet: &Arc<Fleet>,
    code: &CodeStore,
    request: &Request,
    report: &mut InvocationReport,
    sender: &mut Option<AnswerSender>,
) -> Result<Result<Answer, Failed>, InvokeFailure> {
    let version = &request.version;
    let lease = fleet.acquire(LeaseRequest { version: Arc::clone(version), new: false }).await;
    let begin = Instant::now();
    report.queue_ns = nanoseconds(begin - request.accepted);
    let vm = match lease? {
        Lease::Warm(mut vm) => {
            vm.microvm.unpause();
            report.start = Some(StartKind::warm);
            *vm
        }
        Lease::Start(reservation) => {
            let started =
                start(fleet, code, version, Initialisation::OnDemand, reservation, report).await;
            report.start_ns = nanoseconds(begin.elapsed());
            match started {
                Ok(mut vm) => {
                    fleet.started(&mut vm);
                    vm
                }
                Err(LoadFailure::Load(LoadError::Function(failed))) => return Ok(Err(failed)),
                Err(LoadFailure::Start(LaunchError::Function(failed))) => {
                    let Version { function, version, .. } = &**version;
                    tracing::warn!(function, version, logs = failed.logs, "the restore failed");
                    return Err(InvokeFailure::Restore(failed.error));
                }
                Err(error) => {
                    fleet.metrics.start_failures.inc();
                    return Err(error.into());
                }
            }
        }
    };
    let warm = report.start == Some(StartKind::warm);
    let invocation = Arc::clone(&request.invocation);
    let Vm { mut microvm, mut agent, reservation } = vm;
    let before = match microvm.process() {
        Some(process) if warm => ProcessCounters::of(process).unwrap_or_default(),
        _ => ProcessCounters::default(),
    };
    let (launcher, called) = (Arc::clone(&fleet.launcher), Arc::clone(version));
    let sent = Instant::now();
    let mut sink = sender.take();
    let (agent, sink, answered) = spawn_blocking(move || {
        agent.set_credentials(launcher.credentials(&called));
        let answered = match &mut sink {
            Some(sink) => agent.invoke_with(&invocation, sink),
            None => agent.invoke(&invocation),
        };
        (agent, sink, answered)
    })
    .await?;
    *sender = sink;
    report.invoke_ns = nanoseconds(sent.elapsed());
    report.usage = microvm.process().and_then(|process| ProcessUsage::since(before, process));
    let vm = Vm { microvm, agent, reservation };
    match answered {
        Ok(answer) => {
            fleet.release(vm);
            Ok(Ok(answer))
        }
        Err(InvokeError::Function(failed)) => {
            if FATAL.contains(&failed.error.error_type.as_str()) {
                fleet.end(vm);
            } else {
                fleet.release(vm);
            }
            Ok(Err(failed))
        }
        Err(error) => {
            fleet.end(vm);
            Err(if warm && error.is_undelivered() {
                InvokeFailure::Undelivered(error)
            } else {
                InvokeFailure::Lost(error)
            })
        }
    }
}

/// Starts a microVM of a version and keeps it, initialised, for a request.
pub(crate) async fn provide(
    fleet: &Arc<Fleet>,
    code: &CodeStore,
    version: &Arc<Version>,
) -> Result<(), InvokeFailure> {
    let request = LeaseRequest { version: Arc::clone(version), new: true };
    let Lease::Start(reservation) = fleet.acquire(request).await? else {
        return Err(AcquireError::Closed.into());
    };
    let (kind, mut report) = (Initialisation::Provisioned, InvocationReport::default());
    let vm = start(fleet, code, version, kind, reservation, &mut report).await?;
    fleet.provide(vm);
    Ok(())
}

/// Boots a version, initialises it, and freezes it.
pub(crate) async fn publish(
    fleet: Arc<Fleet>,
    code: CodeStore,
    version: Arc<Version>,
) -> Result<Frozen, PublishFailure> {
    let request = LeaseRequest { version: Arc::clone(&version), new: true };
    let Lease::Start(reservation) = fleet.acquire(request).await? else {
        return Err(AcquireError::Closed.into());
    };
    fleet.publishing(&reservation);
    let (microvm, _) = fleet.launcher.boot(&version).await.map_err(LoadFailure::from)?;
    let loaded = load(&fleet, &code, &version, &microvm, Initialisation::SnapStart).await;
    let frozen = match loaded {
        // The freeze opens its own connection to the agent.
        Ok((agent, _)) => {
            drop(agent);
            fleet.launcher.freeze(&microvm, &version).await.map_err(Into::into)
        }
        Err(error) => Err(error.into()),
    };
    microvm.end().await;
    drop(reservation);
    if frozen.as_ref().is_err_and(PublishFailure::is_of_earlier_clients) {
        fleet.end_pool_clients();
    }
    frozen
}

/// Starts a microVM with the function: thaws the version's snapshot, or boots if there is none or
/// the thaw fails.
async fn start(
    fleet: &Arc<Fleet>,
    code: &CodeStore,
    version: &Arc<Version>,
    initialisation: Initialisation,
    reservation: Reservation,
    report: &mut InvocationReport,
) -> Result<Vm, LoadFailure> {
    if let Some(snapshot) = &version.snapshot {
        let thawed = thaw(fleet, version, snapshot).await;
        fleet.stand_by();
        match thawed {
            Ok((Thawed { microvm, report: thaw, standby }, agent)) => {
                fleet.launcher.serves(&microvm, version);
                if let Some(found) = thaw.ready {
                    fleet.metrics.looked_for_ready(found);
                }
                report.start = Some(StartKind::thawed);
                (report.thaw, report.standby) = (Some(thaw), standby);
                return Ok(Vm { microvm, agent, reservation });
            }
            Err(error @ LoadFailure::Start(LaunchError::Function(_))) => return Err(error),
            Err(error) => {
                if error.is_of_earlier_clients() {
                    fleet.end_pool_clients();
                }
                report.thaw_failed = true;
                fleet.metrics.start_failures.inc();
                tracing::warn!(
                    function = version.function,
                    version = version.version,
                    error = &error as &dyn std::error::Error,
                    "the thaw failed; booting instead"
                );
            }
        }
    }
    let begin = Instant::now();
    let (microvm, boot) = fleet.launcher.boot(version).await?;
    let booted = Instant::now();
    (report.start, report.boot) = (Some(StartKind::cold), Some(boot));
    report.boot_ns = Some(nanoseconds(booted - begin));
    let loaded = load(fleet, code, version, &microvm, initialisation).await;
    report.load_ns = Some(nanoseconds(booted.elapsed()));
    match loaded {
        Ok((agent, init)) => {
            report.init_ns = Some(nanoseconds(init));
            fleet.launcher.serves(&microvm, version);
            Ok(Vm { microvm, agent, reservation })
        }
        Err(error) => {
            microvm.end().await;
            Err(error)
        }
    }
}

async fn thaw(
    fleet: &Arc<Fleet>,
    version: &Version,
    snapshot: &VersionSnapshot,
) -> Result<(Thawed, AgentClient), LoadFailure> {
    let thawed = fleet.launcher.thaw(version, snapshot).await?;
    let (socket, limit) = (thawed.microvm.vsock_socket(), fleet.launcher.start_limit);
    match spawn_blocking(move || AgentClient::connect(&socket, limit)).await? {
        Ok(agent) => Ok((thawed, agent)),
        Err(error) => {
            thawed.microvm.end().await;
            Err(error.into())
        }
    }
}

/// Sends a version's code to a booted microVM, and starts the function's runtime. Returns the time
/// that the guest measured for the latter.
async fn load(
    fleet: &Fleet,
    code: &CodeStore,
    version: &Arc<Version>,
    microvm: &Microvm,
    initialisation: Initialisation,
) -> Result<(AgentClient, Duration), LoadFailure> {
    let (socket, limit) = (microvm.vsock_socket(), fleet.launcher.start_limit);
    let (code, version) = (code.clone(), Arc::clone(version));
    let environment = environment(fleet, &version, initialisation);
    let snap_start = initialisation == Initialisation::SnapStart;
    let launcher = Arc::clone(&fleet.launcher);
    let loading = spawn_blocking(move || {
        let mut agent = AgentClient::connect(&socket, limit)?;
        let credentials = launcher.credentials(&version);
        // A snapshot must not hold keys.
        agent.set_credentials(
            credentials.map(|keys| if snap_start { RoleCredentials::expired() } else { keys }),
        );
        for layer in &version.layers {
            code.files(&layer.code, |file| {
                agent.put_layer(&file.path, file.executable, &file.contents)?;
                Ok::<_, LoadFailure>(())
            })?;
        }
        let mut first = true;
        code.files(&version.code, |file| {
            agent.put(std::mem::take(&mut first), &file.path, file.executable, &file.contents)?;
            Ok::<_, LoadFailure>(())
        })?;
        let init = agent.load_lambda(&LambdaLoad {
            name: version.function.clone(),
            version: version.version.clone(),
            handler: version.handler.clone(),
            environment,
            memory_mib: u64::from(version.memory),
            time_limit: limit,
            runtime: version.runtime.kind(),
            snap_start,
        })?;
        Ok((agent, init))
    });
    loading.await?
}

/// The function's environment, except for the variables that the agent adds.
fn environment(
    fleet: &Fleet,
    version: &Version,
    initialisation: Initialisation,
) -> BTreeMap<String, String> {
    let mut environment = version.environment.clone();
    // The agent knows the other two.
    if initialisation == Initialisation::Provisioned {
        let (name, kind) = ("AWS_LAMBDA_INITIALIZATION_TYPE", "provisioned-concurrency");
        environment.insert(name.to_owned(), kind.to_owned());
    }
    let region = &fleet.launcher.region;
    for name in ["AWS_REGION", "AWS_DEFAULT_REGION"] {
        environment.insert(name.to_owned(), region.clone());
    }
    // As in AWS Lambda, a program of its own has no such variable.
    if let Some(language) = version.runtime.language() {
        let name = "AWS_EXECUTION_ENV".to_owned();
        environment.insert(name, format!("AWS_Lambda_{language}"));
    }
    environment
}
