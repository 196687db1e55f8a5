//! The server side of the protocol.

use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, CWD, Mode, chmodat};
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, bind, listen, shutdown,
    socket_with,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::Response;
use super::directory::lock_folder;
use super::error::{Refusal, ServerError};
use super::requests::{Grants, Manager};
use super::wire::{WireError, receive, send};
use crate::media::MediumError;
use crate::pool::Pool;

/// Maximum number of connections.
const MAX_CONNECTIONS: usize = 4096;
const BACKLOG: i32 = 128;
/// Pause before accepting again if no descriptor is available.
const PAUSE: Duration = Duration::from_millis(10);

/// A pool's manager, which serves connections in its own threads. Dropping it removes its sockets.
/// Open connections continue until their clients close them.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    sockets: Vec<Listening>,
}

/// A socket of a manager.
#[derive(Debug)]
struct Listening {
    path: PathBuf,
    listener: UnixListener,
    thread: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    manager: Manager,
    clients: Mutex<Clients>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Clients {
    /// Number of connections.
    count: usize,
    /// New connections are refused.
    ended: bool,
}

impl Shared {
    fn clients(&self) -> MutexGuard<'_, Clients> {
        self.clients.lock()
    }
}

/// Waits in any thread until a manager has no clients.
#[derive(Debug)]
pub struct ClientWatch(Arc<Shared>);

impl ClientWatch {
    /// Returns after the manager had no connection for `idle`. From then on the manager refuses new
    /// connections: it closes them before its first response.
    pub fn wait_until_unused(&self, idle: Duration) {
        let mut clients = self.0.clients();
        loop {
            let used = |clients: &mut Clients| clients.count > 0 && !clients.ended;
            self.0.changed.wait_while(&mut clients, used);
            let unused = |clients: &mut Clients| clients.count == 0 && !clients.ended;
            let waited = self.0.changed.wait_while_for(&mut clients, unused, idle);
            if clients.ended || (waited.timed_out() && clients.count == 0) {
                clients.ended = true;
                return;
            }
        }
    }
}

impl Server {
    /// Serves `pool` on a socket at `path`, which only the owner of this process may use. Replaces
    /// a socket on which no process listens.
    ///
    /// # Errors
    /// See [`ServerError`].
    pub fn start(path: &Path, pool: Pool) -> Result<Self, ServerError> {
        let listener = listen_at(path)?;
        raise_descriptor_limit();
        let manager = Manager::new(pool);
        let manager =
            manager.map_err(|source| ServerError::Socket { path: path.to_owned(), source })?;
        let shared = Shared { manager, clients: Mutex::default(), changed: Condvar::new() };
        let mut server = Self { shared: Arc::new(shared), sockets: Vec::new() };
        server.accept_from(path, listener)?;
        Ok(server)
    }

    /// Serves on a second socket, at `path`, in the same way.
    ///
    /// # Errors
    /// See [`ServerError`].
    pub fn also_at(&mut self, path: &Path) -> Result<(), ServerError> {
        self.accept_from(path, listen_at(path)?)
    }

    fn accept_from(&mut self, path: &Path, listener: UnixListener) -> Result<(), ServerError> {
        let shared = Arc::clone(&self.shared);
        let started = listener.try_clone().and_then(|own| {
            let thread = std::thread::Builder::new().name("pool".into());
            Ok((own, thread.spawn(move || accept(&listener, &shared))?))
        });
        let (listener, thread) =
            started.map_err(|source| ServerError::Socket { path: path.to_owned(), source })?;
        self.sockets.push(Listening { path: path.to_owned(), listener, thread });
        Ok(())
    }

    /// The managed pool.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        self.shared.manager.pool()
    }

    /// Sets the maximum size in bytes of DRAM of copies, ready and lent. The default is an eighth
    /// of the host's memory.
    pub fn set_arena(&self, bytes: u64) {
        self.shared.manager.copies().set_size(bytes);
    }

    /// Makes later copies on a NUMA node while it has room. By default the kernel chooses: near the
    /// processor that makes the copy.
    ///
    /// # Errors
    /// [`MediumError::Node`] if this host has no such node with memory.
    pub fn set_copies_node(&self, node: u32) -> Result<(), MediumError> {
        self.shared.manager.copies().set_node(node).map_err(|errno| MediumError::Node {
            name: "copies".to_owned(),
            node,
            source: errno.into(),
        })
    }

    /// Makes copies, in the background, by what earlier managers of the pool learnt, so that the
    /// first start of a snapshot finds one ready. Without this call, copies of a snapshot are made
    /// from its first start on.
    pub fn prepare_copies(&self) {
        self.shared.manager.copies().prepare();
    }

    /// Number of open connections.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.shared.clients().count
    }

    /// A handle that waits until the manager has no clients.
    #[must_use]
    pub fn watch(&self) -> ClientWatch {
        ClientWatch(Arc::clone(&self.shared))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        for socket in &self.sockets {
            // The socket or its directory may already be removed.
            let _ = fs::remove_file(&socket.path);
        }
        self.shared.clients().ended = true;
        self.shared.changed.notify_all();
        // Clients that are still connected keep the manager, until this process ends.
        self.shared.manager.copies().store_all();
        for Listening { listener, thread, .. } in std::mem::take(&mut self.sockets) {
            // Makes `accept` return.
            if shutdown(&listener, Shutdown::Both).is_ok() {
                let _ = thread.join();
            }
        }
    }
}

/// Raises the limit of descriptors as far as this process may: each connection takes one, and each
/// replica in memory.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    // At the old limit, connections wait and replicas are refused.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Listens at a path, in place of a socket on which no process listens.
fn listen_at(path: &Path) -> Result<UnixListener, ServerError> {
    let failed = |source| ServerError::Socket { path: path.to_owned(), source };
    // Until the socket listens: before, it looks like that of a killed manager.
    let _lock = path.parent().and_then(lock_folder);
    match fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            return Err(ServerError::NotASocket(path.to_owned()));
        }
        Ok(_) if UnixStream::connect(path).is_ok() => {
            return Err(ServerError::InUse(path.to_owned()));
        }
        Ok(_) => fs::remove_file(path).map_err(failed)?,
        Err(_) => {}
    }
    listener(path).map_err(failed)
}

/// Creates a socket that is restricted to its owner before a client can connect.
fn listener(path: &Path) -> io::Result<UnixListener> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    chmodat(CWD, path, Mode::RUSR | Mode::WUSR, AtFlags::empty())?;
    listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

fn accept(listener: &UnixListener, shared: &Arc<Shared>) {
    for stream in listener.incoming() {
        let Ok(stream) = stream else {
            if shared.clients().ended {
                return;
            }
            std::thread::sleep(PAUSE);
            continue;
        };
        {
            let mut clients = shared.clients();
            if clients.ended {
                return;
            }
            // With too many connections or without a thread, the connection closes.
            if clients.count >= MAX_CONNECTIONS {
                continue;
            }
            clients.count += 1;
        }
        shared.changed.notify_all();
        let served = Served(Arc::clone(shared));
        let thread = std::thread::Builder::new().name("pool-client".into()).spawn(move || {
            let mut grants = Grants::default();
            serve(&stream, &served.0.manager, &mut grants);
            drop(stream);
            served.0.manager.take_back(grants);
        });
        // If no thread was created, the connection is already closed.
        drop(thread);
    }
}

/// A counted connection.
struct Served(Arc<Shared>);

impl Drop for Served {
    fn drop(&mut self) {
        self.0.clients().count -= 1;
        self.0.changed.notify_all();
    }
}

/// Serves a connection until the client closes it, it fails, a request is malformed, or the client
/// has used up its requests.
fn serve(stream: &UnixStream, manager: &Manager, grants: &mut Grants) {
    while let Some(max) = grants.max_request() {
        // A thread that waits in recv(2) is woken whenever its client takes an answer, at the cost
        // of the client's time. An error is that of the receive, too.
        let mut request = [PollFd::new(stream, PollFlags::IN)];
        if poll(&mut request, Some(&Timespec::default())) == Ok(0) {
            manager.pool().shared_medium().prepare_grants();
            let _ = poll(&mut request, None);
        }
        let answer = match receive(stream, max) {
            Ok(request) => manager.answer(request, grants),
            Err(WireError::Closed | WireError::Io(_)) => return,
            Err(error @ (WireError::Version(_) | WireError::Malformed)) => {
                // The beginning of the next frame is unknown.
                let message = format!("the request is not valid: {error}");
                let refused = Response::Refused { refusal: Refusal::Invalid, message };
                let _ = send(stream, &refused, None);
                return;
            }
        };
        let sent = match answer {
            Ok((response, descriptor)) => send(stream, &response, descriptor.as_ref()),
            Err((refusal, message)) => send(stream, &Response::Refused { refusal, message }, None),
        };
        if sent.is_err() {
            return;
        }
    }
}
