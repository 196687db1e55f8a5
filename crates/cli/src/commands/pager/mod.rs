//! `firn pager`: the page fault handler of another monitor, such as Firecracker with its `Uffd`
//! backend.
//!
//! Two processes share the work. This one, the guardian, accepts the monitor's connection and then
//! only watches. Its child, the server, reads, checks and copies pages. Both hold the connection,
//! and with it a pidfd of the monitor, before either reads from it, and both hold the userfaultfd
//! before the server receives the message that carries it. When one process ends, the other kills
//! the monitor and closes its descriptors only after the monitor has ended. A guest that loses its
//! pager therefore neither waits forever nor reads zeros. A signal must not end both processes at
//! once: the server has its own session, and the guardian catches termination signals, kills
//! the monitor and exits.

mod monitor;
mod server;
mod signals;
mod wire;

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};

use clap::Args;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::retry_on_intr;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};
use thiserror::Error;

use firn_memory::pager::firecracker::{self, HandoffError};
use firn_memory::pager::{PageStore, PagerError, PagerPolicy};
use firn_snapshot::{KeyError, OpenError, Snapshot};

use crate::output;
use crate::signature_args::VerifierArgs;
use monitor::{Monitor, MonitorError, turn_away};
use signals::Signals;
use wire::{ReceiveError, receive, send};

/// Arguments of `firn pager`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn pager --socket /run/pager.sock --image memory.bin
  firn pager --socket /run/pager.sock --snapshot snapshots/hello

The pager serves one microVM and exits with it. Start it before the monitor loads its snapshot. For Firecracker:
  PUT /snapshot/load {\"snapshot_path\": \"vmstate\", \"mem_backend\": {\"backend_type\": \"Uffd\",
                      \"backend_path\": \"/run/pager.sock\"}, \"resume_vm\": true}
The pager kills the monitor if a pager process dies or receives a termination signal, or if a page is damaged.")]
pub(crate) struct PagerArgs {
    /// Unix socket for the monitor; the path must not exist
    #[arg(long, value_name = "SOCKET", required_unless_present = "serve")]
    socket: Option<PathBuf>,
    /// Directory of a snapshot, whose pages are checked against its digests
    #[arg(long, value_name = "DIRECTORY")]
    snapshot: Option<PathBuf>,
    #[command(flatten)]
    signed: VerifierArgs,
    /// Memory file of the monitor, whose pages are not checked
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with = "snapshot",
        required_unless_present = "snapshot"
    )]
    image: Option<PathBuf>,
    /// Pages copied per fault: a power of two up to 512
    #[arg(long, value_name = "PAGES", default_value = "16", value_parser = policy)]
    granule: PagerPolicy,
    /// Run as the server process, with its guardian on standard input
    #[arg(long, hide = true, conflicts_with = "socket")]
    serve: bool,
}

fn policy(pages: &str) -> Result<PagerPolicy, String> {
    let policy = pages.parse().ok().and_then(PagerPolicy::with_granule);
    policy.ok_or_else(|| "expected a power of two up to 512".to_owned())
}

/// Why a monitor's memory was not served until the monitor ended.
#[derive(Debug, Error)]
pub(crate) enum PagerCommandError {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error("cannot open the memory file {}", .path.display())]
    Image { path: PathBuf, source: std::io::Error },
    #[error("cannot listen on {}; if no pager uses this path, remove it", .path.display())]
    Listen { path: PathBuf, source: std::io::Error },
    #[error("cannot accept the monitor's connection")]
    Accept(#[source] std::io::Error),
    #[error("cannot kill the monitor, which has no pager any more")]
    Kill(#[source] std::io::Error),
    #[error("the monitor is killed because its memory cannot be served")]
    Handoff(#[source] HandoffError),
    #[error("cannot start the server process")]
    Server(#[source] std::io::Error),
    #[error("the server process ended before it served pages ({0})")]
    NotServed(ExitStatus),
    #[error("the server process ended unexpectedly ({0}), and the monitor was killed")]
    ServerEnded(ExitStatus),
    #[error("the guardian process ended unexpectedly, and the monitor was killed")]
    GuardianEnded,
    #[error("cannot install signal handlers")]
    Signals(#[source] std::io::Error),
    #[error("terminated by signal {0}; the monitor, if connected, was killed")]
    Signal(i32),
    #[error("cannot wait for the monitor or the other process of the pager")]
    Wait(#[source] std::io::Error),
    #[error(transparent)]
    Wire(#[from] ReceiveError),
    #[error(transparent)]
    Pager(#[from] PagerError),
}

/// The source of pages, and its size in bytes.
fn store(arguments: &PagerArgs) -> Result<(PageStore, u64), PagerCommandError> {
    if let Some(path) = &arguments.snapshot {
        let snapshot = Snapshot::open_signed(path, arguments.signed.verifier()?.as_ref())?;
        return Ok((PageStore::of(&snapshot), snapshot.manifest().layout.total_bytes()));
    }
    let path = arguments.image.clone().unwrap_or_default();
    let opened = File::open(&path).and_then(|file| Ok((file.metadata()?.len(), file)));
    let (len, file) = opened.map_err(|source| PagerCommandError::Image { path, source })?;
    Ok((PageStore::unchecked(file), len))
}

pub(crate) fn run(arguments: &PagerArgs) -> Result<ExitCode, PagerCommandError> {
    if arguments.serve {
        return server::run(arguments);
    }
    let path = arguments.socket.clone().unwrap_or_default();
    store(arguments)?;
    let mut signals = Signals::catch().map_err(PagerCommandError::Signals)?;
    let listen = |source| PagerCommandError::Listen { path: path.clone(), source };
    let socket = Socket::bind(&path).map_err(listen)?;
    // The server starts before a monitor can connect.
    let mut server = Server::start(arguments).map_err(PagerCommandError::Server)?;
    send(&server.socket, &[socket.listener.as_fd()])?;
    output::line(&format!("firn pager listens on {}", path.display()));
    match wait(&[&signals, &server.socket, &socket.listener])? {
        0 => return Err(signals.error()),
        1 => return Err(PagerCommandError::NotServed(server.end()?)),
        _ => {}
    }
    let (connection, _) = socket.listener.accept().map_err(PagerCommandError::Accept)?;
    // Sent first: if the guardian ends before this, no process watches the monitor.
    let sent = send(&server.socket, &[connection.as_fd()]);
    let monitor = match Monitor::of(&connection) {
        Ok(monitor) => monitor,
        Err(error) => return refuse(&connection, &error),
    };
    drop(socket);
    let mut kept = Vec::new();
    let served = sent
        .map_err(Into::into)
        .and_then(|()| server.serve(&mut signals, &monitor, &connection, &mut kept));
    // In every case, also after an error.
    monitor.kill()?;
    match served {
        Ok(true) => server.end().map(|_| ExitCode::SUCCESS),
        Ok(false) | Err(PagerCommandError::Wire(_)) => {
            Err(PagerCommandError::ServerEnded(server.end()?))
        }
        // The server may wait for this process, so this process does not wait for it.
        Err(error) => Err(error),
    }
}

/// Refuses a monitor that this process may not kill. The connection is shut down for reading but
/// stays open until the monitor closes its end, because closing a userfaultfd in it would give the
/// monitor zeros.
fn refuse(connection: &UnixStream, error: &MonitorError) -> Result<ExitCode, PagerCommandError> {
    // Fails if the monitor has ended.
    let _ = shutdown(connection, Shutdown::Read);
    output::print_error(error);
    // Waits only for the peer to close the connection.
    let mut wait = [PollFd::new(connection, PollFlags::empty())];
    retry_on_intr(|| poll(&mut wait, None))
        .map_err(|errno| PagerCommandError::Wait(errno.into()))?;
    Ok(ExitCode::FAILURE)
}

/// Waits until one of the descriptors is readable or its peer has closed it, and returns its index.
fn wait(descriptors: &[&dyn AsFd]) -> Result<usize, PagerCommandError> {
    let mut waits: Vec<PollFd<'_>> =
        descriptors.iter().map(|fd| PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)).collect();
    retry_on_intr(|| poll(&mut waits, None))
        .map_err(|errno| PagerCommandError::Wait(errno.into()))?;
    Ok(waits.iter().position(|wait| !wait.revents().is_empty()).unwrap_or_default())
}

/// A listening socket whose path is removed on drop.
struct Socket<'a> {
    listener: UnixListener,
    path: &'a Path,
}

impl<'a> Socket<'a> {
    fn bind(path: &'a Path) -> std::io::Result<Self> {
        let socket = Self { listener: UnixListener::bind(path)?, path };
        socket.listener.set_nonblocking(true)?;
        Ok(socket)
    }
}

impl Drop for Socket<'_> {
    fn drop(&mut self) {
        // The path may already be removed.
        let _ = std::fs::remove_file(self.path);
        turn_away(&self.listener);
    }
}

/// The server process. It exits with its guardian or the monitor.
struct Server {
    process: Child,
    socket: OwnedFd,
}

impl Server {
    fn start(arguments: &PagerArgs) -> std::io::Result<Self> {
        let (unix, packets) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let (socket, of_server) = socketpair(unix, packets, SocketFlags::CLOEXEC, None)?;
        let mut command = Command::new("/proc/self/exe");
        command.args(["pager", "--serve", "--granule", &arguments.granule.granule().to_string()]);
        if let Some(snapshot) = &arguments.snapshot {
            command.arg("--snapshot").arg(snapshot).args(arguments.signed.as_arguments());
        }
        if let Some(image) = &arguments.image {
            command.arg("--image").arg(image);
        }
        command.stdin(Stdio::from(of_server)).stdout(Stdio::null());
        // A session, not only a process group: the kernel sends SIGHUP to a stopped process whose
        // group loses its last parent of the same session, so a stopped server would end with its
        // guardian.
        //
        // SAFETY: setsid(2) is async-signal-safe and changes no memory.
        unsafe { command.pre_exec(|| Ok(rustix::process::setsid().map(drop)?)) };
        let process = command.spawn()?;
        Ok(Self { process, socket })
    }

    /// Lets the server serve the monitor's memory. Returns `true` when the monitor ended, `false`
    /// when the server ended. Both processes hold the descriptors in `kept`.
    fn serve(
        &self,
        signals: &mut Signals,
        monitor: &Monitor,
        connection: &UnixStream,
        kept: &mut Vec<OwnedFd>,
    ) -> Result<bool, PagerCommandError> {
        match wait(&[signals, &self.socket, connection])? {
            0 => return Err(signals.error()),
            1 => return Ok(false),
            _ => {}
        }
        *kept = firecracker::peek(connection).map_err(PagerCommandError::Handoff)?;
        send(&self.socket, &[])?;
        if wait(&[signals, &self.socket])? == 0 {
            return Err(signals.error());
        }
        // The server has started serving.
        receive(&self.socket)?;
        match wait(&[signals, monitor, &self.socket])? {
            0 => Err(signals.error()),
            which => Ok(which == 1),
        }
    }

    fn end(&mut self) -> Result<ExitStatus, PagerCommandError> {
        self.process.wait().map_err(PagerCommandError::Wait)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may already have ended. No page is served after the guardian ends.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
