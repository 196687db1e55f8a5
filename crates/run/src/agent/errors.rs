//! What can go wrong between host and guest, one kind per operation.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use firn_agent::protocol::{
    Failed, FrameError, MAX_EVENT_BYTES, ReceiveError, Refusal, RefusalKind, SendError,
};

/// No connection to the agent came about.
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
    /// The monitor is there, the agent is not (yet).
    #[error("the microVM behind {} runs no agent that listens (yet)", socket.display())]
    NotListening {
        /// The monitor's vsock socket.
        socket: PathBuf,
    },
    /// No agent listened in time.
    #[error(
        "the agent behind {} did not listen within {limit:?}: the microVM's console says how far it came",
        socket.display()
    )]
    NeverListened {
        /// The monitor's vsock socket.
        socket: PathBuf,
        /// How long was waited.
        limit: Duration,
        /// What the last try came to.
        source: Box<ConnectError>,
    },
    /// The microVM ended while it was waited for.
    #[error("the microVM behind {} ended before its agent listened: its console says why", socket.display())]
    Ended {
        /// The monitor's vsock socket.
        socket: PathBuf,
    },
    /// Something else than a monitor answers on the socket.
    #[error("{} is not the vsock socket of a microVM: it does not answer CONNECT with OK", socket.display())]
    NotAMonitor {
        /// The socket.
        socket: PathBuf,
    },
    /// Agent and host speak no version of the protocol in common.
    #[error("the agent and this program do not understand each other: {}; freeze the function again with this version", .0.message)]
    Version(Refusal),
    /// The agent did not greet.
    #[error("the agent did not greet")]
    Hello(#[source] ExchangeError),
}

/// A request got no reply that counts. The connection is closed then.
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
    /// The guest was gone before it had all of the request, so it has done nothing about it.
    #[error("the guest was gone before it had the request")]
    Undelivered,
    /// The request is longer than the agent takes.
    #[error("the request has {length} bytes, and the agent takes at most {limit}")]
    TooLong {
        /// The request's length in bytes.
        length: usize,
        /// The limit in bytes.
        limit: usize,
    },
    /// The guest announced a longer reply than is ever due.
    #[error("the guest announced a reply of {length} bytes, and at most {limit} are taken")]
    ReplyTooLong {
        /// The announced length in bytes.
        length: usize,
        /// The limit in bytes.
        limit: usize,
    },
    /// The guest sent something that is no reply.
    #[error("the guest sent something that is no reply")]
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
    /// The text is no JSON.
    #[error("the event is not JSON")]
    NotJson(#[source] serde_json::Error),
    /// The text is too long.
    #[error("the event has {length} bytes, and a function takes at most {MAX_EVENT_BYTES}")]
    TooLong {
        /// Its length in bytes.
        length: usize,
    },
}

/// A function's file was not written.
#[derive(Debug, thiserror::Error)]
pub enum PutError {
    /// The agent refused.
    #[error("the guest does not take the function's files: {}", .0.message)]
    Refused(Refusal),
    /// No reply that counts came.
    #[error("the function's files were not acknowledged")]
    Exchange(#[from] ExchangeError),
}

/// The function was not loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The function does not import, or not in time.
    #[error("the function does not load: {}", .0.error)]
    Function(Failed),
    /// The agent refused.
    #[error("the agent does not take the function: {}", .0.message)]
    Refused(Refusal),
    /// No reply that counts came.
    #[error("the function's load got no answer")]
    Exchange(#[from] ExchangeError),
}

/// The function gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum InvokeError {
    /// The function failed, or did not answer in time.
    #[error("the function failed: {}", .0.error)]
    Function(Failed),
    /// The request was not let in.
    #[error("the request was not let in: {}", .0.message)]
    Refused(Refusal),
    /// No reply that counts came.
    #[error("the request got no answer")]
    Exchange(#[from] ExchangeError),
}

/// The guest is not ready to be frozen.
#[derive(Debug, thiserror::Error)]
pub enum PrepareFreezeError {
    /// The function's runtime ended before and does not start again.
    #[error("the guest cannot be frozen, for its function does not load again: {}", .0.error)]
    Function(Failed),
    /// The agent refused.
    #[error("the guest cannot be frozen: {}", .0.message)]
    Refused(Refusal),
    /// No reply that counts came.
    #[error("the preparation for the freeze got no answer")]
    Exchange(#[from] ExchangeError),
}

/// The clone has no identity: it must not be used.
#[derive(Debug, thiserror::Error)]
pub enum IdentifyError {
    /// The runtime could not take the identity over and does not start again.
    #[error("the clone takes no identity, for its function does not load again: {}", .0.error)]
    Function(Failed),
    /// The agent refused.
    #[error("the clone takes no identity: {}", .0.message)]
    Refused(Refusal),
    /// The host's clock is before 1970 or after 2554.
    #[error("the host's clock is out of range: set it")]
    Clock,
    /// No reply that counts came.
    #[error("the identity was not acknowledged")]
    Exchange(#[from] ExchangeError),
}

/// The agent did not say what it is doing.
#[derive(Debug, thiserror::Error)]
pub enum StatusError {
    /// No reply that counts came.
    #[error("the agent does not say what it is doing")]
    Exchange(#[from] ExchangeError),
}

/// The guest did not acknowledge that it powers off.
#[derive(Debug, thiserror::Error)]
pub enum ShutdownError {
    /// No reply that counts came.
    #[error("the guest does not acknowledge that it powers off")]
    Exchange(#[from] ExchangeError),
}

impl InvokeError {
    /// Whether the microVM was gone before it had all of the request: its function has not seen it,
    /// and another may be asked.
    #[must_use]
    pub fn is_undelivered(&self) -> bool {
        matches!(self, Self::Exchange(ExchangeError::Undelivered))
    }

    /// Whether the request was kept out because the clone has no identity yet.
    #[must_use]
    pub fn is_not_identified(&self) -> bool {
        matches!(self, Self::Refused(refusal) if refusal.kind == RefusalKind::NotIdentified)
    }
}

/// What went wrong while sending, for a peer that was given `limit`.
pub(super) fn sending(error: SendError, limit: Duration) -> ExchangeError {
    match error {
        SendError::Frame(FrameError::TooLong { length, limit }) => {
            ExchangeError::TooLong { length, limit }
        }
        SendError::Frame(error) => framing(error, limit),
        SendError::Unwritable(error) => ExchangeError::Io(error.into()),
    }
}

/// What went wrong while receiving, from a peer that was given `limit`.
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
