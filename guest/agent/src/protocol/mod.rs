//! Messages between host and guest.
//!
//! A connection carries frames (see [`send`] and [`receive`]), each with one JSON document: a
//! [`Request`] from the host, then one [`Reply`] from the guest. The first request is
//! [`Request::Hello`]. The host sends a request only after the reply to the previous one. Only an
//! [`Invoke`] that asks for it has [`Reply::Begun`] and any number of [`Reply::Part`] before its
//! reply.

mod base64_bytes;
mod frame;
#[cfg(test)]
mod tests;
mod timed;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use uuid::Uuid;

pub use base64_bytes::Base64Bytes;
pub use frame::{FrameError, ReceiveError, SendError, read_frame, receive, send, write_frame};
pub use timed::Timed;

/// The vsock port that the agent listens on.
pub const AGENT_PORT: u32 = 1024;

/// The oldest protocol version that this build supports.
pub const OLDEST_VERSION: u32 = 1;

/// The newest protocol version that this build supports. Version 2 added [`Request::Put`], AWS
/// Lambda's runtimes, and their information about a request; version 3 added [`Request::Pages`].
pub const NEWEST_VERSION: u32 = 3;

/// Maximum length of a frame from host to guest, in bytes. Sufficient for [`MAX_FUNCTION_BYTES`] in
/// base64.
pub const MAX_REQUEST_LENGTH: usize = 32 << 20;

/// Maximum length of a frame from guest to host, in bytes. Sufficient for an answer of
/// [`MAX_ANSWER_BYTES`], logs and the surrounding fields.
pub const MAX_REPLY_LENGTH: usize = (6 << 20) + (256 << 10);

/// Maximum length of an event, in bytes of JSON (AWS Lambda's limit for synchronous requests).
pub const MAX_EVENT_BYTES: usize = 6 << 20;

/// Maximum length of a function's answer, in bytes of JSON (AWS Lambda's limit).
pub const MAX_ANSWER_BYTES: usize = 6_291_556;

/// Maximum length of an answer that the function streams, in bytes (AWS Lambda's limit).
pub const MAX_STREAM_BYTES: usize = 200 << 20;

/// Maximum length of a [`Reply::Part`], in bytes.
pub const MAX_PART_BYTES: usize = 64 << 10;

/// Maximum total size of a function's files, in bytes.
pub const MAX_FUNCTION_BYTES: usize = 16 << 20;

/// Maximum number of files of a function.
pub const MAX_FUNCTION_FILES: usize = 4096;

/// Length of the returned log: the last bytes of the function's output (as AWS Lambda's
/// `LogResult`).
pub const LOG_TAIL_BYTES: usize = 4096;

/// Maximum time limit of a request or of a function's initialisation, in milliseconds (AWS Lambda's
/// 15 minutes).
pub const MAX_TIME_LIMIT_MS: u64 = 900_000;

/// Minimum number of bytes of entropy in an [`Identify`], sufficient for an independent random
/// state.
pub const MIN_ENTROPY_BYTES: usize = 32;

/// Maximum number of bytes of entropy in an [`Identify`].
pub const MAX_ENTROPY_BYTES: usize = 512;

/// A request of the host.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Opens a connection with the protocol versions that the host supports.
    Hello {
        /// The oldest version that the host supports.
        oldest: u32,
        /// The newest version that the host supports.
        newest: u32,
    },
    /// Writes a part of a function's files, for a [`Request::Load`] without files. Since version 2.
    Put(Put),
    /// Loads a function in place of the current one.
    Load(Load),
    /// Sends one event to the function.
    Invoke(Invoke),
    /// Prepares for a freeze: closes the gate, waits until no request is in flight, collects
    /// garbage and syncs file systems. The connection ends after the reply.
    PrepareFreeze,
    /// Gives this clone its identity and opens the gate.
    Identify(Identify),
    /// Requests the agent's status. Never waits for the function.
    Status,
    /// Requests what holds each page of guest memory, for a recording. Since version 3.
    Pages,
    /// Powers the machine off. The connection ends after the reply.
    Shutdown,
}

/// A function, as sent to the guest.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Load {
    /// The function's name: 1 to 64 of `[A-Za-z0-9_-]`.
    pub name: String,
    /// The entry point: `module.function`, as in AWS Lambda.
    pub handler: String,
    /// Contents by path. Paths are relative, with `/` between components and no `.` or `..`. If
    /// empty, the files are those that were [`Put`].
    pub files: BTreeMap<String, Base64Bytes>,
    /// Environment variables of the function.
    pub environment: BTreeMap<String, String>,
    /// Memory of the microVM in MiB, shown to the function.
    pub memory_mib: u64,
    /// Time limit for starting the runtime and importing the module, in milliseconds.
    pub time_limit_ms: u64,
    /// The function's version, shown to the function. Since version 2 of the protocol.
    #[serde(default = "latest")]
    pub version: String,
    /// The runtime of the function. Since version 2 of the protocol.
    #[serde(default)]
    pub runtime: RuntimeKind,
    /// Whether AWS Lambda's runtime stops after loading the function until the guest was frozen and
    /// thawed (SnapStart). Since version 2 of the protocol.
    #[serde(default)]
    pub snap_start: bool,
    /// The keys of the function's role, if it has any. Before a freeze these are not valid ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credentials: Option<RoleCredentials>,
}

/// AWS keys of a function's role.
#[derive(Clone, Default, Serialize, Deserialize)]
pub struct RoleCredentials {
    /// The access key.
    pub access_key_id: String,
    /// The secret key.
    pub secret_access_key: String,
    /// The session's token, empty without a session.
    pub session_token: String,
    /// How long the function may use them before it requests them again, in seconds.
    pub lifetime_s: u64,
}

impl RoleCredentials {
    /// Keys that sign nothing, and that a function replaces before it uses them: for a function
    /// that is to be frozen.
    #[must_use]
    pub fn expired() -> Self {
        let key = "EXPIRED".to_owned();
        Self {
            access_key_id: key.clone(),
            secret_access_key: key.clone(),
            session_token: key,
            lifetime_s: 0,
        }
    }
}

impl std::fmt::Debug for RoleCredentials {
    // The rest is secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RoleCredentials")
            .field("access_key_id", &self.access_key_id)
            .finish_non_exhaustive()
    }
}

fn latest() -> String {
    "$LATEST".to_owned()
}

/// The runtime of a function.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RuntimeKind {
    /// The agent's own Python runtime.
    #[default]
    Own,
    /// AWS Lambda's runtime interface client for Python, over the Runtime API.
    Python,
    /// The function's own `bootstrap`, over the Runtime API.
    Provided,
    /// The `bootstrap` of the root image's runtime, over the Runtime API.
    Image,
}

/// A part of a function's files.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Put {
    /// Whether this is the first part of a function: the directory's previous content is removed.
    pub first: bool,
    /// The file, as in [`Load::files`].
    pub path: String,
    /// Whether to append the bytes to the file.
    pub append: bool,
    /// Whether the file is executable.
    pub executable: bool,
    /// At most [`MAX_FUNCTION_BYTES`].
    pub contents: Base64Bytes,
    /// Whether the file is one of the function's layers, whose directory keeps its content.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub layer: bool,
}

/// One event for the loaded function.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Invoke {
    /// The request id in the function's context and in errors.
    pub request_id: String,
    /// The event: any JSON document.
    pub event: Box<RawValue>,
    /// Time limit of the function in milliseconds, from its start. Time in the queue does not
    /// count.
    pub time_limit_ms: u64,
    /// The requested function name, as an ARN. Since version 2 of the protocol.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub function_arn: Option<String>,
    /// The client context: a JSON document. Since version 2 of the protocol.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_context: Option<String>,
    /// The trace id of the request. Since version 2 of the protocol.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace_id: Option<String>,
    /// The present keys of the function's role, in place of earlier ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credentials: Option<RoleCredentials>,
    /// Whether the host takes an answer that the function streams in parts. An agent of an earlier
    /// build, and any function that does not stream, sends the whole answer.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stream: bool,
}

/// The identity that distinguishes a clone of a snapshot from all others.
#[derive(Clone, Serialize, Deserialize)]
pub struct Identify {
    /// The VM generation: the value of the VM generation id device.
    #[serde(with = "uuid::serde::simple")]
    pub generation: Uuid,
    /// The instance's name and host name: 1 to 63 characters of `[a-z0-9-]`, without a hyphen at
    /// either end.
    pub instance_id: String,
    /// The host's wall clock, in nanoseconds since 1970-01-01 UTC.
    pub wall_clock_ns: u64,
    /// Random bytes for the kernel's generator: [`MIN_ENTROPY_BYTES`] to [`MAX_ENTROPY_BYTES`].
    pub entropy: Base64Bytes,
    /// The present keys of the function's role, in place of earlier ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credentials: Option<RoleCredentials>,
    /// The addresses of the guest's network interface, in place of earlier ones; without it they
    /// stay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkAddresses>,
    /// The address of the metadata service, in place of an earlier one. Without it there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Ipv4Addr>,
}

/// The addresses of a guest's network interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkAddresses {
    /// The interface's own address.
    pub address: Ipv4Addr,
    /// Bits of its network.
    pub prefix: u8,
    /// The router to all other networks.
    pub gateway: Option<Ipv4Addr>,
    /// The name server.
    pub dns: Option<IpAddr>,
    /// The same of IPv6; without them the interface has no addresses of IPv6 but its link's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<Ipv6Addresses>,
}

/// The IPv6 addresses of a guest's network interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ipv6Addresses {
    /// The interface's own address.
    pub address: Ipv6Addr,
    /// Bits of its network.
    pub prefix: u8,
    /// The router to all other networks.
    pub gateway: Ipv6Addr,
}

impl std::fmt::Debug for Identify {
    // The entropy is secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Identify")
            .field("generation", &self.generation)
            .field("instance_id", &self.instance_id)
            .field("wall_clock_ns", &self.wall_clock_ns)
            .finish_non_exhaustive()
    }
}

/// A reply of the guest.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// The part of the function's files was written.
    Stored,
    /// The version for the rest of the connection.
    Hello {
        /// The newest version that both sides support.
        version: u32,
    },
    /// The function is loaded.
    Loaded(Loaded),
    /// The function has begun to stream its answer.
    Begun {
        /// The content type that it has named.
        content_type: Option<String>,
    },
    /// The next bytes of the answer: 1 to [`MAX_PART_BYTES`].
    Part(Base64Bytes),
    /// The function answered.
    Answered(Answered),
    /// The function failed, when loading or while handling a request.
    Failed(Failed),
    /// No request is in flight, and the guest accepts none before [`Request::Identify`].
    ReadyToFreeze,
    /// The clone has its identity and accepts requests.
    Identified,
    /// The agent's status.
    Status(Status),
    /// What holds each page of guest memory.
    Pages(Pages),
    /// The machine is about to power off.
    ShuttingDown,
    /// The agent refused the request; the function was not affected.
    Refused(Refusal),
}

/// A function was loaded.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Loaded {
    /// Time from the start of the runtime to the end of the import, in nanoseconds.
    pub duration_ns: u64,
    /// The last [`LOG_TAIL_BYTES`] of the function's output in this time.
    pub logs: String,
}

/// A function answered a request.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Answered {
    /// The request id.
    pub request_id: String,
    /// The function's answer: one JSON document of at most [`MAX_ANSWER_BYTES`]; `null` if the
    /// answer was sent in parts.
    pub answer: Box<RawValue>,
    /// Time from passing the event to the runtime to reading its answer, in nanoseconds of the
    /// guest's clock.
    pub duration_ns: u64,
    /// The last [`LOG_TAIL_BYTES`] of the function's output in this time.
    pub logs: String,
    /// The most memory of the function's processes so far, in bytes: the sum of their largest
    /// resident sets. An agent of an earlier build sends none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub max_memory_bytes: u64,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// A function failed.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Failed {
    /// The error, as AWS Lambda reports it.
    pub error: FunctionError,
    /// The last [`LOG_TAIL_BYTES`] of the function's output in this time.
    pub logs: Box<str>,
    /// What a request cost until the failure. An agent of an earlier build sends none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Box<Usage>>,
}

/// What a request cost.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct Usage {
    /// Time in nanoseconds of the guest's clock.
    pub duration_ns: u64,
    /// As in [`Answered::max_memory_bytes`].
    pub max_memory_bytes: u64,
}

impl Failed {
    /// A failure whose cost is not known.
    #[must_use]
    pub fn new(error: FunctionError, logs: String) -> Self {
        Self { error, logs: logs.into(), usage: None }
    }
}

/// An error of a function in AWS Lambda's form.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FunctionError {
    /// The exception's class, or one of the names in `docs/reference/guest.md`, such as
    /// `Runtime.ExitError`.
    #[serde(default)]
    pub error_type: String,
    /// The exception's text.
    #[serde(default)]
    pub error_message: String,
    /// The request id, if AWS Lambda's runtime reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<Box<str>>,
    /// The stack frames of the function.
    #[serde(flatten)]
    pub frames: Option<Box<Frames>>,
}

/// Stack frames, by the name that a runtime gives them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Frames {
    /// Those of Python, as it prints them, the outermost first, or those of Java.
    StackTrace(Vec<String>),
    /// The error's text and its frames, as Node.js prints them.
    Trace(Vec<String>),
}

impl Frames {
    /// The frames.
    pub fn lines(&mut self) -> &mut Vec<String> {
        match self {
            Self::StackTrace(lines) | Self::Trace(lines) => lines,
        }
    }
}

impl FunctionError {
    /// The type of a function that was ended at its time limit.
    pub const TIME_OUT: &str = "Sandbox.Timedout";

    /// The error of an answer that is longer than `limit` bytes. The text is AWS Lambda's.
    #[must_use]
    pub fn too_long(limit: usize) -> Self {
        Self {
            error_type: "Function.ResponseSizeTooLarge".to_owned(),
            error_message: format!(
                "Response payload size exceeded maximum allowed payload size ({limit} bytes)."
            ),
            ..Self::default()
        }
    }

    /// Whether the function was ended at its time limit.
    #[must_use]
    pub fn is_time_out(&self) -> bool {
        self.error_type == Self::TIME_OUT
    }
}

impl std::fmt::Display for FunctionError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.error_type, self.error_message)
    }
}

/// Why the agent refused a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// The kind, for programs.
    pub kind: RefusalKind,
    /// The reason, for users.
    pub message: String,
}

/// Kinds of [`Refusal`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RefusalKind {
    /// The two sides support no common protocol version, or [`Request::Hello`] is missing.
    Version,
    /// The request violates the protocol.
    BadRequest,
    /// The gate is closed: this clone has no identity yet.
    NotIdentified,
    /// The guest is about to be frozen, or the offered generation is the one that it was frozen
    /// with.
    Frozen,
    /// No function is loaded.
    NotLoaded,
    /// A system call failed in the guest; the message names it.
    System,
}

/// The agent's status.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The agent's program version.
    pub agent: String,
    /// The loaded function.
    pub function: Option<String>,
    /// Its entry point, `module.function`.
    pub handler: Option<String>,
    /// Whether the guest accepts requests.
    pub open: bool,
    /// The current identity.
    pub instance_id: Option<String>,
    /// Number of requests passed to the function since the agent started.
    pub invocations: u64,
}

/// What holds each page of guest memory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pages {
    /// What holds pages, such as `kernel: slab` and `python3: heap`.
    pub holders: Vec<String>,
    /// From guest page 0 on, runs of pages of one holder: its index, and the number of pages.
    pub runs: Vec<(u32, u64)>,
    /// The kernel's functions and variables, if root may know their addresses.
    pub kernel: Option<KernelSymbols>,
}

/// The kernel's functions and variables, those of its modules included.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelSymbols {
    /// The linear address at which the kernel's image begins (`_text`).
    pub text: u64,
    /// The guest page of that address.
    pub page: u64,
    /// In bytes after [`text`](Self::text), ascending: where each begins, and its name.
    pub symbols: Vec<(u64, String)>,
}
