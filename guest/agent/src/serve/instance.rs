//! The loaded function, its runtime process, and the gate that admits requests.

use std::io;
use std::net::Ipv4Addr;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::freezer::Freezer;
use super::function::{self, ThisClone, WriteError};
use super::machine::Machine;
use super::openssl::Copies;
use super::runtime::{
    Credentials, ExchangeError, Identity, Outcome, Runtime, RuntimeApi, RuntimeConfig, StartError,
};
use super::vmstat::Vmstat;
use crate::protocol::{
    Answered, Failed, FunctionError, Identify, Invoke, Load, Loaded, MAX_ENTROPY_BYTES,
    MAX_EVENT_BYTES, MIN_ENTROPY_BYTES, Put, Refusal, RefusalKind, Reply, RoleCredentials, Usage,
};

/// Time limit for the runtime to prepare for a freeze or to reseed itself after a thaw. After it,
/// the runtime is restarted. The limit is generous: a thawed runtime reads all its pages from the
/// snapshot's medium, and the machine may be emulated.
const HOUSEKEEPING_LIMIT: Duration = Duration::from_secs(if cfg!(test) { 10 } else { 60 });

/// AWS Lambda's name for a runtime that exited or violated its protocol.
const EXIT_ERROR: &str = "Runtime.ExitError";

/// AWS Lambda's name for a `bootstrap` that cannot be executed.
const ENTRYPOINT_ERROR: &str = "Runtime.InvalidEntrypoint";

/// AWS Lambda's name for a runtime that the kernel killed for lack of memory.
const MEMORY_ERROR: &str = "Runtime.OutOfMemory";

/// The kernel's count of processes that it killed for lack of memory.
const MEMORY_KILLS: &str = "oom_kill";

const BROKEN_CHANNEL: &str = "Runtime wrote an invalid message and was killed";

/// Whether requests are admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Gate {
    /// The machine has booted and has no identity yet.
    Unidentified,
    /// Requests are admitted.
    Open,
    /// The machine is about to be frozen, is frozen, or is a clone that has no identity yet.
    Frozen,
}

/// One function in one runtime, used by one caller at a time.
#[derive(Debug)]
pub(crate) struct Instance {
    config: RuntimeConfig,
    gate: Gate,
    load: Option<Load>,
    runtime: Option<Runtime>,
    api: Option<RuntimeApi>,
    credentials: Credentials,
    generation: Option<Uuid>,
    instance_id: Option<String>,
    /// The address of the metadata service that the guest has a route to.
    metadata: Option<Ipv4Addr>,
    /// Whether the function's processes are stopped for a freeze.
    stopped: bool,
    /// The copies of OpenSSL in the stopped processes.
    openssl: Copies,
    /// [`MEMORY_KILLS`] when a runtime was last killed, or the agent started.
    memory_kills: u64,
    /// The most memory of the function's processes so far, in bytes.
    peak_memory: u64,
}

/// Why the instance did not perform an operation.
#[derive(Debug)]
pub(crate) enum Failure {
    Refused(Refusal),
    Function(Failed),
}

impl From<Failure> for Reply {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Refused(refusal) => Self::Refused(refusal),
            Failure::Function(failed) => Self::Failed(failed),
        }
    }
}

pub(crate) fn refusal(kind: RefusalKind, message: impl Into<String>) -> Failure {
    Failure::Refused(Refusal { kind, message: message.into() })
}

/// A refusal for a failed system call; `what` describes the operation.
pub(crate) fn system(what: &str, error: &dyn std::error::Error) -> Failure {
    let reason = error.source().map_or_else(|| error.to_string(), ToString::to_string);
    refusal(RefusalKind::System, format!("{what}: {reason}"))
}

impl Instance {
    pub(crate) fn new(config: RuntimeConfig) -> Self {
        let memory_kills = Vmstat::read(&config.counters).count(MEMORY_KILLS);
        Self {
            config,
            gate: Gate::Unidentified,
            load: None,
            runtime: None,
            api: None,
            credentials: Credentials::default(),
            generation: None,
            instance_id: None,
            metadata: None,
            stopped: false,
            openssl: Copies::default(),
            memory_kills,
            peak_memory: 0,
        }
    }

    /// Writes a part of a function's files and unloads the current function.
    pub(crate) fn put(&mut self, put: &Put) -> Result<(), Failure> {
        if self.gate == Gate::Frozen {
            return Err(refusal(
                RefusalKind::Frozen,
                "the guest is frozen: send an identify request first",
            ));
        }
        function::check_put(put).map_err(|reason| refusal(RefusalKind::BadRequest, reason))?;
        self.load = None;
        self.runtime = None;
        let RuntimeConfig { task_dir, layers_dir, .. } = &self.config;
        function::put(put, if put.layer { layers_dir } else { task_dir })
            .map_err(|error: WriteError| system(&error.to_string(), &error))
    }

    /// Loads a function in place of the current one.
    pub(crate) fn load(&mut self, load: Load) -> Result<Loaded, Failure> {
        if self.gate == Gate::Frozen {
            return Err(refusal(
                RefusalKind::Frozen,
                "the guest is frozen: send an identify request first",
            ));
        }
        function::check(&load).map_err(|reason| refusal(RefusalKind::BadRequest, reason))?;
        self.load = None;
        self.runtime = None;
        function::write(&load, &self.config.task_dir)
            .map_err(|error: WriteError| system(&error.to_string(), &error))?;
        self.credentials.set(load.credentials.clone());
        let started = Instant::now();
        let mut runtime = self.start(&load)?;
        let logs = runtime.take_logs();
        self.runtime = Some(runtime);
        // The files are on disk; a restart needs the other fields.
        self.load = Some(Load { files: Default::default(), ..load });
        Ok(Loaded { duration_ns: nanoseconds(started.elapsed()), logs })
    }

    /// Passes one event to the function, and an answer that it streams to `host`.
    pub(crate) fn invoke(
        &mut self,
        invoke: &Invoke,
        host: &mut dyn FnMut(&Reply),
    ) -> Result<Answered, Failure> {
        let started = Instant::now();
        let result = self.pass(invoke, host);
        if let Some(runtime) = &self.runtime {
            self.peak_memory = self.peak_memory.max(runtime.peak_memory());
        }
        let max_memory_bytes = self.peak_memory;
        match result {
            Ok(answered) => Ok(Answered { max_memory_bytes, ..answered }),
            Err(Failure::Function(failed)) => {
                let duration_ns = nanoseconds(started.elapsed());
                let usage = Some(Box::new(Usage { duration_ns, max_memory_bytes }));
                Err(Failure::Function(Failed { usage, ..failed }))
            }
            refused => refused,
        }
    }

    fn pass(&mut self, invoke: &Invoke, host: &mut dyn FnMut(&Reply)) -> Result<Answered, Failure> {
        self.check_open()?;
        function::check_time_limit(invoke.time_limit_ms)
            .map_err(|reason| refusal(RefusalKind::BadRequest, reason))?;
        if invoke.event.get().len() > MAX_EVENT_BYTES {
            let reason = format!("the event exceeds the limit of {MAX_EVENT_BYTES} bytes");
            return Err(refusal(RefusalKind::BadRequest, reason));
        }
        self.renew_credentials(invoke.credentials.as_ref());
        let mut runtime = self.take_open_runtime()?;
        let limit = Duration::from_millis(invoke.time_limit_ms);
        let mut started = Instant::now();
        let mut outcome = runtime.invoke(invoke, started + limit, host);
        if let Err(ExchangeError::EndedBefore) = outcome {
            drop(runtime);
            runtime = self.take_open_runtime()?;
            started = Instant::now();
            outcome = runtime.invoke(invoke, started + limit, host);
        }
        let duration_ns = nanoseconds(started.elapsed());
        let outcome = match outcome {
            Ok(outcome) => outcome,
            Err(error @ ExchangeError::NotRestored) => {
                self.runtime = Some(runtime);
                return Err(refusal(RefusalKind::NotIdentified, error.to_string()));
            }
            Err(error) => {
                let what = format!("RequestId: {} Error: ", invoke.request_id);
                return Err(self.ended(runtime, &error, &what, "Task", limit));
            }
        };
        let logs = runtime.take_logs();
        self.runtime = Some(runtime);
        match outcome {
            Outcome::Answer(answer) => Ok(Answered {
                request_id: invoke.request_id.clone(),
                answer,
                duration_ns,
                logs,
                max_memory_bytes: 0,
            }),
            Outcome::Error(error) => Err(Failure::Function(Failed::new(error, logs))),
            Outcome::Done => {
                self.runtime = None;
                Err(failed(EXIT_ERROR, BROKEN_CHANNEL.to_owned(), logs))
            }
        }
    }

    /// Closes the gate and prepares the guest for a freeze: the runtime has collected its garbage,
    /// the function's processes are stopped, and file systems are synced.
    pub(crate) fn prepare_freeze(&mut self, machine: &dyn Machine) -> Result<(), Failure> {
        self.gate = Gate::Frozen;
        if self.load.is_some() && !self.stopped {
            self.stop_runtime()?;
            let processes = self.config.freezer.as_ref().map_or(Ok(Vec::new()), Freezer::processes);
            let processes =
                processes.map_err(|e| system("cannot list the function's processes", &e))?;
            self.openssl = Copies::take_over(&processes, &self.openssl)
                .map_err(|e| system("cannot find the copies of OpenSSL", &e))?;
        }
        machine.sync();
        machine.settle();
        Ok(())
    }

    /// Makes this machine differ from every other clone, then opens the gate.
    pub(crate) fn identify(
        &mut self,
        identify: &Identify,
        machine: &dyn Machine,
    ) -> Result<(), Failure> {
        let entropy = &identify.entropy.0;
        if !(MIN_ENTROPY_BYTES..=MAX_ENTROPY_BYTES).contains(&entropy.len()) {
            let count = entropy.len();
            let reason = format!(
                "{count} bytes of entropy are not valid: send {MIN_ENTROPY_BYTES} to {MAX_ENTROPY_BYTES}"
            );
            return Err(refusal(RefusalKind::BadRequest, reason));
        }
        if !is_host_name(&identify.instance_id) {
            let reason = "an instance id is 1 to 63 lower-case letters, digits or inner hyphens";
            return Err(refusal(RefusalKind::BadRequest, reason));
        }
        if self.gate == Gate::Frozen && self.generation == Some(identify.generation) {
            let reason = "the generation is the one before the freeze: \
                          use a new generation for every thaw";
            return Err(refusal(RefusalKind::Frozen, reason));
        }
        // If a step fails, the gate stays closed.
        self.gate = Gate::Frozen;
        machine.reseed(entropy).map_err(|e| system("cannot reseed the kernel", &e))?;
        machine
            .set_clock(identify.wall_clock_ns)
            .map_err(|e| system("cannot set the clock", &e))?;
        machine
            .set_host_name(&identify.instance_id)
            .map_err(|e| system("cannot set the host name", &e))?;
        // Before the programs that were stopped run.
        if let Some(addresses) = &identify.network {
            machine
                .set_network(addresses)
                .map_err(|e| system("cannot set up the network interface", &e))?;
        }
        let (earlier, metadata) = (self.metadata, identify.metadata);
        if earlier.is_some() || metadata.is_some() {
            machine
                .set_metadata(earlier, metadata)
                .map_err(|e| system("cannot set the route to the metadata service", &e))?;
            self.metadata = metadata;
        }
        machine
            .publish_generation(identify.generation)
            .map_err(|e| system("cannot publish the generation", &e))?;
        self.openssl.renew().map_err(|e| system("cannot make OpenSSL reseed", &e))?;
        self.instance_id = Some(identify.instance_id.clone());
        // The function's hooks after a restore may use them.
        self.renew_credentials(identify.credentials.as_ref());
        let before = self.generation.replace(identify.generation);
        self.resume_runtime().inspect_err(|_| self.generation = before)?;
        self.gate = Gate::Open;
        Ok(())
    }

    /// Replaces the keys of the function's role, if there are newer ones.
    fn renew_credentials(&self, credentials: Option<&RoleCredentials>) {
        if let Some(credentials) = credentials {
            self.credentials.set(Some(credentials.clone()));
        }
    }

    /// The loaded function's name.
    pub(crate) fn function(&self) -> Option<&str> {
        self.load.as_ref().map(|load| load.name.as_str())
    }

    /// The loaded function's entry point.
    pub(crate) fn handler(&self) -> Option<&str> {
        self.load.as_ref().map(|load| load.handler.as_str())
    }

    /// The current identity.
    pub(crate) fn instance_id(&self) -> Option<&str> {
        self.instance_id.as_deref()
    }

    /// Whether requests are admitted.
    pub(crate) fn is_open(&self) -> bool {
        self.gate == Gate::Open
    }

    fn check_open(&self) -> Result<(), Failure> {
        if self.is_open() { Ok(()) } else { Err(not_identified()) }
    }

    /// Stops the function's processes. A runtime that cannot reseed itself is replaced if possible
    /// by a new process.
    fn stop_runtime(&mut self) -> Result<(), Failure> {
        for _ in 0..2 {
            let mut runtime = self.take_runtime()?;
            match runtime.stop(Instant::now() + HOUSEKEEPING_LIMIT) {
                Ok(Outcome::Done) => {
                    runtime.take_logs();
                    self.runtime = Some(runtime);
                    self.stopped = true;
                    return Ok(());
                }
                Ok(Outcome::Error(_)) if !runtime.waits_for_restore() => {}
                Ok(Outcome::Error(error)) => return Err(not_freezable(&error.to_string())),
                Ok(Outcome::Answer(_)) => {
                    return Err(not_freezable("it violated the protocol of its channel"));
                }
                Err(error @ ExchangeError::NotRestorable) => {
                    // The runtime is intact and continues to run.
                    self.runtime = Some(runtime);
                    return Err(not_freezable(&error.to_string()));
                }
                Err(error) => return Err(not_freezable(&error.to_string())),
            }
        }
        Err(not_freezable("its processes cannot reseed themselves"))
    }

    /// A runtime that cannot reseed itself is replaced if possible by a new process, which shares
    /// no state with other clones. One that does not answer in time fails the clone.
    fn resume_runtime(&mut self) -> Result<(), Failure> {
        self.stopped = false;
        let Some(mut runtime) = self.runtime.take() else { return Ok(()) };
        let (instance_id, log_stream_name) = self.identity();
        let identity = Identity { instance_id: &instance_id, log_stream_name: &log_stream_name };
        let deadline = Instant::now() + HOUSEKEEPING_LIMIT;
        let replaceable = !runtime.waits_for_restore();
        match runtime.resume(identity, deadline) {
            Ok(Outcome::Done) => self.runtime = Some(runtime),
            Err(error @ ExchangeError::TimedOut) => {
                return Err(self.ended(runtime, &error, "", "Restore", HOUSEKEEPING_LIMIT));
            }
            _ if replaceable => {
                drop(runtime);
                self.runtime = Some(self.take_runtime()?);
            }
            Ok(Outcome::Error(error)) => {
                return Err(Failure::Function(Failed::new(error, runtime.take_logs())));
            }
            Ok(Outcome::Answer(_)) => {
                return Err(failed(EXIT_ERROR, BROKEN_CHANNEL.to_owned(), runtime.take_logs()));
            }
            Err(error) => {
                return Err(self.ended(runtime, &error, "", "Restore", HOUSEKEEPING_LIMIT));
            }
        }
        Ok(())
    }

    /// The current instance id and log stream's name.
    fn identity(&self) -> (String, String) {
        let version = self.load.as_ref().map_or("", |load| &load.version);
        let log_stream_name = function::log_stream_name(version, self.generation);
        (self.instance_id.clone().unwrap_or_default(), log_stream_name)
    }

    /// Takes the running runtime, or starts a new one if it has exited. The caller puts it back if
    /// it can be used again.
    fn take_runtime(&mut self) -> Result<Runtime, Failure> {
        if let Some(runtime) = self.runtime.take() {
            return Ok(runtime);
        }
        let Some(load) = self.load.clone() else {
            return Err(refusal(
                RefusalKind::NotLoaded,
                "no function is loaded: send a load request first",
            ));
        };
        self.start(&load)
    }

    /// [`Self::take_runtime`] of an open instance. A new runtime with SnapStart has run its hooks.
    fn take_open_runtime(&mut self) -> Result<Runtime, Failure> {
        let is_new = self.runtime.is_none();
        let runtime = self.take_runtime()?;
        if !(is_new && runtime.waits_for_restore()) {
            return Ok(runtime);
        }
        self.runtime = Some(runtime);
        self.resume_runtime()?;
        self.take_runtime()
    }

    fn start(&mut self, load: &Load) -> Result<Runtime, Failure> {
        let task_dir = &self.config.task_dir;
        let clone = ThisClone { id: self.instance_id.as_deref(), generation: self.generation };
        let environment = function::environment(load, task_dir, clone);
        let limit = Duration::from_millis(load.time_limit_ms);
        let deadline = Instant::now() + limit;
        let mut runtime =
            Runtime::start(&self.config, &mut self.api, &self.credentials, load, environment)
                .map_err(|error| match error {
                    StartError::NoBootstrap(_) | StartError::Bootstrap { .. } => {
                        failed(ENTRYPOINT_ERROR, error.to_string(), String::new())
                    }
                    StartError::Spawn(_) | StartError::System(_) => {
                        refusal(RefusalKind::System, error.to_string())
                    }
                })?;
        match runtime.init(&self.config, load, deadline) {
            Ok(Outcome::Done) => Ok(runtime),
            Ok(Outcome::Error(error)) => {
                Err(Failure::Function(Failed::new(error, runtime.take_logs())))
            }
            Ok(Outcome::Answer(_)) => {
                Err(failed(EXIT_ERROR, BROKEN_CHANNEL.to_owned(), runtime.take_logs()))
            }
            Err(error) => Err(self.ended(runtime, &error, "", "Init", limit)),
        }
    }

    /// Ends a runtime that returned no outcome and returns the reason in AWS Lambda's terms.
    fn ended(
        &mut self,
        mut runtime: Runtime,
        error: &ExchangeError,
        prefix: &str,
        phase: &str,
        limit: Duration,
    ) -> Failure {
        self.peak_memory = self.peak_memory.max(runtime.peak_memory());
        let (kind, text) = match error {
            ExchangeError::TimedOut => {
                let seconds = limit.as_secs_f64();
                (FunctionError::TIME_OUT, format!("{phase} timed out after {seconds:.2} seconds"))
            }
            ExchangeError::Ended | ExchangeError::EndedBefore => {
                let end = runtime.end();
                self.peak_memory = self.peak_memory.max(largest_ended());
                (self.exit_kind(&end), exit_text(end))
            }
            ExchangeError::Broken => (EXIT_ERROR, BROKEN_CHANNEL.to_owned()),
            ExchangeError::NotRestorable | ExchangeError::NotRestored => {
                (EXIT_ERROR, error.to_string())
            }
            ExchangeError::Io(error) => (EXIT_ERROR, format!("Runtime cannot be reached: {error}")),
        };
        failed(kind, format!("{prefix}{text}"), runtime.take_logs())
    }

    /// AWS Lambda's name for the end of a runtime. The signal, and the count of such kills, show
    /// that the kernel killed it for lack of memory.
    fn exit_kind(&mut self, end: &io::Result<Option<ExitStatus>>) -> &'static str {
        let killed = matches!(end, Ok(Some(status)) if status.signal() == Some(libc::SIGKILL));
        if !killed {
            return EXIT_ERROR;
        }
        let kills = Vmstat::read(&self.config.counters).count(MEMORY_KILLS);
        let before = std::mem::replace(&mut self.memory_kills, kills);
        if kills > before { MEMORY_ERROR } else { EXIT_ERROR }
    }
}

pub(crate) fn not_identified() -> Failure {
    let reason = "this machine has no identity yet: send an identify request first";
    refusal(RefusalKind::NotIdentified, reason)
}

fn failed(kind: &str, text: String, logs: String) -> Failure {
    let error = FunctionError {
        error_type: kind.to_owned(),
        error_message: text,
        ..FunctionError::default()
    };
    Failure::Function(Failed::new(error, logs))
}

fn exit_text(end: io::Result<Option<ExitStatus>>) -> String {
    match end {
        Ok(Some(status)) if status.success() => "Runtime exited without providing a reason".into(),
        Ok(Some(status)) => format!("Runtime exited with error: {status}"),
        Ok(None) => "Runtime closed its channel and was killed".into(),
        Err(error) => format!("Runtime exited, and its status cannot be read: {error}"),
    }
}

fn not_freezable(reason: &str) -> Failure {
    let reason = format!("the runtime cannot be frozen: {reason}");
    refusal(RefusalKind::System, reason)
}

/// The largest resident set of a child that has ended and was waited for, in bytes.
fn largest_ended() -> u64 {
    // SAFETY: `rusage` has only integers, of which zero is a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is valid for writes and outlives the call.
    let result = unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut usage) };
    let kib = if result == 0 { usage.ru_maxrss } else { 0 };
    u64::try_from(kib).unwrap_or_default() << 10
}

/// Whether `name` is one label of a host name in lower case (RFC 1123, section 2.1).
fn is_host_name(name: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..64).contains(&name.len())
        && name.bytes().all(inner)
        && !name.starts_with('-')
        && !name.ends_with('-')
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
