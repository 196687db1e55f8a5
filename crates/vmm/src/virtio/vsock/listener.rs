//! The host's side of a guest's sockets: a unix socket.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
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
/// to that port of the guest. A connection of the guest to port P of the host leads to the unix
/// socket at the same path with `_P` appended.
#[derive(Debug)]
pub struct VsockListener {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode of the socket that this listener created at `path` and removes when it is
    /// dropped.
    created: Option<(u64, u64)>,
}

impl VsockListener {
    /// Uses a socket that is already bound. `path` is the prefix of the sockets that connections of
    /// the guest lead to. Dropping the listener removes nothing.
    ///
    /// # Errors
    /// The socket cannot be made non-blocking.
    pub fn new(listener: UnixListener, path: PathBuf) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self { listener, path, created: None })
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
        let created = Some(identity(path).map_err(failed)?);
        let bound = Self { listener, path: path.to_owned(), created };
        bound.listener.set_nonblocking(true).map_err(failed)?;
        Ok(bound)
    }

    /// The next program that connects; `Ok(None)` if there is none.
    pub(super) fn accept(&self) -> io::Result<Option<OwnedFd>> {
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

    /// Connects to the program on the host that serves `port` for the guest. It never blocks: a
    /// program that does not accept is treated as absent.
    pub(super) fn connect_out(&self, port: u32) -> Result<OwnedFd, Errno> {
        let mut path = OsString::from(&self.path);
        path.push(format!("_{port}"));
        let address = SocketAddrUnix::new(path)?;
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let stream = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&stream, &address)?;
        Ok(stream)
    }
}

impl AsFd for VsockListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for VsockListener {
    fn drop(&mut self) {
        if self.created.is_some() && identity(&self.path).ok() == self.created {
            // A failure has no consequence here: a later bind reports a path that still exists.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|metadata| (metadata.dev(), metadata.ino()))
}
