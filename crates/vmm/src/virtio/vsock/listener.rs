//! The host's side of a guest's sockets: a unix socket.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use rustix::event::{EventfdFlags, eventfd};
use thiserror::Error;

/// Why the socket for a guest's connections cannot be created.
#[derive(Debug, Error)]
pub enum BindVsockError {
    /// The path exists.
    #[error(
        "the socket {path} exists: another microVM uses it, or a microVM was killed and left it; use \
         another path, or remove the socket if no microVM uses it"
    )]
    Exists {
        /// The socket's path.
        path: PathBuf,
    },
    /// The socket cannot be bound.
    #[error("cannot create the socket {path}")]
    Bind {
        /// The socket's path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// A unix socket through which programs on the host reach the guest's sockets, as in Firecracker. A
/// program connects to it, writes `CONNECT <port>\n`, reads `OK <number>\n`, and is then connected
/// to that port of the guest. Connections of the guest to the host are made by a
/// [`VsockBroker`](super::VsockBroker).
#[derive(Debug)]
pub struct VsockListener {
    listener: UnixListener,
    connector: VsockConnector,
    /// The device's ends of connections of `connector`.
    inside: Receiver<OwnedFd>,
    broker: Option<OwnedFd>,
    /// The socket that this listener created and removes when it is dropped.
    created: Option<Created>,
}

/// A path, and the device and inode of the socket that was created there.
#[derive(Debug)]
struct Created {
    path: PathBuf,
    identity: (u64, u64),
}

/// Connects this process to the guest's sockets as [`VsockListener`] connects other programs, with
/// the same first lines, but without the path of the unix socket.
#[derive(Clone, Debug)]
pub struct VsockConnector {
    streams: Sender<OwnedFd>,
    /// An eventfd that is written after a stream was sent.
    wake: Arc<OwnedFd>,
}

impl VsockConnector {
    /// A new connection to the device.
    ///
    /// # Errors
    /// No pair of sockets can be made; [`io::ErrorKind::ConnectionRefused`]: the microVM has ended.
    pub fn connect(&self) -> io::Result<UnixStream> {
        let (ours, device) = UnixStream::pair()?;
        device.set_nonblocking(true)?;
        let sent = self.streams.send(device.into());
        sent.map_err(|_| io::Error::from(io::ErrorKind::ConnectionRefused))?;
        rustix::io::write(&self.wake, &1_u64.to_ne_bytes())?;
        Ok(ours)
    }
}

impl VsockListener {
    /// Uses a socket that is already bound. Dropping the listener removes nothing.
    ///
    /// # Errors
    /// The socket cannot be made non-blocking; no eventfd can be created.
    pub fn new(listener: UnixListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let (streams, inside) = channel();
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let connector = VsockConnector { streams, wake };
        Ok(Self { listener, connector, inside, broker: None, created: None })
    }

    /// Binds `path`, which must not exist. Dropping the listener removes it.
    ///
    /// # Errors
    /// See [`BindVsockError`].
    pub fn bind(path: &Path) -> Result<Self, BindVsockError> {
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::AddrInUse => BindVsockError::Exists { path: path.to_owned() },
            _ => BindVsockError::Bind { path: path.to_owned(), source },
        };
        let listener = UnixListener::bind(path).map_err(failed)?;
        let mut bound = Self::new(listener).map_err(failed)?;
        let identity = identity(path).map_err(failed)?;
        bound.created = Some(Created { path: path.to_owned(), identity });
        Ok(bound)
    }

    /// Has connections of the guest to the host made by the broker at the other end of `broker`.
    /// Without one they are refused.
    #[must_use]
    pub fn with_broker(mut self, broker: Option<OwnedFd>) -> Self {
        self.broker = broker;
        self
    }

    pub(super) fn take_broker(&mut self) -> Option<OwnedFd> {
        self.broker.take()
    }

    /// A way for this process to connect.
    #[must_use]
    pub fn connector(&self) -> VsockConnector {
        self.connector.clone()
    }

    /// Each becomes readable with a new connection.
    pub(super) fn event_sources(&self) -> [BorrowedFd<'_>; 2] {
        [self.listener.as_fd(), self.connector.wake.as_fd()]
    }

    /// The next program that connects; `Ok(None)` if there is none.
    pub(super) fn accept(&self) -> io::Result<Option<OwnedFd>> {
        if let Ok(stream) = self.inside.try_recv() {
            return Ok(Some(stream));
        }
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(true)?;
                    return Ok(Some(stream.into()));
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return Ok(None),
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => {}
                    _ => return Err(error),
                },
            }
        }
    }
}

impl Drop for VsockListener {
    fn drop(&mut self) {
        if let Some(Created { path, identity: created }) = &self.created
            && identity(path).is_ok_and(|found| found == *created)
        {
            // A failure has no consequence here: a later bind reports a path that still exists.
            let _ = fs::remove_file(path);
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|metadata| (metadata.dev(), metadata.ino()))
}
