//! A connection to the agent.

use std::collections::BTreeMap;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use firn_agent::protocol::{
    Base64Bytes, Failed, FunctionError, Identify, Invoke, Load, Loaded, MAX_ANSWER_BYTES,
    MAX_EVENT_BYTES, MAX_FUNCTION_BYTES, MAX_PART_BYTES, MAX_REPLY_LENGTH, MAX_REQUEST_LENGTH,
    MAX_STREAM_BYTES, NEWEST_VERSION, OLDEST_VERSION, Pages, Put, Reply, Request, RoleCredentials,
    RuntimeKind, Status, Timed, Usage, receive, send,
};
use firn_base::nanoseconds;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use uuid::Uuid;

use super::connect::{Route, after, connect_until, try_connect};
use super::errors::{
    ConnectError, EventError, ExchangeError, IdentifyError, InvokeError, LoadError, PagesError,
    PrepareFreezeError, PutError, ShutdownError, StatusError, receiving, sending,
};
use crate::function::Function;
use crate::identity::Identity;

/// The default of what [`AgentClient::set_grace`] sets: how much longer than a time limit the host
/// waits. It covers the queue, a runtime that is started again, and page faults of the guest.
const GRACE: Duration = Duration::from_secs(10);

/// A connection to the agent of one microVM. One request at a time; several connections may be
/// open at once. After an [`ExchangeError`] the connection is closed and of no further use.
#[derive(Debug)]
pub struct AgentClient {
    stream: UnixStream,
    grace: Duration,
    credentials: Option<RoleCredentials>,
}

/// How a function is loaded.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// How long the runtime may take to start and to import the function.
    pub time_limit: Duration,
    /// Memory of the microVM in MiB, shown to the function.
    pub memory_mib: u64,
    /// Environment variables of the function.
    pub environment: BTreeMap<String, String>,
}

/// A function for one of AWS Lambda's runtimes, whose files were [put](AgentClient::put) into the
/// guest.
#[derive(Debug, Clone)]
pub struct LambdaLoad {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Its entry point, as AWS Lambda writes it.
    pub handler: String,
    /// Environment variables of the function.
    pub environment: BTreeMap<String, String>,
    /// Memory of the function in MiB, shown to it.
    pub memory_mib: u64,
    /// How long the runtime may take to start and to initialise the function.
    pub time_limit: Duration,
    /// What runs it.
    pub runtime: RuntimeKind,
    /// Whether it is to be frozen before its first request.
    pub snap_start: bool,
}

/// One request to a function.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Invocation {
    request_id: String,
    event: Box<RawValue>,
    time_limit: Duration,
    function_arn: Option<String>,
    client_context: Option<String>,
    trace_id: Option<String>,
}

/// What a function answered.
#[derive(Debug, Clone)]
pub struct Answer {
    /// The answer: one JSON document, or what the function has streamed. `null` if an
    /// [`AnswerSink`] has it.
    pub payload: Vec<u8>,
    /// Event handed to the runtime to answer read, by the guest's clock.
    pub duration: Duration,
    /// The end of what the function printed meanwhile, as the guest sent it: control characters
    /// included.
    pub logs: String,
    /// The most memory of the function's processes so far, bytes: the sum of their largest resident
    /// sets.
    pub max_memory: u64,
}

/// Takes an answer that a function streams.
pub trait AnswerSink {
    /// The function has begun to stream an answer of a content type.
    fn begin(&mut self, content_type: Option<String>);

    /// Takes the next bytes of the answer, within the function's time limit, which ends at
    /// `deadline`. Meanwhile the function waits.
    fn part(&mut self, bytes: Vec<u8>, deadline: Instant);
}

/// A streamed answer as a whole.
#[derive(Debug, Default)]
struct Whole {
    begun: bool,
    bytes: Vec<u8>,
    too_long: bool,
}

impl AnswerSink for Whole {
    fn begin(&mut self, _content_type: Option<String>) {
        self.begun = true;
    }

    fn part(&mut self, bytes: Vec<u8>, _deadline: Instant) {
        self.too_long |= self.bytes.len() + bytes.len() > MAX_ANSWER_BYTES;
        if !self.too_long {
            self.bytes.extend(bytes);
        }
    }
}

impl Invocation {
    /// A request with a new id. `event` is JSON text; `time_limit` counts in whole milliseconds
    /// from the function's start, and the agent takes 1 ms to 15 minutes.
    ///
    /// # Errors
    /// `event` is not JSON, or is over 6 MiB.
    pub fn new(event: &str, time_limit: Duration) -> Result<Self, EventError> {
        if event.len() > MAX_EVENT_BYTES {
            return Err(EventError::TooLong { length: event.len() });
        }
        let event = serde_json::from_str(event).map_err(EventError::NotJson)?;
        Ok(Self {
            request_id: Uuid::new_v4().to_string(),
            event,
            time_limit,
            function_arn: None,
            client_context: None,
            trace_id: None,
        })
    }

    /// Sets the ARN by which the function was invoked, which the function sees.
    #[must_use]
    pub fn with_function_arn(self, function_arn: Option<String>) -> Self {
        Self { function_arn, ..self }
    }

    /// The ARN by which the function was invoked.
    #[must_use]
    pub fn function_arn(&self) -> Option<&str> {
        self.function_arn.as_deref()
    }

    /// Gives the function a client context, which is JSON.
    #[must_use]
    pub fn with_client_context(self, client_context: Option<String>) -> Self {
        Self { client_context, ..self }
    }

    /// Makes the request part of a trace.
    #[must_use]
    pub fn with_trace_id(self, trace_id: Option<String>) -> Self {
        Self { trace_id, ..self }
    }

    /// The event: JSON text.
    #[must_use]
    pub fn event(&self) -> &str {
        self.event.get()
    }

    /// Replaces the event by `null`.
    pub fn forget_event(&mut self) {
        self.event = RawValue::NULL.to_owned();
    }

    /// The request's id, as the function sees it.
    #[must_use]
    pub fn request_id(&self) -> &str {
        &self.request_id
    }
}

impl AgentClient {
    /// Connects through the monitor's vsock socket at `socket` to an agent that listens already.
    ///
    /// # Errors
    /// [`ConnectError::Gone`] or [`ConnectError::NotListening`], at once, if there is none.
    pub fn connect(socket: &Path, limit: Duration) -> Result<Self, ConnectError> {
        let deadline = after(limit);
        Self::greet(try_connect(Route::Socket(socket), deadline)?, deadline, limit)
    }

    /// Connects as soon as the agent of a microVM that is starting listens. Between two tries,
    /// `alive` returns whether the microVM still runs.
    ///
    /// # Errors
    /// [`ConnectError::NeverListened`] after `limit`, [`ConnectError::Ended`] if `alive`
    /// returns false.
    pub(crate) fn wait_for(
        route: Route<'_>,
        limit: Duration,
        alive: impl FnMut() -> bool,
    ) -> Result<Self, ConnectError> {
        let deadline = after(limit);
        Self::greet(connect_until(route, limit, alive)?, deadline, limit)
    }

    fn greet(stream: UnixStream, deadline: Instant, limit: Duration) -> Result<Self, ConnectError> {
        let mut client = Self { stream, grace: GRACE, credentials: None };
        let hello = Request::Hello { oldest: OLDEST_VERSION, newest: NEWEST_VERSION };
        match client.exchange_until(&hello, deadline, limit).map_err(ConnectError::Hello)? {
            Reply::Hello { version } if (OLDEST_VERSION..=NEWEST_VERSION).contains(&version) => {
                Ok(client)
            }
            Reply::Refused(refusal) => Err(ConnectError::Version(refusal)),
            _ => Err(ConnectError::Hello(client.unexpected())),
        }
    }

    /// Sets how much longer than each time limit the host waits for the guest.
    pub fn set_grace(&mut self, grace: Duration) {
        self.grace = grace;
    }

    /// Sets the keys of the function's role, which later requests give to the guest.
    pub fn set_credentials(&mut self, credentials: Option<RoleCredentials>) {
        self.credentials = credentials;
    }

    /// Loads `function` in place of an earlier one. Returns what it printed meanwhile.
    ///
    /// # Errors
    /// [`LoadError::Function`] if the function does not import.
    pub fn load(
        &mut self,
        function: &Function,
        options: &LoadOptions,
    ) -> Result<String, LoadError> {
        let copy = |(name, bytes): (&String, &Vec<u8>)| (name.clone(), Base64Bytes(bytes.clone()));
        let loaded = self.send_load(
            options.time_limit,
            Load {
                name: function.name().to_owned(),
                handler: function.handler().to_owned(),
                files: function.files().iter().map(copy).collect(),
                environment: options.environment.clone(),
                memory_mib: options.memory_mib,
                time_limit_ms: milliseconds(options.time_limit),
                version: "$LATEST".to_owned(),
                runtime: RuntimeKind::Own,
                snap_start: false,
                credentials: None,
            },
        )?;
        Ok(loaded.logs)
    }

    /// Writes a file of a function, for [`AgentClient::load_lambda`]. The `first` one removes those
    /// of an earlier function.
    ///
    /// # Errors
    /// [`PutError::Refused`] if the guest cannot write it.
    pub fn put(
        &mut self,
        first: bool,
        path: &str,
        executable: bool,
        contents: &[u8],
    ) -> Result<(), PutError> {
        self.put_into(false, first, path, executable, contents)
    }

    /// Writes a file of a layer of a function, in place of an earlier one of this path, for
    /// [`AgentClient::load_lambda`].
    ///
    /// # Errors
    /// [`PutError::Refused`] if the guest cannot write it.
    pub fn put_layer(
        &mut self,
        path: &str,
        executable: bool,
        contents: &[u8],
    ) -> Result<(), PutError> {
        self.put_into(true, false, path, executable, contents)
    }

    fn put_into(
        &mut self,
        layer: bool,
        first: bool,
        path: &str,
        executable: bool,
        contents: &[u8],
    ) -> Result<(), PutError> {
        let mut rest = contents;
        let mut append = false;
        loop {
            let (part, tail) = rest.split_at(rest.len().min(MAX_FUNCTION_BYTES));
            let request = Request::Put(Put {
                first: first && !append,
                path: path.to_owned(),
                append,
                executable,
                contents: Base64Bytes(part.to_vec()),
                layer,
            });
            match self.exchange(&request, Duration::ZERO)? {
                Reply::Stored => {}
                Reply::Refused(refusal) => return Err(PutError::Refused(refusal)),
                _ => return Err(PutError::Exchange(self.unexpected())),
            }
            if tail.is_empty() {
                return Ok(());
            }
            (rest, append) = (tail, true);
        }
    }

    /// Loads the function whose files were [put](AgentClient::put) there. Returns the time of its
    /// initialisation, by the guest's clock.
    ///
    /// # Errors
    /// [`LoadError::Function`] if the function does not initialise.
    pub fn load_lambda(&mut self, load: &LambdaLoad) -> Result<Duration, LoadError> {
        let loaded = self.send_load(
            load.time_limit,
            Load {
                name: load.name.clone(),
                handler: load.handler.clone(),
                files: BTreeMap::new(),
                environment: load.environment.clone(),
                memory_mib: load.memory_mib,
                time_limit_ms: milliseconds(load.time_limit),
                version: load.version.clone(),
                runtime: load.runtime,
                snap_start: load.snap_start,
                credentials: self.credentials.clone(),
            },
        )?;
        Ok(Duration::from_nanos(loaded.duration_ns))
    }

    fn send_load(&mut self, limit: Duration, load: Load) -> Result<Loaded, LoadError> {
        match self.exchange(&Request::Load(load), limit)? {
            Reply::Loaded(loaded) => Ok(loaded),
            Reply::Failed(failed) => Err(LoadError::Function(failed)),
            Reply::Refused(refusal) => Err(LoadError::Refused(refusal)),
            _ => Err(LoadError::Exchange(self.unexpected())),
        }
    }

    /// Sends one request and waits for the answer.
    ///
    /// # Errors
    /// [`InvokeError::Function`] if the function fails, is too slow or its answer is too long;
    /// [`InvokeError::Refused`] if no function is loaded or the clone has no identity.
    pub fn invoke(&mut self, invocation: &Invocation) -> Result<Answer, InvokeError> {
        let mut whole = Whole::default();
        let answer = self.invoke_with(invocation, &mut whole)?;
        if whole.too_long {
            return Err(InvokeError::Function(too_long(&answer)));
        }
        Ok(if whole.begun { Answer { payload: whole.bytes, ..answer } } else { answer })
    }

    /// [`Self::invoke`], and an answer that the function streams goes to `sink` as it arrives.
    ///
    /// # Errors
    /// As [`Self::invoke`]. The function can fail after it has begun an answer.
    pub fn invoke_with(
        &mut self,
        invocation: &Invocation,
        sink: &mut dyn AnswerSink,
    ) -> Result<Answer, InvokeError> {
        let request = Request::Invoke(Invoke {
            request_id: invocation.request_id.clone(),
            event: invocation.event.clone(),
            time_limit_ms: milliseconds(invocation.time_limit),
            function_arn: invocation.function_arn.clone(),
            client_context: invocation.client_context.clone(),
            trace_id: invocation.trace_id.clone(),
            credentials: self.credentials.clone(),
            stream: true,
        });
        let function_deadline = after(invocation.time_limit);
        let limit = invocation.time_limit.saturating_add(self.grace);
        let deadline = after(limit);
        let mut reply = self.exchange_until(&request, deadline, limit)?;
        if let Reply::Begun { content_type } = reply {
            sink.begin(content_type);
            let mut left = MAX_STREAM_BYTES;
            reply = loop {
                match self.receive_until(deadline, limit) {
                    Ok(Reply::Part(Base64Bytes(bytes)))
                        if bytes.len() <= left.min(MAX_PART_BYTES) =>
                    {
                        left -= bytes.len();
                        sink.part(bytes, function_deadline);
                    }
                    Ok(reply) => break reply,
                    // The function has received the request.
                    Err(ExchangeError::Undelivered) => return Err(ExchangeError::Closed.into()),
                    Err(error) => return Err(error.into()),
                }
            };
        }
        match reply {
            Reply::Answered(answered) if answered.request_id == invocation.request_id => {
                Ok(Answer {
                    payload: String::from(Box::<str>::from(answered.answer)).into_bytes(),
                    duration: Duration::from_nanos(answered.duration_ns),
                    logs: answered.logs,
                    max_memory: answered.max_memory_bytes,
                })
            }
            Reply::Failed(failed) => Err(InvokeError::Function(failed)),
            Reply::Refused(refusal) => Err(InvokeError::Refused(refusal)),
            _ => Err(InvokeError::Exchange(self.unexpected())),
        }
    }

    /// Prepares the guest for a freeze, within `limit`: it admits no more requests, none is in
    /// flight, and file systems are written back. Closes the connection and waits until the guest
    /// has closed its end, so that no snapshot contains a half-open connection.
    ///
    /// # Errors
    /// After an error, too, the guest admits no request until it is [identified](Self::identify).
    pub fn prepare_freeze(mut self, limit: Duration) -> Result<(), PrepareFreezeError> {
        match self.exchange(&Request::PrepareFreeze, limit)? {
            Reply::ReadyToFreeze => Ok(self.wait_for_end(limit)?),
            Reply::Failed(failed) => Err(PrepareFreezeError::Function(failed)),
            Reply::Refused(refusal) => Err(PrepareFreezeError::Refused(refusal)),
            _ => Err(PrepareFreezeError::Exchange(self.unexpected())),
        }
    }

    /// Gives the clone its `identity` and the host's wall clock, within `limit`. Once it has
    /// acknowledged, it admits requests.
    ///
    /// # Errors
    /// After an error the clone admits no request.
    pub fn identify(&mut self, identity: &Identity, limit: Duration) -> Result<(), IdentifyError> {
        let clock = SystemTime::UNIX_EPOCH.elapsed().map_err(|_| IdentifyError::Clock)?;
        let request = Request::Identify(Identify {
            generation: identity.generation,
            instance_id: identity.instance_id.clone(),
            wall_clock_ns: u64::try_from(clock.as_nanos()).map_err(|_| IdentifyError::Clock)?,
            entropy: Base64Bytes(identity.entropy.to_vec()),
            credentials: self.credentials.clone(),
            network: identity.addresses.clone(),
            metadata: identity.metadata,
        });
        match self.exchange(&request, limit)? {
            Reply::Identified => Ok(()),
            Reply::Failed(failed) => Err(IdentifyError::Function(failed)),
            Reply::Refused(refusal) => Err(IdentifyError::Refused(refusal)),
            _ => Err(IdentifyError::Exchange(self.unexpected())),
        }
    }

    /// Requests the agent's status.
    ///
    /// # Errors
    /// No reply comes within the grace period.
    pub fn status(&mut self) -> Result<Status, StatusError> {
        match self.exchange(&Request::Status, Duration::ZERO)? {
            Reply::Status(status) => Ok(status),
            _ => Err(StatusError::Exchange(self.unexpected())),
        }
    }

    /// Requests what holds each page of guest memory, within `limit`.
    ///
    /// # Errors
    /// [`PagesError::Refused`] by an agent of an earlier build, and if the guest's kernel does not
    /// tell it.
    pub fn pages(&mut self, limit: Duration) -> Result<Pages, PagesError> {
        match self.exchange(&Request::Pages, limit)? {
            Reply::Pages(pages) => Ok(pages),
            Reply::Refused(refusal) => Err(PagesError::Refused(refusal)),
            _ => Err(PagesError::Exchange(self.unexpected())),
        }
    }

    /// Powers the guest off, also while its function runs.
    ///
    /// # Errors
    /// No reply comes within the grace period.
    pub fn shut_down(mut self) -> Result<(), ShutdownError> {
        match self.exchange(&Request::Shutdown, Duration::ZERO)? {
            Reply::ShuttingDown => Ok(()),
            _ => Err(ShutdownError::Exchange(self.unexpected())),
        }
    }

    /// Sends `request` and waits for its reply for `limit` and the grace period.
    fn exchange(&mut self, request: &Request, limit: Duration) -> Result<Reply, ExchangeError> {
        let limit = limit.saturating_add(self.grace);
        self.exchange_until(request, after(limit), limit)
    }

    fn exchange_until(
        &mut self,
        request: &Request,
        deadline: Instant,
        limit: Duration,
    ) -> Result<Reply, ExchangeError> {
        let mut timed = Timed::new(&self.stream, deadline);
        let sent = send(&mut timed, request, MAX_REQUEST_LENGTH);
        if let Err(error) = sent {
            self.close();
            return Err(sending(error, limit));
        }
        self.receive_until(deadline, limit)
    }

    fn receive_until(
        &mut self,
        deadline: Instant,
        limit: Duration,
    ) -> Result<Reply, ExchangeError> {
        let mut timed = Timed::new(&self.stream, deadline);
        let reply = receive(&mut timed, MAX_REPLY_LENGTH).map_err(|error| receiving(error, limit));
        if reply.is_err() {
            self.close();
        }
        reply
    }

    /// Closes the connection because of a reply that does not belong to the request.
    fn unexpected(&mut self) -> ExchangeError {
        self.close();
        ExchangeError::Unexpected
    }

    /// A late reply must not be taken for the reply to the next request.
    fn close(&mut self) {
        // Fails if the peer has closed it.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    fn wait_for_end(&mut self, limit: Duration) -> Result<(), ExchangeError> {
        let limit = limit.saturating_add(self.grace);
        let mut timed = Timed::new(&self.stream, after(limit));
        match receive::<Reply>(&mut timed, MAX_REPLY_LENGTH).map_err(|e| receiving(e, limit)) {
            Err(ExchangeError::Closed | ExchangeError::Undelivered) => Ok(()),
            Err(error) => Err(error),
            Ok(_) => Err(self.unexpected()),
        }
    }
}

/// The error of a function whose streamed answer is longer than one without a stream may be.
fn too_long(answer: &Answer) -> Failed {
    let error = FunctionError::too_long(MAX_ANSWER_BYTES);
    let usage =
        Usage { duration_ns: nanoseconds(answer.duration), max_memory_bytes: answer.max_memory };
    Failed { usage: Some(Box::new(usage)), ..Failed::new(error, answer.logs.clone()) }
}

/// Whole milliseconds, at least one: what is left of a limit may be less.
fn milliseconds(limit: Duration) -> u64 {
    u64::try_from(limit.as_millis()).unwrap_or(u64::MAX).max(1)
}
