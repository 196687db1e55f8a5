//! What can go wrong between host and guest, one kind per operation.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use firn_agent::protocol::{
    Failed, FrameError, FunctionError, MAX_EVENT_BYTES, ReceiveError, Refusal, RefusalKind,
    SendError,
};

/// The options that set the time limit of a start.
pub(crate) const LIMIT_OPTIONS: &str = "--time-limit; of a daemon, --start-limit";

/// The options, if the function exceeded the time limit of its start.
fn of_limit(error: &FunctionError) -> String {
    if error.is_time_out() { format!(" ({LIMIT_OPTIONS})") } else { String::new() }
}

/// The agent cannot be reached.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Nothing listens on the monitor's socket.
    #[error("no microVM listens on {}: it has ended, or was never started", socket.display())]
    Gone {
        /// The monitor's vsock socket.
        socket: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The socket cannot be used.
    #[error("cannot connect to the microVM's socket {}", socket.display())]
    Socket {
        /// The monitor's vsock socket.
        socket: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The monitor runs, and no agent listens (yet).
    #[error("no agent listens (yet) in the microVM behind {}", socket.display())]
    NotListening {
        /// The monitor's vsock socket.
        socket: PathBuf,
    },
    /// No agent listened in time.
    #[error(
        "the agent behind {} did not listen within {limit:?} ({LIMIT_OPTIONS}): the microVM's console shows how far it \
         booted",
        socket.display()
    )]
    NeverListened {
        /// The monitor's vsock socket.
        socket: PathBuf,
        /// How long was waited.
        limit: Duration,
        /// The error of the last try.
        source: Box<ConnectError>,
    },
    /// The microVM ended during the wait.
    #[error("the microVM behind {} ended before its agent listened: its console shows why", socket.display())]
    Ended {
        /// The monitor's vsock socket.
        socket: PathBuf,
    },
    /// The socket is not a monitor's.
    #[error("{} is not the vsock socket of a microVM: it does not answer CONNECT with OK", socket.display())]
    NotAMonitor {
        /// The socket.
        socket: PathBuf,
    },
    /// Agent and host have no version of the protocol in common.
    #[error("the agent and this program have no protocol version in common: {}; freeze the function again with this version", .0.message)]
    Version(Refusal),
    /// The agent did not send its greeting.
    #[error("the agent did not send its greeting")]
    Hello(#[source] ExchangeError),
}

/// A request got no valid reply. The connection is closed.
#[derive(Debug, thiserror::Error)]
pub enum ExchangeError {
    /// No reply in time.
    #[error("the guest did not reply within {limit:?}")]
    TimedOut {
        /// How long was waited.
        limit: Duration,
    },
    /// The guest closed the connection, or was ended.
    #[error("the guest closed the connection")]
    Closed,
    /// The guest ended before it received the whole request, so it has not acted on it.
    #[error("the guest ended before it received the request")]
    Undelivered,
    /// The request is longer than the agent accepts.
    #[error("the request has {length} bytes, and the agent accepts at most {limit}")]
    TooLong {
        /// The request's length in bytes.
        length: usize,
        /// The limit in bytes.
        limit: usize,
    },
    /// The guest announced a longer reply than any valid one.
    #[error("the guest announced a reply of {length} bytes, and at most {limit} are valid")]
    ReplyTooLong {
        /// The announced length in bytes.
        length: usize,
        /// The limit in bytes.
        limit: usize,
    },
    /// The guest sent a message that is not a reply.
    #[error("the guest sent a message that is not a reply")]
    Malformed(#[source] serde_json::Error),
    /// The guest sent a reply to another request.
    #[error("the guest sent a reply that does not belong to the request")]
    Unexpected,
    /// The connection failed.
    #[error("the connection to the guest failed")]
    Io(#[source] io::Error),
}

/// The text cannot be sent as an event.
#[derive(Debug, thiserror::Error)]
pub enum EventError {
    /// The text is not JSON.
    #[error("the event is not JSON")]
    NotJson(#[source] serde_json::Error),
    /// The text is too long.
    #[error("the event has {length} bytes, and a function accepts at most {MAX_EVENT_BYTES}")]
    TooLong {
        /// Its length in bytes.
        length: usize,
    },
}

/// A function's file was not written.
#[derive(Debug, thiserror::Error)]
pub enum PutError {
    /// The agent refused.
    #[error("the guest does not accept the function's files: {}", .0.message)]
    Refused(Refusal),
    /// No valid reply came.
    #[error("the function's files were not acknowledged")]
    Exchange(#[from] ExchangeError),
}

/// The function was not loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The function does not import, or not in time.
    #[error("the function does not load: {}{}", .0.error, of_limit(&.0.error))]
    Function(Failed),
    /// The agent refused.
    #[error("the agent does not accept the function: {}", .0.message)]
    Refused(Refusal),
    /// No valid reply came.
    #[error("the request to load the function got no answer")]
    Exchange(#[from] ExchangeError),
}

/// The function gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum InvokeError {
    /// The function failed, or did not answer in time.
    #[error("the function failed: {}", .0.error)]
    Function(Failed),
    /// The guest did not admit the request.
    #[error("the guest did not admit the request: {}", .0.message)]
    Refused(Refusal),
    /// No valid reply came.
    #[error("the request got no answer")]
    Exchange(#[from] ExchangeError),
}

/// The guest is not ready to be frozen.
#[derive(Debug, thiserror::Error)]
pub enum PrepareFreezeError {
    /// The function's runtime ended before and does not start again.
    #[error("the guest cannot be frozen, because its function does not load again: {}", .0.error)]
    Function(Failed),
    /// The agent refused.
    #[error("the guest cannot be frozen: {}", .0.message)]
    Refused(Refusal),
    /// No valid reply came.
    #[error("the preparation for the freeze got no answer")]
    Exchange(#[from] ExchangeError),
}

/// The clone has no identity: it must not be used.
#[derive(Debug, thiserror::Error)]
pub enum IdentifyError {
    /// The runtime could not apply the identity and does not start again.
    #[error("the clone does not accept its identity, because its function does not load again: {}", .0.error)]
    Function(Failed),
    /// The agent refused.
    #[error("the clone does not accept its identity: {}", .0.message)]
    Refused(Refusal),
    /// The host's clock is before 1970 or after 2554.
    #[error("the host's clock is out of range: set it")]
    Clock,
    /// No valid reply came.
    #[error("the identity was not acknowledged")]
    Exchange(#[from] ExchangeError),
}

/// The agent did not report its status.
#[derive(Debug, thiserror::Error)]
pub enum StatusError {
    /// No valid reply came.
    #[error("the agent does not report its status")]
    Exchange(#[from] ExchangeError),
}

/// The agent did not report what holds the pages of memory.
#[derive(Debug, thiserror::Error)]
pub enum PagesError {
    /// The agent refused.
    #[error("the agent does not report what holds the pages of memory: {}", .0.message)]
    Refused(Refusal),
    /// No valid reply came.
    #[error("the agent does not report what holds the pages of memory")]
    Exchange(#[from] ExchangeError),
}

/// The guest did not acknowledge that it powers off.
#[derive(Debug, thiserror::Error)]
pub enum ShutdownError {
    /// No valid reply came.
    #[error("the guest does not acknowledge that it powers off")]
    Exchange(#[from] ExchangeError),
}

impl InvokeError {
    /// Whether the microVM ended before it received the whole request: its function has not seen
    /// it, so the request may go to another microVM.
    #[must_use]
    pub fn is_undelivered(&self) -> bool {
        matches!(self, Self::Exchange(ExchangeError::Undelivered))
    }

    /// Whether the request was not admitted because the clone has no identity yet.
    #[must_use]
    pub fn is_not_identified(&self) -> bool {
        matches!(self, Self::Refused(refusal) if refusal.kind == RefusalKind::NotIdentified)
    }
}

/// The error of a send with a time limit.
pub(super) fn sending(error: SendError, limit: Duration) -> ExchangeError {
    match error {
        SendError::Frame(FrameError::TooLong { length, limit }) => {
            ExchangeError::TooLong { length, limit }
        }
        SendError::Frame(error) => framing(error, limit),
        SendError::Unwritable(error) => ExchangeError::Io(error.into()),
    }
}

/// The error of a receive with a time limit.
pub(super) fn receiving(error: ReceiveError, limit: Duration) -> ExchangeError {
    match error {
        ReceiveError::Frame(error) => framing(error, limit),
        ReceiveError::Malformed(error) => ExchangeError::Malformed(error),
    }
}

fn framing(error: FrameError, limit: Duration) -> ExchangeError {
    match error {
        FrameError::Closed | FrameError::Truncated => ExchangeError::Closed,
        // Before the last request the guest has answered, so it has read, all that it was sent.
        FrameError::Reset => ExchangeError::Undelivered,
        FrameError::TimedOut => ExchangeError::TimedOut { limit },
        FrameError::TooLong { length, limit } => ExchangeError::ReplyTooLong { length, limit },
        FrameError::Io(error) => ExchangeError::Io(error),
    }
}
