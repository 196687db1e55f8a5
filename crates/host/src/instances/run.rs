//! What is done with a microVM: a request, or a version's freeze.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use firn_base::nanoseconds;
use firn_memory::ProcessCounters;
use serde::Serialize;
use serde_json::value::RawValue;
use tokio::task::spawn_blocking;

use super::fleet::{AcquireError, Booking, Fleet, Seat, Vm, Wanted};
use super::members::usage;
use super::monitor::{FreezeError, Monitor, StartError, Thawed};
use crate::functions::{CodeError, CodeStore, Runtime, Snapshot, Version};
use crate::metrics::StartKind;
use firn_run::{
    AgentClient, Answer, ConnectError, Failed, FunctionError, Invocation, InvokeError, LambdaLoad,
    LoadError, PutError,
};

/// Errors after which a microVM is not asked again: its runtime was ended, and with it what it kept.
const FATAL: [&str; 2] = ["Sandbox.Timedout", "Runtime.ExitError"];

/// One request to a version of a function.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) version: Arc<Version>,
    /// How many requests of the function may be in flight.
    pub(crate) concurrency: Option<u32>,
    pub(crate) invocation: Arc<Invocation>,
    /// When its head had come in.
    pub(crate) received: Instant,
    /// When it had come in whole, and was found to be one that can be served.
    pub(crate) accepted: Instant,
}

/// What a request came to.
#[derive(Debug)]
pub(crate) struct Invoked {
    /// What the function said, if anything; its failure is an answer, too.
    pub(crate) outcome: Result<Result<Answer, Failed>, InvokeFailure>,
    pub(crate) report: Report,
}

/// What a request cost, for `x-firn-report`: of one that was not served, as far as it came.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Report {
    /// How it found its microVM, where it did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) start: Option<StartKind>,
    /// Why it was not served.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<String>,
    /// Whether a thaw failed before it was booted; the log says why.
    pub(crate) thaw_failed: bool,
    /// Its head read to all of it read and checked.
    pub(crate) accept_ns: u64,
    /// Waiting for a microVM, or for room for one.
    pub(crate) queue_ns: u64,
    /// Starting the microVM and loading the function; nothing for a warm one.
    pub(crate) start_ns: u64,
    /// Event sent to answer received.
    pub(crate) invoke_ns: u64,
    /// Its head read to the answer being there to be written.
    pub(crate) total_ns: u64,
    /// Of a cold start: the process started and Linux booted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) boot_ns: Option<u64>,
    /// Of a cold start: code sent and function initialised.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) load_ns: Option<u64>,
    /// Whether the monitor stood by: was started before there was a request for it.
    pub(crate) standby: bool,
    /// What `firn thaw` says about the start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) thaw: Option<Box<RawValue>>,
    /// What `firn boot` says about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) boot: Option<Box<RawValue>>,
    /// What the microVM took, where its process was there to be asked after the answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) taken: Option<Taken>,
}

impl Report {
    /// In JSON of ASCII alone, as a header takes it.
    pub(crate) fn json(&self) -> String {
        let json = serde_json::to_string(self).unwrap_or_default();
        let mut ascii = String::with_capacity(json.len());
        for c in json.chars() {
            if c.is_ascii() && c != '\x7f' {
                ascii.push(c);
            } else {
                // It is in a string.
                let mut units = [0; 2];
                let units = c.encode_utf16(&mut units).iter();
                ascii.extend(units.map(|unit| format!("\\u{unit:04x}")));
            }
        }
        ascii
    }
}

/// What a microVM took, by the kernel's counters of its process.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Taken {
    /// Page faults, the guest's among them, from its start to the answer; of a warm one for this request alone.
    pub(crate) faults: u64,
    /// Bytes that it made storage read, in that time.
    pub(crate) read_bytes: u64,
    /// DRAM that is its own after the answer, bytes.
    pub(crate) private_bytes: u64,
    /// Pages of files and shared memory that it maps, bytes.
    pub(crate) shared_bytes: u64,
}

impl Taken {
    /// `before`: the counters that do not count.
    fn by(monitor: &Monitor, before: ProcessCounters) -> Option<Self> {
        let process = monitor.process()?;
        let counters = ProcessCounters::of(process).ok()?;
        let usage = usage(process)?;
        let faults = |counters: ProcessCounters| counters.minor_faults + counters.major_faults;
        Some(Self {
            faults: faults(counters).saturating_sub(faults(before)),
            read_bytes: counters.read_bytes.saturating_sub(before.read_bytes),
            private_bytes: usage.private,
            shared_bytes: usage.shared,
        })
    }
}

/// Why a request gave no outcome.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InvokeFailure {
    #[error(transparent)]
    Acquire(#[from] AcquireError),
    /// The function's after-restore hooks failed.
    #[error("the function could not be restored: {0}")]
    Restore(FunctionError),
    #[error("no microVM started")]
    Start(#[from] LoadFailure),
    #[error("the microVM was lost while it answered")]
    Lost(#[source] InvokeError),
    /// A warm microVM had ended, and nobody knew.
    #[error("the microVM was lost before it had the request")]
    Dead(#[source] InvokeError),
    #[error("the task that served the request was lost")]
    Task(#[from] tokio::task::JoinError),
}

/// Why a microVM does not have the function.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LoadFailure {
    #[error(transparent)]
    Start(#[from] StartError),
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Code(#[from] CodeError),
    #[error(transparent)]
    Put(#[from] PutError),
    /// [`LoadError::Function`] is the function's own failure.
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error("the task that loads the function was lost")]
    Task(#[from] tokio::task::JoinError),
}

/// Why a version was not frozen.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PublishFailure {
    #[error(transparent)]
    Acquire(#[from] AcquireError),
    #[error(transparent)]
    Load(#[from] LoadFailure),
    #[error(transparent)]
    Freeze(#[from] FreezeError),
}

/// Serves one request, from the queue to the answer. Warm microVMs that turn out to have ended before they had it are passed over: its
/// function runs once at most.
pub(crate) async fn invoke(fleet: Arc<Fleet>, code: CodeStore, request: Request) -> Invoked {
    let Version { function, version, .. } = &*request.version;
    // Held until the answer is here.
    let flight = fleet.enter(function, request.concurrency);
    loop {
        let mut report = Report {
            accept_ns: nanoseconds(request.accepted - request.received),
            ..Report::default()
        };
        let outcome = match &flight {
            Ok(_) => serve(&fleet, &code, &request, &mut report).await,
            Err(error) => Err((*error).into()),
        };
        // It is out of the fleet, so this ends.
        if let Err(error @ InvokeFailure::Dead(_)) = &outcome {
            let error = error as &dyn std::error::Error;
            tracing::warn!(function, version, error, "asking another microVM");
            continue;
        }
        let total = request.received.elapsed();
        report.total_ns = nanoseconds(total);
        report.reason = outcome.as_ref().err().map(ToString::to_string);
        if let (Ok(_), Some(start)) = (&outcome, report.start) {
            fleet.metrics.started(start, total.as_secs_f64());
        }
        return Invoked { outcome, report };
    }
}

/// Serves a request by one microVM, and writes down what that costs.
async fn serve(
    fleet: &Arc<Fleet>,
    code: &CodeStore,
    request: &Request,
    report: &mut Report,
) -> Result<Result<Answer, Failed>, InvokeFailure> {
    let version = &request.version;
    let seat = fleet.acquire(Wanted { version: Arc::clone(version), new: false }).await;
    let begin = Instant::now();
    report.queue_ns = nanoseconds(begin - request.accepted);
    let vm = match seat? {
        Seat::Warm(vm) => {
            report.start = Some(StartKind::warm);
            *vm
        }
        Seat::Start(booking) => {
            let started = start(fleet, code, version, booking, report).await;
            report.start_ns = nanoseconds(begin.elapsed());
            match started {
                Ok(vm) => vm,
                Err(LoadFailure::Load(LoadError::Function(failed))) => return Ok(Err(failed)),
                Err(LoadFailure::Start(StartError::Function(error))) => {
                    return Err(InvokeFailure::Restore(error));
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
    let Vm { monitor, mut agent, booking } = vm;
    let before = match monitor.process() {
        Some(process) if warm => ProcessCounters::of(process).unwrap_or_default(),
        _ => ProcessCounters::default(),
    };
    let asked = Instant::now();
    let (agent, answered) = spawn_blocking(move || {
        let answered = agent.invoke(&invocation);
        (agent, answered)
    })
    .await?;
    report.invoke_ns = nanoseconds(asked.elapsed());
    report.taken = Taken::by(&monitor, before);
    let vm = Vm { monitor, agent, booking };
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
                InvokeFailure::Dead(error)
            } else {
                InvokeFailure::Lost(error)
            })
        }
    }
}

/// Boots a version, lets it initialise, and freezes it.
pub(crate) async fn publish(
    fleet: Arc<Fleet>,
    code: CodeStore,
    version: Arc<Version>,
) -> Result<Snapshot, PublishFailure> {
    let wanted = Wanted { version: Arc::clone(&version), new: true };
    let Seat::Start(booking) = fleet.acquire(wanted).await? else {
        return Err(AcquireError::Closed.into());
    };
    fleet.publishes(&booking);
    let (monitor, _) = fleet.launcher.boot(&version).await.map_err(LoadFailure::from)?;
    let loaded = load(&fleet, &code, &version, &monitor, true).await;
    let frozen = match loaded {
        // The freeze has a connection of its own.
        Ok(agent) => {
            drop(agent);
            let place = fleet.launcher.place(&version);
            fleet.launcher.freeze(&monitor, place).await.map_err(Into::into)
        }
        Err(error) => Err(error.into()),
    };
    monitor.end().await;
    drop(booking);
    frozen
}

/// A microVM with the function in it: thawed where there is a snapshot, booted where there is none or the thaw fails.
async fn start(
    fleet: &Arc<Fleet>,
    code: &CodeStore,
    version: &Arc<Version>,
    booking: Booking,
    report: &mut Report,
) -> Result<Vm, LoadFailure> {
    if let Some(snapshot) = &version.snapshot {
        let thawed = thaw(fleet, version, snapshot).await;
        fleet.stand_by();
        match thawed {
            Ok((Thawed { monitor, report: thaw, standby }, agent)) => {
                fleet.began(&booking, &monitor, StartKind::thawed);
                report.start = Some(StartKind::thawed);
                (report.thaw, report.standby) = (Some(thaw), standby);
                return Ok(Vm { monitor, agent, booking });
            }
            Err(error @ LoadFailure::Start(StartError::Function(_))) => return Err(error),
            Err(error) => {
                report.thaw_failed = true;
                fleet.metrics.start_failures.inc();
                tracing::warn!(
                    function = version.function,
                    version = version.version,
                    error = &error as &dyn std::error::Error,
                    "the thaw failed: booting instead"
                );
            }
        }
    }
    let begin = Instant::now();
    let (monitor, boot) = fleet.launcher.boot(version).await?;
    let booted = Instant::now();
    (report.start, report.boot) = (Some(StartKind::cold), Some(boot));
    report.boot_ns = Some(nanoseconds(booted - begin));
    let loaded = load(fleet, code, version, &monitor, false).await;
    report.load_ns = Some(nanoseconds(booted.elapsed()));
    match loaded {
        Ok(agent) => {
            fleet.began(&booking, &monitor, StartKind::cold);
            Ok(Vm { monitor, agent, booking })
        }
        Err(error) => {
            monitor.end().await;
            Err(error)
        }
    }
}

async fn thaw(
    fleet: &Arc<Fleet>,
    version: &Version,
    snapshot: &Snapshot,
) -> Result<(Thawed, AgentClient), LoadFailure> {
    let thawed = fleet.launcher.thaw(version, snapshot).await?;
    let (socket, limit) = (thawed.monitor.vsock_socket(), fleet.launcher.start_limit);
    match spawn_blocking(move || AgentClient::connect(&socket, limit)).await? {
        Ok(agent) => Ok((thawed, agent)),
        Err(error) => {
            thawed.monitor.end().await;
            Err(error.into())
        }
    }
}

/// Sends a version's code to a microVM that has booted, and starts its runtime.
async fn load(
    fleet: &Fleet,
    code: &CodeStore,
    version: &Arc<Version>,
    monitor: &Monitor,
    snap_start: bool,
) -> Result<AgentClient, LoadFailure> {
    let (socket, limit) = (monitor.vsock_socket(), fleet.launcher.start_limit);
    let (code, version) = (code.clone(), Arc::clone(version));
    let environment = environment(fleet, &version);
    let loading = spawn_blocking(move || {
        let mut agent = AgentClient::connect(&socket, limit)?;
        let mut first = true;
        code.files(&version.code, |file| {
            agent.put(std::mem::take(&mut first), &file.path, file.executable, &file.contents)?;
            Ok::<_, LoadFailure>(())
        })?;
        agent.load_lambda(&LambdaLoad {
            name: version.function.clone(),
            version: version.version.clone(),
            handler: version.handler.clone(),
            environment,
            memory_mib: u64::from(version.memory),
            time_limit: limit,
            provided: version.runtime != Runtime::Python311,
            snap_start,
        })?;
        Ok(agent)
    });
    loading.await?
}

/// What the function finds in its environment besides what the agent puts there.
fn environment(fleet: &Fleet, version: &Version) -> BTreeMap<String, String> {
    let mut environment = version.environment.clone();
    let region = &fleet.launcher.region;
    let execution = match version.runtime {
        Runtime::Python311 => "AWS_Lambda_python3.11",
        Runtime::Provided2023 => "AWS_Lambda_provided.al2023",
        Runtime::Provided2 => "AWS_Lambda_provided.al2",
    };
    for (name, value) in [
        ("AWS_REGION", region.as_str()),
        ("AWS_DEFAULT_REGION", region),
        ("AWS_EXECUTION_ENV", execution),
    ] {
        environment.insert(name.to_owned(), value.to_owned());
    }
    environment
}

#[cfg(test)]
#[path = "run_tests.rs"]
mod tests;
