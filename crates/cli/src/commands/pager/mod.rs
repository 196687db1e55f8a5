//! `firn pager`: the page fault handler of another monitor, such as Firecracker with its `Uffd` backend.
//!
//! Two processes: this one, the guardian, which takes the connection and then only watches, and a child, the server, which
//! reads, checks and copies pages. Both have the connection, and with it the monitor's process (pidfd), before anything is
//! taken from it, and the userfaultfd before one takes it out of the connection. When one of them ends, the other kills
//! the monitor, and closes nothing before the monitor is gone. So a guest whose pager is lost neither waits for ever nor
//! gets zeros. Signals that end a process must not end both at once: the server is in a process group of its own, and the
//! guardian catches those that people and their systems send, and does the same upon one.

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
use firn_snapshot::{OpenError, Snapshot};

use crate::output;
use monitor::{Monitor, MonitorError, turn_away};
use signals::Signals;
use wire::{ReceiveError, receive, send};

/// Arguments of `firn pager`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn pager --socket /run/pager.sock --image memory.bin
  firn pager --socket /run/pager.sock --snapshot snapshots/hello

It serves one microVM, and ends with it. Start it before the monitor loads its snapshot; for Firecracker:
  PUT /snapshot/load {\"snapshot_path\": \"vmstate\", \"mem_backend\": {\"backend_type\": \"Uffd\",
                      \"backend_path\": \"/run/pager.sock\"}, \"resume_vm\": true}
If the pager is lost or ended by a signal, or a page is not what was frozen, the monitor is killed.")]
pub(crate) struct PagerArgs {
    /// Where the monitor connects; nothing may be there yet
    #[arg(long, value_name = "SOCKET", required_unless_present = "serve")]
    socket: Option<PathBuf>,
    /// A snapshot: its pages are compared with its digests
    #[arg(long, value_name = "DIRECTORY")]
    snapshot: Option<PathBuf>,
    /// A memory file of the monitor's own: its pages enter as they are
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with = "snapshot",
        required_unless_present = "snapshot"
    )]
    image: Option<PathBuf>,
    /// Pages that one fault brings: a power of two up to 512
    #[arg(long, value_name = "PAGES", default_value = "16", value_parser = policy)]
    granule: PagerPolicy,
    /// The server's process: its guardian is its standard input
    #[arg(long, hide = true, conflicts_with = "socket")]
    serve: bool,
}

fn policy(pages: &str) -> Result<PagerPolicy, String> {
    let policy = pages.parse().ok().and_then(PagerPolicy::with_granule);
    policy.ok_or_else(|| "a power of two up to 512 is wanted".to_owned())
}

/// Why a monitor's memory was not served, or not to its end.
#[derive(Debug, Error)]
pub(crate) enum PagerCommandError {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error("opening the memory file {}", .path.display())]
    Image { path: PathBuf, source: std::io::Error },
    #[error("listening on {}; if no pager runs there, remove it", .path.display())]
    Listen { path: PathBuf, source: std::io::Error },
    #[error("taking the monitor's connection")]
    Accept(#[source] std::io::Error),
    #[error("killing the monitor, which has lost its pager")]
    Kill(#[source] std::io::Error),
    #[error("the monitor is killed, for its memory cannot be served")]
    Handoff(#[source] HandoffError),
    #[error("starting the server")]
    Server(#[source] std::io::Error),
    #[error("the server ended before it served ({0})")]
    NotServed(ExitStatus),
    #[error("the server was lost ({0}), and the monitor was killed")]
    Lost(ExitStatus),
    #[error("the guardian was lost, and the monitor was killed")]
    GuardianLost,
    #[error("preparing to catch signals")]
    Signals(#[source] std::io::Error),
    #[error("ended by signal {0}; the monitor, if one had connected, was killed")]
    Signal(i32),
    #[error("waiting for the monitor or the other process of the pager")]
    Wait(#[source] std::io::Error),
    #[error(transparent)]
    Wire(#[from] ReceiveError),
    #[error(transparent)]
    Pager(#[from] PagerError),
}

/// Where pages come from, and how many bytes of them there are.
fn store(arguments: &PagerArgs) -> Result<(PageStore, u64), PagerCommandError> {
    if let Some(path) = &arguments.snapshot {
        let snapshot = Snapshot::open(path)?;
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
    // Before there is anything to lose.
    let mut server = Server::start(arguments).map_err(PagerCommandError::Server)?;
    send(&server.socket, &[socket.listener.as_fd()])?;
    output::line(&format!("firn pager listens on {}", path.display()));
    match wait(&[&signals, &server.socket, &socket.listener])? {
        0 => return Err(signals.error()),
        1 => return Err(PagerCommandError::NotServed(server.end()?)),
        _ => {}
    }
    let (connection, _) = socket.listener.accept().map_err(PagerCommandError::Accept)?;
    // At once: a guardian that is lost before that leaves nobody who knows the monitor.
    let told = send(&server.socket, &[connection.as_fd()]);
    let monitor = match Monitor::of(&connection) {
        Ok(monitor) => monitor,
        Err(error) => return refuse(&connection, &error),
    };
    drop(socket);
    let mut kept = Vec::new();
    let served = told
        .map_err(Into::into)
        .and_then(|()| server.serve(&mut signals, &monitor, &connection, &mut kept));
    // Whatever came of it.
    monitor.kill()?;
    match served {
        Ok(true) => server.end().map(|_| ExitCode::SUCCESS),
        Ok(false) | Err(PagerCommandError::Wire(_)) => Err(PagerCommandError::Lost(server.end()?)),
        // It may wait for this process: it is not waited for.
        Err(error) => Err(error),
    }
}

/// Refuses a monitor that could not be killed. It can send nothing more; what it has sent stays open as long as its end of the
/// connection is: closed, its memory would be zeros.
fn refuse(connection: &UnixStream, error: &MonitorError) -> Result<ExitCode, PagerCommandError> {
    // It fails where the monitor is gone.
    let _ = shutdown(connection, Shutdown::Read);
    output::complain(error);
    // Nothing but the end is waited for.
    let mut wait = [PollFd::new(connection, PollFlags::empty())];
    retry_on_intr(|| poll(&mut wait, None))
        .map_err(|errno| PagerCommandError::Wait(errno.into()))?;
    Ok(ExitCode::FAILURE)
}

/// Waits until one of some descriptors has something to read, or the other side is gone: which.
fn wait(descriptors: &[&dyn AsFd]) -> Result<usize, PagerCommandError> {
    let mut waits: Vec<PollFd<'_>> =
        descriptors.iter().map(|fd| PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)).collect();
    retry_on_intr(|| poll(&mut waits, None))
        .map_err(|errno| PagerCommandError::Wait(errno.into()))?;
    Ok(waits.iter().position(|wait| !wait.revents().is_empty()).unwrap_or_default())
}

/// A socket that is removed again.
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
        // Who removed it before had a reason.
        let _ = std::fs::remove_file(self.path);
        turn_away(&self.listener);
    }
}

/// The server's process. It ends when its guardian does, or the monitor.
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
            command.arg("--snapshot").arg(snapshot);
        }
        if let Some(image) = &arguments.image {
            command.arg("--image").arg(image);
        }
        command.stdin(Stdio::from(of_server)).stdout(Stdio::null()).process_group(0);
        let process = command.spawn()?;
        Ok(Self { process, socket })
    }

    /// Has the monitor's memory served. `true`: until the monitor ended; `false`: until the server did. What is `kept` is
    /// open in both processes.
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
        // It serves.
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
        // It may have ended already. Nothing is served any more when a guardian ends.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
