//! A process that uses AWS Lambda's Runtime API: `awslambdaric`, or the `bootstrap` of a function
//! or of a root image.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant, SystemTime};

use hyper::StatusCode;
use serde_json::value::RawValue;
use tokio::sync::mpsc::error::TryRecvError;

use super::api::{Call, CallKind, Calls, Part, Parts, PostedError, RuntimeApi};
use super::channel::{Channel, Identity};
use super::process::Process;
use super::{ExchangeError, Outcome, RuntimeConfig, StartError};
use crate::protocol::{
    Base64Bytes, FunctionError, Invoke, Load, MAX_ANSWER_BYTES, MAX_PART_BYTES, MAX_STREAM_BYTES,
    Reply, RuntimeKind,
};

/// The Python program: identity for clones, then AWS Lambda's unmodified runtime interface client.
const BOOTSTRAP: &str = concat!(include_str!("../../clone.py"), include_str!("../../bootstrap.py"));

/// Where AWS's SDKs send segments. The guest has no daemon there, and they are lost.
const XRAY_DAEMON: &str = "127.0.0.1:2000";

/// Maximum number of characters of an error's texts that are returned.
const MAX_TEXT: usize = 16_384;

/// The error type for a posted document that is not an error.
const UNKNOWN_ERROR: &str = "Runtime.Unknown";

/// A running process that fetches its events.
#[derive(Debug)]
pub(crate) struct LambdaRuntime {
    process: Process,
    calls: Calls,
    waiting: Option<Call>,
    /// The channel to `bootstrap.py`, which answers it between the hooks of SnapStart.
    channel: Option<Channel>,
    /// Whether the function's before-snapshot hooks have run, and its after-restore hooks have not.
    restorable: bool,
}

/// Adds the environment variables of AWS Lambda's runtimes.
pub(super) fn add_environment(
    environment: &mut BTreeMap<String, String>,
    config: &RuntimeConfig,
    api: &RuntimeApi,
    load: &Load,
) {
    let runtime_dir = config.runtime_dir.display().to_string();
    let own = [
        ("AWS_LAMBDA_RUNTIME_API", api.address().to_string()),
        ("LAMBDA_RUNTIME_DIR", runtime_dir.clone()),
    ];
    environment.extend(own.map(|(name, value)| (name.to_owned(), value)));
    if load.credentials.is_some() {
        environment.extend(api.credentials_environment());
    }
    // The function may set its own, as in AWS Lambda.
    let task_dir = config.task_dir.display();
    let libraries = format!("{runtime_dir}:{runtime_dir}/lib:{task_dir}:{task_dir}/lib:/opt/lib");
    let kind = if load.snap_start { "snap-start" } else { "on-demand" };
    let defaults = [
        // The host knows that of a function that was initialised before there was a request.
        ("AWS_LAMBDA_INITIALIZATION_TYPE", kind.to_owned()),
        ("PYTHONPATH", runtime_dir),
        ("LD_LIBRARY_PATH", libraries),
        ("AWS_XRAY_CONTEXT_MISSING", "LOG_ERROR".to_owned()),
        ("AWS_XRAY_DAEMON_ADDRESS", XRAY_DAEMON.to_owned()),
    ];
    for (name, value) in defaults {
        environment.entry(name.to_owned()).or_insert(value);
    }
}

impl LambdaRuntime {
    pub(super) fn start(
        config: &RuntimeConfig,
        api: &RuntimeApi,
        kind: RuntimeKind,
        environment: &BTreeMap<String, String>,
    ) -> Result<Self, StartError> {
        let of_image = config.runtime_dir.join("bootstrap");
        let of_function = config.task_dir.join("bootstrap");
        let of_layer = config.layers_dir.join("bootstrap");
        let bootstrap = match kind {
            RuntimeKind::Image => of_image,
            _ if !of_function.is_file() && of_layer.is_file() => of_layer,
            _ => of_function,
        };
        let mut command;
        let mut channel = None;
        match kind {
            RuntimeKind::Own | RuntimeKind::Python => {
                command = Command::new(&config.python);
                command.args(["-u", "-c", BOOTSTRAP]);
                channel = Some(Channel::to(&mut command)?);
            }
            _ if !bootstrap.is_file() => return Err(StartError::NoBootstrap(bootstrap)),
            _ if !is_program(&bootstrap)? => {
                let reason = "exec format error";
                return Err(StartError::Bootstrap { path: bootstrap, reason });
            }
            RuntimeKind::Provided | RuntimeKind::Image => {
                command = Command::new(&bootstrap);
                command.stdin(Stdio::null());
            }
        }
        let calls = api.connect()?;
        let process = Process::start(command, config, environment);
        let process = process.map_err(|error| match error {
            StartError::Spawn(cause) if channel.is_none() => refused(bootstrap, cause),
            error => error,
        })?;
        Ok(Self { process, calls, waiting: None, channel, restorable: false })
    }

    /// Waits until the runtime requests its first event or its restore, or its bootstrap reports
    /// that the before-snapshot hooks have run.
    pub(super) fn init(
        &mut self,
        snap_start: bool,
        deadline: Instant,
    ) -> Result<Outcome, ExchangeError> {
        let Some(call) = self.call(deadline, snap_start)? else {
            self.restorable = true;
            return match &self.channel {
                Some(channel) => channel.outcome(&mut self.process, deadline),
                None => Err(ExchangeError::Broken),
            };
        };
        match &call.kind {
            CallKind::Next if !snap_start => {}
            CallKind::RestoreNext if snap_start && self.channel.is_none() => self.restorable = true,
            CallKind::InitError(_) => return Ok(Outcome::Error(self.posted(call))),
            _ => return Err(self.stray(call)),
        }
        self.waiting = Some(call);
        Ok(Outcome::Done)
    }

    /// Stops the function's processes. The main thread of Python keeps the interpreter's lock.
    pub(super) fn stop(&mut self, deadline: Instant) -> Result<Outcome, ExchangeError> {
        if !self.restorable {
            return Err(ExchangeError::NotRestorable);
        }
        match &mut self.channel {
            Some(channel) => channel.stop(&mut self.process, deadline),
            None => self.process.stop_others(deadline).map(|()| Outcome::Done),
        }
    }

    /// Lets the processes run again, and the runtime run its after-restore hooks, and waits until
    /// it requests an event.
    pub(super) fn resume(
        &mut self,
        identity: Identity<'_>,
        deadline: Instant,
    ) -> Result<Outcome, ExchangeError> {
        if !self.restorable {
            return Err(ExchangeError::NotRestorable);
        }
        let waiting = match &mut self.channel {
            Some(channel) => {
                match channel.resume(&mut self.process, identity, deadline)? {
                    Outcome::Done => {}
                    other => return Ok(other),
                }
                self.next_call(deadline)?
            }
            None => {
                self.process.resume_others()?;
                self.waiting.take().ok_or(ExchangeError::NotRestorable)?
            }
        };
        if !matches!(waiting.kind, CallKind::RestoreNext) {
            return Err(self.stray(waiting));
        }
        self.restorable = false;
        waiting.answer(&[], "{}");
        let call = self.next_call(deadline)?;
        match &call.kind {
            CallKind::Next => {
                self.waiting = Some(call);
                Ok(Outcome::Done)
            }
            CallKind::RestoreError(_) => Ok(Outcome::Error(self.posted(call))),
            _ => Err(self.stray(call)),
        }
    }

    /// Whether the function waits for its restore.
    pub(super) fn is_restorable(&self) -> bool {
        self.restorable
    }

    pub(super) fn invoke(
        &mut self,
        invoke: &Invoke,
        deadline: Instant,
        host: &mut dyn FnMut(&Reply),
    ) -> Result<Outcome, ExchangeError> {
        if self.restorable {
            return Err(ExchangeError::NotRestored);
        }
        let next = match self.waiting.take() {
            Some(call) => call,
            // After a refused answer, `awslambdaric` exits.
            None => self.next_call(deadline).map_err(|error| match error {
                ExchangeError::Ended => ExchangeError::EndedBefore,
                error => error,
            })?,
        };
        // A call outlives the process that has sent it.
        self.process.check_running()?;
        match next.kind {
            CallKind::Next => respond_with_event(next, invoke, deadline),
            _ => return Err(self.stray(next)),
        }
        loop {
            let mut call = self.next_call(deadline)?;
            match &mut call.kind {
                CallKind::Response { request_id, .. }
                | CallKind::Stream { request_id, .. }
                | CallKind::InvocationError { request_id, .. }
                    if *request_id != invoke.request_id =>
                {
                    let text = "this request is not in flight";
                    call.refuse(StatusCode::BAD_REQUEST, "InvalidRequestID", text);
                }
                CallKind::Response { body, .. } if body.len() > MAX_ANSWER_BYTES => {
                    return Ok(refuse_long(call, MAX_ANSWER_BYTES));
                }
                CallKind::Response { body, .. } => {
                    let answer = answer(body);
                    call.accept();
                    return Ok(answer);
                }
                CallKind::Stream { content_type, parts, .. } => {
                    let mut body = Vec::new();
                    let streamed = if invoke.stream {
                        host(&Reply::Begun { content_type: content_type.take() });
                        self.stream(parts, MAX_STREAM_BYTES, deadline, &mut |bytes| {
                            for part in bytes.chunks(MAX_PART_BYTES) {
                                host(&Reply::Part(Base64Bytes(part.to_vec())));
                            }
                        })
                    } else {
                        self.stream(parts, MAX_ANSWER_BYTES, deadline, &mut |bytes| {
                            body.extend_from_slice(bytes);
                        })
                    };
                    return match streamed? {
                        Streamed::Whole => {
                            call.accept();
                            Ok(answer(&body))
                        }
                        Streamed::Failed(posted) => {
                            call.accept();
                            Ok(Outcome::Error(read_error(&posted)))
                        }
                        Streamed::TooLong(limit) => Ok(refuse_long(call, limit)),
                        Streamed::CutOff => self.cut_off(deadline),
                    };
                }
                CallKind::InvocationError { .. } => return Ok(Outcome::Error(self.posted(call))),
                // The runtime abandoned the request without a response.
                _ => return Err(self.stray(call)),
            }
        }
    }

    /// Passes the parts of an answer to `take`, up to `limit` bytes.
    fn stream(
        &mut self,
        parts: &mut Parts,
        limit: usize,
        deadline: Instant,
        take: &mut dyn FnMut(&[u8]),
    ) -> Result<Streamed, ExchangeError> {
        let mut left = limit;
        loop {
            match self.part(parts, deadline)? {
                Some(Part::Bytes(bytes)) if bytes.len() > left => {
                    return Ok(Streamed::TooLong(limit));
                }
                Some(Part::Bytes(bytes)) => {
                    left -= bytes.len();
                    take(&bytes);
                }
                Some(Part::End(None)) => return Ok(Streamed::Whole),
                Some(Part::End(Some(posted))) => return Ok(Streamed::Failed(posted)),
                None => return Ok(Streamed::CutOff),
            }
        }
    }

    /// Waits for the next part of an answer. `None` if the runtime has closed the connection.
    fn part(
        &mut self,
        parts: &mut Parts,
        deadline: Instant,
    ) -> Result<Option<Part>, ExchangeError> {
        let mut ended = false;
        loop {
            // Parts that arrive without a pause must not delay the end of the time limit.
            if Instant::now() >= deadline {
                return Err(ExchangeError::TimedOut);
            }
            match self.calls.part(parts) {
                Ok(part) => return Ok(Some(part)),
                Err(TryRecvError::Disconnected) => return Ok(None),
                Err(TryRecvError::Empty) if ended => return Err(ExchangeError::Ended),
                Err(TryRecvError::Empty) => {}
            }
            ended = self.process.wait(&[self.calls.event()], Some(deadline))?.ended;
        }
    }

    /// The outcome of an answer whose connection was closed before its end: the process has ended,
    /// or it goes on with the next event.
    fn cut_off(&mut self, deadline: Instant) -> Result<Outcome, ExchangeError> {
        let call = self.next_call(deadline)?;
        if !matches!(call.kind, CallKind::Next) {
            return Err(self.stray(call));
        }
        self.waiting = Some(call);
        let text = "The connection was closed before the end of the response.".to_owned();
        Ok(Outcome::Error(error("Runtime.TruncatedResponse", text)))
    }

    pub(super) fn take_logs(&mut self) -> String {
        self.process.take_logs()
    }

    pub(super) fn peak_memory(&self) -> u64 {
        self.process.peak_memory()
    }

    pub(super) fn end(&mut self) -> io::Result<Option<ExitStatus>> {
        self.process.end()
    }

    /// Waits for the next call.
    fn next_call(&mut self, deadline: Instant) -> Result<Call, ExchangeError> {
        self.call(deadline, false)?.ok_or(ExchangeError::Broken)
    }

    /// Waits for the next call, or, if `or_channel`, until the channel is readable.
    fn call(&mut self, deadline: Instant, or_channel: bool) -> Result<Option<Call>, ExchangeError> {
        let mut ended = false;
        loop {
            if let Some(call) = self.calls.take() {
                return Ok(Some(call));
            }
            if ended {
                return Err(ExchangeError::Ended);
            }
            // The process may have made a call before it ended, so check once more.
            let event = self.calls.event();
            let channel = self.channel.as_ref().filter(|_| or_channel).map(Channel::fd);
            let watched: Vec<_> = [event].into_iter().chain(channel).collect();
            let ready = self.process.wait(&watched, Some(deadline))?;
            ended = ready.ended;
            let channel_ready = or_channel && ready.channels.get(1).is_some_and(|ready| *ready);
            if channel_ready {
                return Ok(None);
            }
        }
    }

    /// The error in a call that posts one.
    fn posted(&mut self, call: Call) -> FunctionError {
        let found = match &call.kind {
            CallKind::InvocationError { posted, .. }
            | CallKind::InitError(posted)
            | CallKind::RestoreError(posted) => read_error(posted),
            _ => error(UNKNOWN_ERROR, String::new()),
        };
        call.accept();
        found
    }

    /// Refuses a call that is not valid in the current state.
    fn stray(&mut self, call: Call) -> ExchangeError {
        let text = "this call is not valid in the current state";
        call.refuse(StatusCode::FORBIDDEN, "InvalidStateTransition", text);
        ExchangeError::Broken
    }
}

/// How a streamed answer ended.
enum Streamed {
    Whole,
    Failed(PostedError),
    /// It has more bytes than this limit.
    TooLong(usize),
    /// The runtime closed the connection.
    CutOff,
}

/// Refuses an answer that is longer than `limit`.
fn refuse_long(call: Call, limit: usize) -> Outcome {
    let error = FunctionError::too_long(limit);
    call.refuse(StatusCode::PAYLOAD_TOO_LARGE, &error.error_type, &error.error_message);
    Outcome::Error(error)
}

/// Whether a file is a script with an interpreter, or a program for this processor. The C library
/// would have the shell run any other file.
fn is_program(path: &Path) -> io::Result<bool> {
    let mut head = Vec::new();
    File::open(path)?.take(20).read_to_end(&mut head)?;
    // e_machine of the ELF header, of 64 and of 32 bits.
    let machines: [&[u8]; 2] = [&libc::EM_X86_64.to_le_bytes(), &libc::EM_386.to_le_bytes()];
    let is_elf = head.starts_with(b"\x7fELF");
    Ok(head.starts_with(b"#!") || is_elf && head.get(18..).is_some_and(|m| machines.contains(&m)))
}

/// The error of a `bootstrap` that did not start. The texts are those of AWS Lambda.
fn refused(path: PathBuf, cause: io::Error) -> StartError {
    let reason = match cause.raw_os_error() {
        // Its interpreter is missing: the file exists.
        Some(libc::ENOENT) => "no such file or directory",
        Some(libc::EACCES) => "permission denied",
        _ => return StartError::Spawn(cause),
    };
    StartError::Bootstrap { path, reason }
}

/// Responds to a request for the next event.
fn respond_with_event(call: Call, invoke: &Invoke, deadline: Instant) {
    let left = deadline.saturating_duration_since(Instant::now());
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or(Duration::ZERO);
    let deadline_ms = (now + left).as_millis().to_string();
    let mut headers = vec![
        ("lambda-runtime-aws-request-id", invoke.request_id.as_str()),
        ("lambda-runtime-deadline-ms", deadline_ms.as_str()),
    ];
    let optional = [
        ("lambda-runtime-invoked-function-arn", &invoke.function_arn),
        ("lambda-runtime-client-context", &invoke.client_context),
        ("lambda-runtime-trace-id", &invoke.trace_id),
    ];
    for (name, value) in optional {
        headers.extend(value.as_deref().map(|value| (name, value)));
    }
    call.answer(&headers, invoke.event.get());
}

fn answer(body: &[u8]) -> Outcome {
    let text = String::from_utf8(body.to_vec()).map_err(|error| error.to_string());
    let json = text.and_then(|text| {
        if text.trim().is_empty() {
            // Runtimes post an empty body for a missing result.
            return Ok(RawValue::NULL.to_owned());
        }
        RawValue::from_string(text).map_err(|error| error.to_string())
    });
    match json {
        Ok(answer) => Outcome::Answer(answer),
        Err(reason) => {
            let text = format!("The response is not JSON: {reason}");
            Outcome::Error(error("Runtime.InvalidResponse", text))
        }
    }
}

fn read_error(posted: &PostedError) -> FunctionError {
    let kind = || posted.kind.clone().unwrap_or_else(|| UNKNOWN_ERROR.to_owned());
    let mut found: FunctionError = serde_json::from_slice(&posted.body)
        .unwrap_or_else(|_| error("", String::from_utf8_lossy(&posted.body).into_owned()));
    if found.error_type.is_empty() {
        found.error_type = kind();
    }
    let mut texts = vec![&mut found.error_type, &mut found.error_message];
    if let Some(frames) = &mut found.frames {
        frames.lines().truncate(MAX_FRAMES);
        texts.extend(frames.lines());
    }
    for text in texts {
        if let Some((end, _)) = text.char_indices().nth(MAX_TEXT) {
            text.truncate(end);
        }
    }
    found
}

/// Maximum number of stack frames of an error that are returned.
const MAX_FRAMES: usize = 64;

fn error(kind: &str, message: String) -> FunctionError {
    FunctionError {
        error_type: kind.to_owned(),
        error_message: message,
        ..FunctionError::default()
    }
}
