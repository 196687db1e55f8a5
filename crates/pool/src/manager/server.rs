//! The manager's side.

use std::collections::{HashMap, HashSet};
use std::error::Error;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, Mode, chmodat};
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, bind, listen, shutdown,
    socket_with,
};

use super::error::{Refusal, ServerError};
use super::wire::{MAX_REQUEST, WireError, receive, send};
use super::{Granted, Request, Response};
use crate::extent::Extent;
use crate::media::Access;
use crate::pool::{
    AllocateError, Imaging, LookupError, Pin, Pool, PublishError, ReclaimError, Replica,
    ReplicaError, Staging,
};

/// Connections at a time.
const MAX_CONNECTIONS: usize = 4096;
/// What one connection may hold at a time.
const MAX_GRANTS: usize = 4096;
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
    pool: Pool,
    /// Replicas that are what their snapshot is, and that nobody runs in.
    ready: Mutex<Vec<Replica>>,
    /// Generations of the extents whose bytes a client has checked since the medium was opened.
    verified: Mutex<HashSet<u64>>,
    connections: AtomicUsize,
    ended: AtomicBool,
}

/// What a connection holds, by generation.
#[derive(Debug, Default)]
struct Grants {
    pins: Vec<Pin>,
    stagings: HashMap<u64, Staging>,
    replicas: HashMap<u64, Replica>,
}

type Answer = Result<(Response, Option<OwnedFd>), (Refusal, String)>;

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
            pool,
            ready: Mutex::default(),
            verified: Mutex::default(),
            connections: AtomicUsize::new(0),
            ended: AtomicBool::new(false),
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
        &self.shared.pool
    }

    /// Connections that are open.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::Relaxed)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Gone already, or its folder is: nothing is left over either way.
        let _ = fs::remove_file(&self.path);
        self.shared.ended.store(true, Ordering::Relaxed);
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
        if shared.ended.load(Ordering::Relaxed) {
            return;
        }
        let Ok(stream) = stream else {
            std::thread::sleep(PAUSE);
            continue;
        };
        // Too many, or without a thread for it: the connection closes, which tells the client.
        if shared.connections.load(Ordering::Relaxed) >= MAX_CONNECTIONS {
            continue;
        }
        shared.connections.fetch_add(1, Ordering::Relaxed);
        let count = Arc::clone(shared);
        let shared = Arc::clone(shared);
        let thread = std::thread::Builder::new().name("pool-client".into()).spawn(move || {
            let mut grants = Grants::default();
            serve(&stream, &shared, &mut grants);
            drop(stream);
            shared.take_back(std::mem::take(&mut grants.replicas).into_values());
            drop(grants);
            shared.connections.fetch_sub(1, Ordering::Relaxed);
        });
        if thread.is_err() {
            count.connections.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Serves one connection until it ends, breaks or talks nonsense.
fn serve(stream: &UnixStream, shared: &Shared, grants: &mut Grants) {
    loop {
        let answer = match receive(stream, MAX_REQUEST) {
            Ok(request) => shared.answer(request, grants),
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

impl Shared {
    fn ready(&self) -> MutexGuard<'_, Vec<Replica>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn verified(&self) -> MutexGuard<'_, HashSet<u64>> {
        self.verified.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, request: Request, grants: &mut Grants) -> Answer {
        match request {
            Request::Describe => {
                let descriptor = self.descriptor(Access::Read)?;
                let (pool, medium) = (self.pool.facts(), self.pool.medium().clone());
                let (recovery, pid) = (self.pool.recovery(), std::process::id());
                let described = Response::Described { pool, medium, recovery, pid };
                Ok((described, Some(descriptor)))
            }
            Request::Snapshot { name } => {
                grants.check_room()?;
                let pin = self.pool.pin(&name).map_err(refuse_lookup)?;
                let granted = self.granted(pin.extent());
                let descriptor = self.descriptor(Access::Read)?;
                grants.pins.push(pin);
                Ok((Response::Granted(granted), Some(descriptor)))
            }
            Request::Verified { generation } => {
                if !grants.pins.iter().any(|pin| pin.extent().generation == generation) {
                    return Err(not_held(generation));
                }
                self.verified().insert(generation);
                Ok((Response::Noted, None))
            }
            Request::Replica { name } => self.replica(&name, grants),
            Request::Begin { name, guest_bytes, tail_bytes } => {
                grants.check_room()?;
                let staging = self.with_room(|| self.pool.allocate(&name, guest_bytes, tail_bytes));
                let staging = staging.map_err(refuse_allocate)?;
                let granted = self.granted(staging.extent());
                let descriptor = self.descriptor(Access::Write)?;
                grants.stagings.insert(staging.extent().generation, staging);
                Ok((Response::Granted(granted), Some(descriptor)))
            }
            Request::Commit { generation } => {
                let staging = grants.stagings.remove(&generation);
                let staging = staging.ok_or_else(|| not_held(generation))?;
                let extent = staging
                    .publish()
                    .map_err(|error: PublishError| (Refusal::Medium, text(&error)))?;
                // What is ready of an older generation is of no use any more.
                self.drop_stale();
                Ok((Response::Published { extent }, None))
            }
            Request::Release { generation } => {
                if let Some(replica) = grants.replicas.remove(&generation) {
                    self.take_back([replica]);
                } else if grants.stagings.remove(&generation).is_none() {
                    let held = |pin: &Pin| pin.extent().generation == generation;
                    let position = grants.pins.iter().position(held);
                    grants.pins.swap_remove(position.ok_or_else(|| not_held(generation))?);
                }
                Ok((Response::Released, None))
            }
            Request::List => Ok((Response::Listing(self.pool.list()), None)),
            Request::Reclaim { name } => {
                // A replica that is ready keeps its snapshot.
                self.ready().retain(|replica| replica.source().name() != name);
                let bytes = self.pool.reclaim(&name).map_err(|error| match error {
                    ReclaimError::Lookup(error) => refuse_lookup(error),
                    error => (Refusal::Medium, text(&error)),
                })?;
                Ok((Response::Reclaimed { bytes }, None))
            }
            Request::Collect => {
                let replicas = std::mem::take(&mut *self.ready());
                let count = crate::num::u64_of(replicas.len());
                drop(replicas);
                let slots = self.pool.gc().map_err(|error| (Refusal::Medium, text(&error)))?;
                Ok((Response::Collected { slots, replicas: count }, None))
            }
        }
    }

    fn replica(&self, name: &str, grants: &mut Grants) -> Answer {
        grants.check_room()?;
        let current = self.pool.lookup(name).map_err(refuse_lookup)?;
        let ready = {
            let mut ready = self.ready();
            let source = |replica: &Replica| replica.source().extent().generation;
            let position = ready.iter().position(|replica| source(replica) == current.generation);
            position.map(|position| ready.swap_remove(position))
        };
        let (replica, ready, imaging) = match ready {
            Some(replica) => (replica, true, Imaging::default()),
            None => {
                let replica = self.with_room(|| self.pool.replica(name));
                let replica = replica.map_err(|error| match error {
                    ReplicaError::Lookup(error) => refuse_lookup(error),
                    ReplicaError::Allocate(error) => refuse_allocate(error),
                })?;
                let imaging = replica.image();
                (replica, false, imaging)
            }
        };
        let granted = self.granted(replica.extent());
        let source = replica.source().extent();
        let descriptor = self.descriptor(Access::Write)?;
        grants.replicas.insert(replica.extent().generation, replica);
        Ok((Response::Replica { granted, source, ready, imaging }, Some(descriptor)))
    }

    /// Tries again without the replicas that are only kept to be ready, where there is no room.
    fn with_room<T, E: IsFull>(&self, allocate: impl Fn() -> Result<T, E>) -> Result<T, E> {
        match allocate() {
            Err(error) if error.is_full() && !self.ready().is_empty() => {
                let replicas = std::mem::take(&mut *self.ready());
                drop(replicas);
                allocate()
            }
            result => result,
        }
    }

    /// Makes replicas ready again whose microVMs ended, or frees them where their snapshot is not current.
    fn take_back(&self, replicas: impl IntoIterator<Item = Replica>) {
        for replica in replicas {
            if self.is_current(&replica) {
                let _ = replica.image();
                self.ready().push(replica);
            }
        }
        self.drop_stale();
    }

    fn is_current(&self, replica: &Replica) -> bool {
        let source = replica.source();
        let current = self.pool.lookup(source.name());
        current.is_ok_and(|current| current.generation == source.extent().generation)
    }

    fn drop_stale(&self) {
        self.ready().retain(|replica| self.is_current(replica));
    }

    fn granted(&self, extent: Extent) -> Granted {
        let facts = self.pool.facts();
        let medium = self.pool.medium();
        Granted {
            pool: facts.uuid,
            granule: facts.granule,
            durability: medium.durability,
            leaf: medium.leaf(),
            private_mappings: medium.has_private_mappings(),
            verified: self.verified().contains(&extent.generation),
            extent,
        }
    }

    fn descriptor(&self, access: Access) -> Result<OwnedFd, (Refusal, String)> {
        let descriptor = self.pool.shared_medium().descriptor(access);
        descriptor.map_err(|error| {
            let medium = &self.pool.medium().name;
            (Refusal::Medium, format!("opening {medium} for a client: {error}"))
        })
    }
}

impl Grants {
    fn check_room(&self) -> Result<(), (Refusal, String)> {
        if self.pins.len() + self.stagings.len() + self.replicas.len() < MAX_GRANTS {
            return Ok(());
        }
        let message = format!("a connection holds at most {MAX_GRANTS} extents: release some");
        Err((Refusal::Invalid, message))
    }
}

/// Whether an error says that the pool has no room.
trait IsFull {
    fn is_full(&self) -> bool;
}

impl IsFull for AllocateError {
    fn is_full(&self) -> bool {
        matches!(self, Self::Full { .. })
    }
}

impl IsFull for ReplicaError {
    fn is_full(&self) -> bool {
        matches!(self, Self::Allocate(error) if error.is_full())
    }
}

fn not_held(generation: u64) -> (Refusal, String) {
    (Refusal::Invalid, format!("this connection holds no such extent of generation {generation}"))
}

#[expect(clippy::needless_pass_by_value, reason = "as map_err has it")]
fn refuse_lookup(error: LookupError) -> (Refusal, String) {
    let refusal = match &error {
        LookupError::Unknown(_) => Refusal::Unknown,
        LookupError::BeingWritten(_) => Refusal::BeingWritten,
    };
    (refusal, text(&error))
}

#[expect(clippy::needless_pass_by_value, reason = "as map_err has it")]
fn refuse_allocate(error: AllocateError) -> (Refusal, String) {
    let refusal = match &error {
        AllocateError::Name { .. } | AllocateError::GuestBytes(_) => Refusal::Invalid,
        AllocateError::BeingWritten(_) => Refusal::BeingWritten,
        AllocateError::TableFull { .. } | AllocateError::Full { .. } => Refusal::Full,
        AllocateError::Medium(_) => Refusal::Medium,
    };
    (refusal, text(&error))
}

/// An error with its causes.
fn text(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}
