//! What the daemon listens on: a TCP address, or a unix socket of its user.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::time::sleep;

use super::limits::Reserve;

/// How long the server waits after the system refused a connection.
const PAUSE: Duration = Duration::from_millis(20);

/// What the daemon listens on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listen {
    /// An address. The kernel replaces port 0 by a free port.
    Tcp(SocketAddr),
    /// A unix socket, which only the daemon's user can connect to.
    Unix(PathBuf),
}

impl Listen {
    /// Whether other machines can connect.
    #[must_use]
    pub fn is_remote(&self) -> bool {
        matches!(self, Self::Tcp(address) if !address.ip().is_loopback())
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "http://{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.contains('/') {
            return Ok(Self::Unix(text.into()));
        }
        let address = text.parse().map(Self::Tcp);
        address.map_err(|_| "expected ADDRESS:PORT, or a path with a slash".to_owned())
    }
}

/// The listening socket. A unix socket's file is removed with it.
#[derive(Debug)]
pub(crate) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, PathBuf),
}

/// The address that a connection comes from. `None` for a unix socket.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source(pub(crate) Option<IpAddr>);

/// A connection.
pub(super) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

impl Listener {
    pub(crate) async fn bind(listen: &Listen) -> io::Result<Self> {
        match listen {
            Listen::Tcp(address) => Ok(Self::Tcp(TcpListener::bind(address).await?)),
            Listen::Unix(path) => bind_unix(path).await,
        }
    }

    /// What it listens on, with the port that the kernel has chosen.
    pub(crate) fn address(&self) -> io::Result<Listen> {
        match self {
            Self::Tcp(listener) => Ok(Listen::Tcp(listener.local_addr()?)),
            Self::Unix(_, path) => Ok(Listen::Unix(path.clone())),
        }
    }

    /// The next connection. Calls `short` when this process or the system is out of descriptors.
    pub(super) async fn accept(
        &self,
        reserve: &Reserve,
        short: impl Fn(),
    ) -> (Box<dyn Stream>, Source) {
        loop {
            reserve.fill();
            let accepted: io::Result<(Box<dyn Stream>, Source)> = match self {
                Self::Tcp(listener) => listener
                    .accept()
                    .await
                    .map(|(stream, from)| (Box::new(stream) as _, Source(Some(from.ip())))),
                Self::Unix(listener, _) => {
                    let accepted = listener.accept().await;
                    accepted.map(|(stream, _)| (Box::new(stream) as _, Source(None)))
                }
            };
            match accepted {
                Ok(accepted) => return accepted,
                Err(error) => {
                    let errno = rustix::io::Errno::from_io_error(&error);
                    if matches!(errno, Some(rustix::io::Errno::MFILE | rustix::io::Errno::NFILE)) {
                        reserve.release();
                        short();
                    }
                    tracing::warn!(%error, "cannot accept a connection");
                    sleep(PAUSE).await;
                }
            }
        }
    }
}

async fn bind_unix(path: &Path) -> io::Result<Listener> {
    // A killed daemon leaves its socket.
    if UnixStream::connect(path).await.is_err_and(|e| e.kind() == io::ErrorKind::ConnectionRefused)
    {
        std::fs::remove_file(path)?;
    }
    // The socket gets its name once its mode is set.
    let hidden = path.with_extension(format!("{}.new", std::process::id()));
    let listener = UnixListener::bind(&hidden)?;
    let named = std::fs::set_permissions(&hidden, std::fs::Permissions::from_mode(0o600))
        .and_then(|()| std::fs::hard_link(&hidden, path));
    std::fs::remove_file(&hidden)?;
    named.map(|()| Listener::Unix(listener, path.to_owned()))
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Unix(_, path) = self {
            // Absent if the user has removed it.
            let _ = std::fs::remove_file(path);
        }
    }
}
