//! Messages between host and guest.
//!
//! A connection carries frames (see [`send`] and [`receive`]), each of one JSON document: a
//! [`Request`] from the host, then one [`Reply`] from the guest. The first request is
//! [`Request::Hello`]. The next request is sent after the reply to the one before it.

mod base64_bytes;
mod frame;
#[cfg(test)]
mod tests;
mod timed;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use uuid::Uuid;

pub use base64_bytes::Base64Bytes;
pub use frame::{FrameError, ReceiveError, SendError, read_frame, receive, send, write_frame};
pub use timed::Timed;

/// The vsock port that the agent listens on.
pub const AGENT_PORT: u32 = 1024;

/// The oldest version of the protocol that this build speaks.
pub const OLDEST_VERSION: u32 = 1;

/// The newest version of the protocol that this build speaks. Version 2 brought [`Request::Put`],
/// AWS Lambda's runtimes, and what they are told about a request.
pub const NEWEST_VERSION: u32 = 2;

/// The longest frame from host to guest, in bytes. Holds [`MAX_FUNCTION_BYTES`] in base64.
pub const MAX_REQUEST_LENGTH: usize = 32 << 20;

/// The longest frame from guest to host, in bytes. Holds an answer of [`MAX_ANSWER_BYTES`], logs
/// and what surrounds them.
pub const MAX_REPLY_LENGTH: usize = (6 << 20) + (256 << 10);

/// The longest event of a request, in bytes of JSON (AWS Lambda's limit for synchronous requests).
pub const MAX_EVENT_BYTES: usize = 6 << 20;

/// The longest answer of a function, in bytes of JSON (AWS Lambda's limit).
pub const MAX_ANSWER_BYTES: usize = 6_291_556;

/// The files of one function, all together, in bytes.
pub const MAX_FUNCTION_BYTES: usize = 16 << 20;

/// The number of files of one function.
pub const MAX_FUNCTION_FILES: usize = 4096;

/// How much of the function's output is returned: its last bytes (as AWS Lambda's `LogResult`).
pub const LOG_TAIL_BYTES: usize = 4096;

/// The longest time limit of a request or of a function's initialisation, in milliseconds (AWS
/// Lambda's 15 minutes).
pub const MAX_TIME_LIMIT_MS: u64 = 900_000;

/// The fewest bytes of entropy that give a clone a random state of its own.
pub const MIN_ENTROPY_BYTES: usize = 32;

/// The most bytes of entropy that one [`Identify`] carries.
pub const MAX_ENTROPY_BYTES: usize = 512;

/// What the host asks of the guest.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Opens a connection: the versions of the protocol that the host speaks.
    Hello {
        /// The oldest version that the host speaks.
        oldest: u32,
        /// The newest version that the host speaks.
        newest: u32,
    },
    /// Writes a part of a function's files, for a [`Request::Load`] that brings none. Since version 2.
    Put(Put),
    /// Takes a function in, in place of an earlier one.
    Load(Load),
    /// Sends one event to the function.
    Invoke(Invoke),
    /// Gets ready to be frozen: closes the gate, waits until nothing is in flight, tidies up and
    /// writes file systems back. The connection ends after the reply.
    PrepareFreeze,
    /// Gives this clone its identity, and opens the gate.
    Identify(Identify),
    /// Asks what the agent is doing. Never waits for the function.
    Status,
    /// Powers the machine off. The connection ends after the reply.
    Shutdown,
}

/// A function, as it is sent to the guest.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Load {
    /// The function's name: 1 to 64 of `[A-Za-z0-9_-]`.
    pub name: String,
    /// `module.function`, as AWS Lambda writes it.
    pub handler: String,
    /// Contents by path: relative, `/` between components, no `.` or `..`. Without any, the files are
    /// those that were [`Put`].
    pub files: BTreeMap<String, Base64Bytes>,
    /// Environment variables of the function.
    pub environment: BTreeMap<String, String>,
    /// Memory of the microVM in MiB, shown to the function.
    pub memory_mib: u64,
    /// How long the runtime may take to start and to import the module, in milliseconds.
    pub time_limit_ms: u64,
    /// The function's version, shown to the function. Since version 2 of the protocol.
    #[serde(default = "latest")]
    pub version: String,
    /// What runs the function. Since version 2 of the protocol.
    #[serde(default)]
    pub runtime: RuntimeKind,
    /// Whether AWS Lambda's runtime is to stop, once the function is loaded, until the guest was frozen
    /// and thawed (SnapStart). Since version 2 of the protocol.
    #[serde(default)]
    pub snap_start: bool,
}

fn latest() -> String {
    "$LATEST".to_owned()
}

/// What runs a function.
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
}

/// A part of a function's files.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Put {
    /// The first part of a function: what is in its folder is removed.
    pub first: bool,
    /// The file, as in [`Load::files`].
    pub path: String,
    /// Whether the bytes go behind those that the file has already.
    pub append: bool,
    /// Whether the file can be executed.
    pub executable: bool,
    /// At most [`MAX_FUNCTION_BYTES`].
    pub contents: Base64Bytes,
}

/// One event for the loaded function.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Invoke {
    /// The request's name in the function's context and in errors.
    pub request_id: String,
    /// The event: any JSON document.
    pub event: Box<RawValue>,
    /// How long the function may take from its start (time in the queue does not count), in
    /// milliseconds.
    pub time_limit_ms: u64,
    /// The function's name that was asked for, as an ARN. Since version 2 of the protocol.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub function_arn: Option<String>,
    /// The client context: a JSON document. Since version 2 of the protocol.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_context: Option<String>,
    /// The trace that the request belongs to. Since version 2 of the protocol.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace_id: Option<String>,
}

/// What makes one clone of a snapshot differ from every other.
#[derive(Clone, Serialize, Deserialize)]
pub struct Identify {
    /// The VM generation: the value that the monitor shows by the VM generation id device.
    #[serde(with = "uuid::serde::simple")]
    pub generation: Uuid,
    /// The instance's name and host name: 1 to 63 of `[a-z0-9-]`, no hyphen first or last.
    pub instance_id: String,
    /// The host's wall clock, in nanoseconds since 1970-01-01 UTC.
    pub wall_clock_ns: u64,
    /// Random bytes for the kernel's generator: [`MIN_ENTROPY_BYTES`] to [`MAX_ENTROPY_BYTES`].
    pub entropy: Base64Bytes,
}

impl std::fmt::Debug for Identify {
    // The entropy is a secret of the clone.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Identify")
            .field("generation", &self.generation)
            .field("instance_id", &self.instance_id)
            .field("wall_clock_ns", &self.wall_clock_ns)
            .finish_non_exhaustive()
    }
}

/// What the guest answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// The part of the function's files is written.
    Stored,
    /// The version that both sides speak from now on.
    Hello {
        /// The newest version that both sides know.
        version: u32,
    },
    /// The function is loaded.
    Loaded(Loaded),
    /// The function answered.
    Answered(Answered),
    /// The function failed: at load or at a request.
    Failed(Failed),
    /// Nothing is in flight, and no request is let in before [`Request::Identify`].
    ReadyToFreeze,
    /// The clone has its identity; requests are let in.
    Identified,
    /// What the agent is doing.
    Status(Status),
    /// The machine powers off next.
    ShuttingDown,
    /// The agent did not do what was asked; the function was not touched.
    Refused(Refusal),
}

/// A function was loaded.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Loaded {
    /// Start of the runtime to end of the import, in nanoseconds.
    pub duration_ns: u64,
    /// The last [`LOG_TAIL_BYTES`] that the function printed meanwhile.
    pub logs: String,
}

/// A function answered a request.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Answered {
    /// The request.
    pub request_id: String,
    /// The function's answer: one JSON document of at most [`MAX_ANSWER_BYTES`].
    pub answer: Box<RawValue>,
    /// Event handed to the runtime to answer read, in nanoseconds of the guest's clock.
    pub duration_ns: u64,
    /// The last [`LOG_TAIL_BYTES`] that the function printed meanwhile.
    pub logs: String,
}

/// A function failed.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Failed {
    /// The error, as AWS Lambda reports it.
    pub error: FunctionError,
    /// The last [`LOG_TAIL_BYTES`] that the function printed meanwhile.
    pub logs: String,
}

/// An error of a function in AWS Lambda's form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FunctionError {
    /// The exception's class, or one of the names in `docs/reference/guest.md`, such as `Runtime.ExitError`.
    #[serde(default)]
    pub error_type: String,
    /// The exception's text.
    #[serde(default)]
    pub error_message: String,
    /// The request, where AWS Lambda's runtime names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<Box<str>>,
    /// The frames of the function, outermost first, as Python prints them.
    #[serde(default)]
    pub stack_trace: Vec<String>,
}

impl std::fmt::Display for FunctionError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.error_type, self.error_message)
    }
}

/// Why the agent did not do what was asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// The kind, for programs.
    pub kind: RefusalKind,
    /// The reason, for people.
    pub message: String,
}

/// Kinds of [`Refusal`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RefusalKind {
    /// The two sides have no version of the protocol in common, or no [`Request::Hello`] came.
    Version,
    /// The request breaks a rule of the protocol.
    BadRequest,
    /// The gate is closed: this clone has no identity yet.
    NotIdentified,
    /// The guest is about to be frozen, or was frozen with the generation that is offered now.
    Frozen,
    /// No function is loaded.
    NotLoaded,
    /// The guest's system failed: the message says which call.
    System,
}

/// What the agent is doing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The agent's version (of the program, not of the protocol).
    pub agent: String,
    /// The loaded function.
    pub function: Option<String>,
    /// Its entry point, `module.function`.
    pub handler: Option<String>,
    /// Whether requests are let in.
    pub open: bool,
    /// The identity that was given last.
    pub instance_id: Option<String>,
    /// Requests that the function was given since the agent started.
    pub invocations: u64,
}
