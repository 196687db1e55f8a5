//! The manager's side.

use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, Mode, chmodat};
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, bind, listen, shutdown,
    socket_with,
};

use super::Response;
use super::error::{Refusal, ServerError};
use super::requests::{Grants, Manager};
use super::wire::{MAX_REQUEST, WireError, receive, send};
use crate::pool::Pool;

/// Connections at a time.
const MAX_CONNECTIONS: usize = 4096;
const BACKLOG: i32 = 128;
/// Where no descriptor is left, some may be soon.
const PAUSE: Duration = Duration::from_millis(10);

/// A pool's manager, served by threads of its own. Dropping it removes the socket; connections that are open go on until their
/// clients end them.
#[derive(Debug)]
pub struct Server {
    path: PathBuf,
    shared: Arc<Shared>,
    listener: UnixListener,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    manager: Manager,
    clients: Mutex<Clients>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Clients {
    /// Connections that are served.
    count: usize,
    /// No more are.
    ended: bool,
}

impl Shared {
    fn clients(&self) -> MutexGuard<'_, Clients> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits for the end of a manager's clients, in any thread.
#[derive(Debug)]
pub struct ClientWatch(Arc<Shared>);

impl ClientWatch {
    /// Returns once nobody has been connected for `patience`. From then on nobody is served: a connection closes before its first answer.
    pub fn wait_until_unused(&self, patience: Duration) {
        let mut clients = self.0.clients();
        loop {
            let used = |clients: &mut Clients| clients.count > 0 && !clients.ended;
            clients =
                self.0.changed.wait_while(clients, used).unwrap_or_else(PoisonError::into_inner);
            let unused = |clients: &mut Clients| clients.count == 0 && !clients.ended;
            let waited = self.0.changed.wait_timeout_while(clients, patience, unused);
            let timeout;
            (clients, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            if timeout.timed_out() || clients.ended {
                clients.ended = true;
                return;
            }
        }
    }
}

impl Server {
    /// Serves `pool` on a socket at `path`, which only the owner of this process may use. A socket that nobody serves is replaced.
    ///
    /// # Errors
    /// See [`ServerError`].
    pub fn start(path: &Path, pool: Pool) -> Result<Self, ServerError> {
        let socket_error = |source| ServerError::Socket { path: path.to_owned(), source };
        match fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => {
                return Err(ServerError::NoSocket(path.to_owned()));
            }
            Ok(_) if UnixStream::connect(path).is_ok() => {
                return Err(ServerError::Taken(path.to_owned()));
            }
            Ok(_) => fs::remove_file(path).map_err(socket_error)?,
            Err(_) => {}
        }
        let listener = listener(path).map_err(socket_error)?;
        let shared = Arc::new(Shared {
            manager: Manager::new(pool).map_err(socket_error)?,
            clients: Mutex::default(),
            changed: Condvar::new(),
        });
        let own = listener.try_clone().map_err(socket_error)?;
        let mut server = Self {
            path: path.to_owned(),
            shared: Arc::clone(&shared),
            listener: own,
            thread: None,
        };
        let thread = std::thread::Builder::new()
            .name("pool".into())
            .spawn(move || accept(&listener, &shared))
            .map_err(socket_error)?;
        server.thread = Some(thread);
        Ok(server)
    }

    /// The pool that is served.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        self.shared.manager.pool()
    }

    /// Sets how many bytes of DRAM copies that are made ahead may take, ready and in use; an eighth of the host's memory if it
    /// is not called.
    pub fn set_arena(&self, bytes: u64) {
        self.shared.manager.copies().set_size(bytes);
    }

    /// Connections that are open.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.shared.clients().count
    }

    /// Tells when its clients are gone.
    #[must_use]
    pub fn watch(&self) -> ClientWatch {
        ClientWatch(Arc::clone(&self.shared))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Gone already, or its folder is: nothing is left over either way.
        let _ = fs::remove_file(&self.path);
        self.shared.clients().ended = true;
        self.shared.changed.notify_all();
        // Ends the wait for the next connection.
        if shutdown(&self.listener, Shutdown::Both).is_ok()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

/// A socket that is its owner's before anybody can connect to it.
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
            // Too many, or without a thread for it: the connection closes, which tells the client.
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
        // Without a thread the connection is closed already.
        drop(thread);
    }
}

/// A connection that counts.
struct Served(Arc<Shared>);

impl Drop for Served {
    fn drop(&mut self) {
        self.0.clients().count -= 1;
        self.0.changed.notify_all();
    }
}

/// Serves one connection until it ends, breaks or talks nonsense.
fn serve(stream: &UnixStream, manager: &Manager, grants: &mut Grants) {
    loop {
        let answer = match receive(stream, MAX_REQUEST) {
            Ok(request) => manager.answer(request, grants),
            Err(WireError::Ended | WireError::Io(_)) => return,
            Err(error @ (WireError::Version(_) | WireError::Nonsense)) => {
                // Where the next frame begins is not known any more.
                let message = format!("the request is not understood: {error}");
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
