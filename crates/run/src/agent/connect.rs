//! Connections to the agent through the monitor's vsock socket.
//!
//! The protocol is Firecracker's: a client writes `CONNECT <port>\n`, reads `OK <number>\n`, and is
//! then connected to the port. The monitor closes the connection if nothing listens on the port.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use firn_agent::protocol::{AGENT_PORT, Timed};
use firn_vmm::VsockConnector;

use super::errors::ConnectError;

/// The first pause between two tries. Short: a thawed guest listens within a millisecond.
const FIRST_PAUSE: Duration = Duration::from_millis(1);

/// The longest pause between two tries. Pauses double up to it.
const LONGEST_PAUSE: Duration = Duration::from_millis(32);

/// The longest answer to `CONNECT`: `OK`, a number of 10 digits and a line end fit.
const LONGEST_GREETING: usize = 32;

/// The longest wait: longer than any time limit, and short enough that no clock overflows.
const LONGEST_WAIT: Duration = Duration::from_secs(24 * 60 * 60);

/// The point in time `limit` from now.
pub(super) fn after(limit: Duration) -> Instant {
    Instant::now() + limit.min(LONGEST_WAIT)
}

/// A way to the vsock device of a microVM.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Route<'a> {
    /// The monitor's socket.
    Socket(&'a Path),
    /// For the monitor itself, which opens no path.
    Inside {
        /// The connections of its device.
        connector: &'a VsockConnector,
        /// The path of its socket, for messages.
        socket: &'a Path,
    },
}

impl Route<'_> {
    fn socket(&self) -> &Path {
        match self {
            Self::Socket(socket) | Self::Inside { socket, .. } => socket,
        }
    }

    fn open(&self) -> io::Result<UnixStream> {
        match self {
            Self::Socket(socket) => UnixStream::connect(socket),
            Self::Inside { connector, .. } => connector.connect(),
        }
    }
}

/// Tries once.
pub(super) fn try_connect(route: Route<'_>, deadline: Instant) -> Result<UnixStream, ConnectError> {
    let socket = route.socket();
    let named = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            ConnectError::Gone { socket: socket.to_owned(), source }
        }
        _ => ConnectError::Socket { socket: socket.to_owned(), source },
    };
    let stream = route.open().map_err(named)?;
    let mut timed = Timed::new(&stream, deadline);
    let greeting = timed
        .write_all(format!("CONNECT {AGENT_PORT}\n").as_bytes())
        .and_then(|()| read_line(&mut timed));
    let closed = || ConnectError::NotListening { socket: socket.to_owned() };
    let line = greeting.map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::UnexpectedEof
        | io::ErrorKind::TimedOut => closed(),
        _ => named(error),
    })?;
    let accepted = line
        .strip_prefix(b"OK ")
        .is_some_and(|number| !number.is_empty() && number.iter().all(u8::is_ascii_digit));
    if accepted { Ok(stream) } else { Err(ConnectError::NotAMonitor { socket: socket.to_owned() }) }
}

/// Tries until the agent listens, the `limit` is over, or `alive` returns that the microVM has
/// ended.
pub(super) fn connect_until(
    route: Route<'_>,
    limit: Duration,
    mut alive: impl FnMut() -> bool,
) -> Result<UnixStream, ConnectError> {
    let deadline = after(limit);
    let mut pause = FIRST_PAUSE;
    loop {
        let error = match try_connect(route, deadline) {
            Err(error @ (ConnectError::Gone { .. } | ConnectError::NotListening { .. })) => error,
            done => return done,
        };
        let socket = route.socket().to_owned();
        if !alive() {
            return Err(ConnectError::Ended { socket });
        }
        if Instant::now() + pause >= deadline {
            let source = Box::new(error);
            return Err(ConnectError::NeverListened { socket, limit, source });
        }
        thread::sleep(pause);
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Reads up to a line end, and no byte more: later bytes come from the agent.
fn read_line(stream: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    while line.len() < LONGEST_GREETING {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        if byte == [b'\n'] {
            break;
        }
        line.extend(byte);
    }
    Ok(line)
}
