//! Published ports: addresses of the host whose connections reach a port of the guest.

mod unix;

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::str::FromStr;
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{SocketFlags, accept_with};
use serde::{Deserialize, Serialize};

use super::wire::Connection;
use super::{PAUSE, retry_when_short, set_options};
use unix::SocketFile;

/// How long another process may keep the folder of a unix socket locked: every user that can open a
/// folder can lock it.
const LOCK_LIMIT: Duration = Duration::from_secs(5);

/// Where a published port is on the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PublishedAddress {
    /// A TCP port.
    Tcp(SocketAddr),
    /// A unix socket.
    Unix(PathBuf),
}

/// A port of the guest that programs of the host reach.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PublishedPort {
    /// The host's side.
    pub address: PublishedAddress,
    /// The guest's TCP port, not 0.
    pub guest_port: u16,
}

/// Why a port is not published.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// The text is not valid.
    #[error(
        "\"{0}\" is not a published port: use [HOST:]PORT:GUEST, such as 8080:80, 0.0.0.0:8080:80 or \
         [::1]:8080:80, or unix:PATH:GUEST, with an address for HOST and ports up to 65535"
    )]
    Form(String),
    /// Two of them have the same address.
    #[error("{0} is published twice: give each published port another address of the host")]
    Twice(PublishedAddress),
    /// Another of them has the port on all addresses, or on an address of which this is all.
    #[error(
        "cannot publish {address}: it overlaps {other}, which is published too; give one of them \
         another port"
    )]
    Overlap {
        /// The address.
        address: PublishedAddress,
        /// The one that has the port already.
        other: PublishedAddress,
    },
    /// Another program listens there.
    #[error(
        "cannot publish {0}: it is in use; choose another, or stop the program that listens there \
         (`ss -lxtnp` shows it)"
    )]
    InUse(PublishedAddress),
    /// Another process has a lock of the folder.
    #[error(
        "cannot publish {address}: another process keeps {} locked (`lslocks` shows it); stop it, or \
         choose a folder that other users cannot open", folder.display()
    )]
    Locked {
        /// The address.
        address: PublishedAddress,
        /// The folder.
        folder: PathBuf,
    },
    /// The file is not a socket.
    #[error("cannot publish {0}: the file exists and is not a socket; choose another path")]
    NotSocket(PublishedAddress),
    /// This user may not use the port.
    #[error("cannot publish {0}: ports below 1024 need privileges; choose a port from 1024 on")]
    Privileged(PublishedAddress),
    /// The system refuses.
    #[error("cannot publish {address}")]
    Listen {
        /// The address.
        address: PublishedAddress,
        /// The cause.
        source: io::Error,
    },
}

/// Published ports whose listeners are open. The files of their unix sockets are removed when this
/// is dropped.
#[derive(Debug, Default)]
pub struct PublishedPorts {
    ports: Vec<PublishedPort>,
    listeners: Vec<Listener>,
    files: Vec<SocketFile>,
}

/// An open listener.
#[derive(Debug)]
pub(super) struct Listener {
    socket: OwnedFd,
    is_tcp: bool,
    guest_port: u16,
}

impl fmt::Display for PublishedAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl PublishedAddress {
    /// Whether a connection can be to both: they have a port in common, and one of them is on all
    /// addresses or both are on the same one. `[::]` has the IPv4 addresses, too.
    fn overlaps(&self, other: &Self) -> bool {
        let (Self::Tcp(this), Self::Tcp(other)) = (self, other) else { return self == other };
        let [ours, theirs] = [this, other].map(|address| address.ip().to_canonical());
        let has =
            |all: IpAddr, one: IpAddr| all.is_unspecified() && (all.is_ipv6() || one.is_ipv4());
        this.port() == other.port() && (ours == theirs || has(ours, theirs) || has(theirs, ours))
    }
}

impl FromStr for PublishedPort {
    type Err = PublishError;

    /// `PORT:GUEST` is `127.0.0.1:PORT:GUEST`.
    fn from_str(text: &str) -> Result<Self, PublishError> {
        let parse = || {
            let (host, guest) = text.rsplit_once(':')?;
            let guest_port = guest.parse().ok().filter(|port| *port > 0)?;
            let address = match host.strip_prefix("unix:") {
                Some("") => return None,
                Some(path) => PublishedAddress::Unix(std::path::absolute(path).ok()?),
                None => match host.parse() {
                    Ok(port) => PublishedAddress::Tcp((Ipv4Addr::LOCALHOST, port).into()),
                    Err(_) => PublishedAddress::Tcp(host.parse().ok()?),
                },
            };
            Some(Self { address, guest_port })
        };
        parse().ok_or_else(|| PublishError::Form(text.to_owned()))
    }
}

impl PublishedPorts {
    /// Listens on the addresses of ports such as `127.0.0.1:8080:80`, `[::1]:8080:80`, `8080:80`
    /// and `unix:/run/web.sock:80`. Port 0 of the host is one that is free.
    ///
    /// # Errors
    /// See [`PublishError`].
    pub fn open<'a>(texts: impl IntoIterator<Item = &'a str>) -> Result<Self, PublishError> {
        let ports: Result<Vec<PublishedPort>, _> = texts.into_iter().map(str::parse).collect();
        let mut opened = Self::default();
        for port in ports? {
            let PublishedPort { address, guest_port } = port;
            let is_any = matches!(&address, PublishedAddress::Tcp(address) if address.port() == 0);
            if !is_any && opened.ports.iter().any(|other| other.address == address) {
                return Err(PublishError::Twice(address));
            }
            opened.add(address, guest_port).map_err(|error| opened.explain(error))?;
        }
        Ok(opened)
    }

    /// The ports, with the host's ports that the system has chosen.
    #[must_use]
    pub fn ports(&self) -> &[PublishedPort] {
        &self.ports
    }

    pub(super) fn take_listeners(&mut self) -> Vec<Listener> {
        std::mem::take(&mut self.listeners)
    }

    /// The system decides what is in use, because its settings do too (`net.ipv6.bindv6only`).
    fn explain(&self, error: PublishError) -> PublishError {
        let PublishError::InUse(address) = error else { return error };
        let mut others = self.ports.iter().map(|port| &port.address);
        match others.find(|other| other.overlaps(&address)).cloned() {
            Some(other) => PublishError::Overlap { address, other },
            None => PublishError::InUse(address),
        }
    }

    fn add(&mut self, address: PublishedAddress, guest_port: u16) -> Result<(), PublishError> {
        let (address, socket) = match &address {
            PublishedAddress::Tcp(to) => {
                listen_tcp(*to).map_err(|error| PublishError::tcp(address, error))?
            }
            PublishedAddress::Unix(path) => {
                let (socket, file) = unix::listen_unix(path, LOCK_LIMIT)?;
                self.files.push(file);
                (address, socket)
            }
        };
        let is_tcp = matches!(address, PublishedAddress::Tcp(_));
        self.ports.push(PublishedPort { address, guest_port });
        self.listeners.push(Listener { socket, is_tcp, guest_port });
        Ok(())
    }
}

impl PublishError {
    fn tcp(address: PublishedAddress, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::AddrInUse => Self::InUse(address),
            io::ErrorKind::PermissionDenied => Self::Privileged(address),
            _ => Self::Listen { address, source },
        }
    }
}

fn listen_tcp(to: SocketAddr) -> io::Result<(PublishedAddress, OwnedFd)> {
    let listener = TcpListener::bind(to)?;
    listener.set_nonblocking(true)?;
    Ok((PublishedAddress::Tcp(listener.local_addr()?), listener.into()))
}

/// Accepts connections and passes them to the monitor, until it has ended. While the monitor does
/// not take them, no others are accepted.
pub(super) fn accept_all(monitor: &OwnedFd, listeners: &[Listener]) -> Result<(), Errno> {
    loop {
        let mut fds: Vec<PollFd<'_>> = std::iter::once(PollFd::new(monitor, PollFlags::empty()))
            .chain(listeners.iter().map(|listener| PollFd::new(&listener.socket, PollFlags::IN)))
            .collect();
        retry_when_short(|| retry_on_intr(|| poll(&mut fds, None)))?;
        if !fds[0].revents().is_empty() {
            return Ok(());
        }
        for (listener, polled) in listeners.iter().zip(&fds[1..]) {
            if !polled.revents().is_empty() {
                listener.accept(monitor)?;
            }
        }
    }
}

impl Listener {
    /// Passes one connection. An error is that of the monitor's socket.
    fn accept(&self, monitor: &OwnedFd) -> Result<(), Errno> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = match accept_with(&self.socket, flags) {
            Ok(socket) => socket,
            Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                thread::sleep(PAUSE);
                return Ok(());
            }
            // The client has gone, which the system may report as any error of a connection.
            Err(_) => return Ok(()),
        };
        if self.is_tcp && set_options(&socket).is_err() {
            // The client has gone.
            return Ok(());
        }
        let connection = Connection { guest_port: self.guest_port, socket };
        match retry_when_short(|| connection.send(monitor)) {
            // Other monitors of this user do not receive theirs (unix(7)).
            Err(Errno::TOOMANYREFS) => Ok(()),
            sent => sent,
        }
    }
}

#[cfg(test)]
#[path = "publish_tests.rs"]
mod tests;
