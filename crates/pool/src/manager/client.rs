//! The client side of the protocol.

use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use firn_base::PageRange;
use uuid::Uuid;

use super::copies::{ArenaFacts, NoCopy};
use super::error::ClientError;
use super::wire::{MAX_RESPONSE, WireError, frame, receive_with_descriptor};
use super::{Granted, Request, Response};
use crate::extent::Extent;
use crate::mapped_extent::{MapExtentError, MappedExtent};
use crate::media::{Access, MediumFacts};
use crate::pool::{Imaging, Listing, PoolFacts, Recovery};
use crate::runs::{decode_runs, encode_runs, first_pages};

/// A connection to a pool's manager. Dropping it releases its grants, so keep it while the granted
/// extents are used.
///
/// ```
/// use std::sync::Arc;
/// use firn_pool::{Client, CreateOptions, MappedMedium, MemfdOptions, Pool, Server};
///
/// let options = MemfdOptions { size: 16 << 20, huge: None, node: None };
/// let medium = Arc::new(MappedMedium::memfd(options)?);
/// let pool = Pool::create(medium, &CreateOptions::default())?;
/// let directory = tempfile::tempdir()?;
/// let socket = directory.path().join("pool.sock");
/// let server = Server::start(&socket, pool)?;
///
/// let mut writer = Client::connect(&socket)?;
/// let staging = writer.begin("hello", 2 << 20, 16)?;
/// let extent = staging.map()?;
/// extent.write_guest(0, &vec![1; 2 << 20])?;
/// extent.write_tail(0, b"machine state")?;
/// extent.flush()?;
/// writer.commit(staging.extent().generation)?;
///
/// let mut reader = Client::connect(&socket)?;
/// let mut state = [0; 13];
/// reader.snapshot("hello")?.map()?.read_tail(0, &mut state);
/// assert_eq!(&state, b"machine state");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Client {
    path: PathBuf,
    stream: UnixStream,
    confinement: Confinement,
}

/// Whether a connection is [confined](Client::confine).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Confinement {
    None,
    /// The answer has not been received.
    Requested,
    Done,
}

/// What a start wants beside the snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted<'a> {
    /// Nothing.
    Snapshot,
    /// A [copy](Client::copy) of the copy set of this key.
    Copy(&'a str),
    /// A [replica](Client::replica).
    Replica,
}

/// What a start is [granted](Client::start).
#[derive(Debug)]
pub struct StartGrant {
    /// The sealed extent.
    pub snapshot: ExtentGrant,
    /// The copy that was wanted; `None` if there is no set with its key.
    pub copy: Option<CopyGrant>,
    /// The replica that was wanted. It is of another generation if the snapshot was replaced
    /// meanwhile.
    pub replica: Option<ReplicaGrant>,
}

/// The properties of a managed pool.
#[derive(Debug)]
pub struct Description {
    /// The pool's properties.
    pub pool: PoolFacts,
    /// The medium's properties.
    pub medium: MediumFacts,
    /// What recovery changed when the pool was opened.
    pub recovery: Recovery,
    /// The manager's pid.
    pub pid: u32,
    /// A descriptor of the medium for reading.
    pub descriptor: OwnedFd,
}

/// A granted extent with a descriptor of its medium.
#[derive(Debug)]
pub struct ExtentGrant {
    descriptor: OwnedFd,
    access: Access,
    granted: Granted,
}

impl ExtentGrant {
    /// Location on the medium.
    #[must_use]
    pub fn extent(&self) -> Extent {
        self.granted.extent
    }

    /// The pool's identity. Together with the extent's generation it identifies the content.
    #[must_use]
    pub fn pool(&self) -> Uuid {
        self.granted.pool
    }

    /// Alignment of the extent's parts, bytes.
    #[must_use]
    pub fn granule(&self) -> u64 {
        self.granted.granule
    }

    /// Whether a client has checked the extent's bytes since the medium was opened.
    #[must_use]
    pub fn is_verified(&self) -> bool {
        self.granted.verified
    }

    /// Whether a part of a staging extent is zero, so that zeros need not be written there.
    /// `offset` is from the extent's beginning.
    #[must_use]
    pub fn is_zeroed(&self, offset: u64, len: u64) -> bool {
        let mut parts = self.granted.zeroed.iter();
        parts.any(|(start, end)| *start <= offset && len <= end.saturating_sub(offset))
    }

    /// Bytes of the largest leaf with which this host maps the medium.
    #[must_use]
    pub fn leaf(&self) -> u64 {
        self.granted.leaf
    }

    /// Whether the kernel supports private mappings of the medium.
    #[must_use]
    pub fn has_private_mappings(&self) -> bool {
        self.granted.private_mappings
    }

    /// A descriptor: of a replica's own memory, where it has that, and otherwise of the medium;
    /// `O_RDONLY` for a snapshot, `O_RDWR` for a staging extent or a replica.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// Where in the descriptor the extent begins, bytes.
    #[must_use]
    pub fn begin(&self) -> u64 {
        self.granted.begin
    }

    /// Maps the extent. The mapping may outlive this value, but its content is only guaranteed
    /// while the connection is open.
    ///
    /// # Errors
    /// Mapping fails.
    pub fn map(&self) -> Result<MappedExtent, MapExtentError> {
        let Granted { granule, durability, extent, begin, .. } = self.granted;
        let failed = |source| MapExtentError { extent, source };
        let descriptor = self.descriptor.try_clone().map_err(failed)?;
        MappedExtent::map(descriptor, begin, extent, granule, durability, self.access)
    }
}

/// A granted replica, and the cost of imaging it.
#[derive(Debug)]
pub struct ReplicaGrant {
    /// The replica's extent, for writing.
    pub grant: ExtentGrant,
    /// The snapshot of which it is a replica.
    pub source: Extent,
    /// The imaging while the request waited; none if the replica was ready.
    pub imaging: Imaging,
    /// The imaging before the request, after the previous run, if the replica was ready.
    pub prepared: Option<Imaging>,
}

/// A copy set of a snapshot, as stored by a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopySet {
    /// Identifies this state of the set, for [`Client::store_copy_set`].
    pub revision: u64,
    /// The pages of guest memory that the manager keeps copies of, ascending.
    pub runs: Vec<PageRange>,
    /// State stored by the client.
    pub state: Vec<u8>,
}

/// A copy set, and a copy of it if one was ready.
#[derive(Debug)]
pub struct CopyGrant {
    /// The pages of the set, ascending.
    pub runs: Vec<PageRange>,
    /// The pages in the copy, and the copy: a memfd for one microVM only, in which
    /// [`pack_copy`](crate::pack_copy) tells their places. Otherwise why there is none.
    pub copy: Result<(Vec<PageRange>, OwnedFd), NoCopy>,
}

impl Client {
    /// Connects to a manager.
    ///
    /// # Errors
    /// [`ClientError::NotRunning`] if no manager listens on `path`.
    pub fn connect(path: &Path) -> Result<Self, ClientError> {
        match UnixStream::connect(path) {
            Ok(stream) => {
                Ok(Self { path: path.to_owned(), stream, confinement: Confinement::None })
            }
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
                ) =>
            {
                Err(ClientError::NotRunning(path.to_owned()))
            }
            Err(source) => Err(ClientError::Socket { path: path.to_owned(), source }),
        }
    }

    /// Uses a socket that is already connected to a manager, for a process that inherits or
    /// receives the connection. What the manager granted to the connection stays granted.
    #[must_use]
    pub fn from_stream(stream: UnixStream) -> Self {
        let peer = stream.peer_addr().ok();
        let path = peer.and_then(|peer| peer.as_pathname().map(Path::to_owned));
        let path = path.unwrap_or_else(|| PathBuf::from("(a connected socket)"));
        Self { path, stream, confinement: Confinement::None }
    }

    /// Returns the connected socket, to pass it to another process. What the manager granted to the
    /// connection stays granted.
    #[must_use]
    pub fn into_stream(self) -> UnixStream {
        self.stream
    }

    /// The manager's socket, for messages.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the properties of the pool, with a descriptor for reading.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn describe(&mut self) -> Result<Description, ClientError> {
        match self.request(&Request::Describe)? {
            (Response::Described { pool, medium, recovery, pid }, Some(descriptor)) => {
                Ok(Description { pool, medium, recovery, pid, descriptor })
            }
            _ => Err(self.unexpected_response()),
        }
    }

    /// Pins the snapshot of a name until [`Client::release`] or the end of the connection.
    ///
    /// # Errors
    /// [`ClientError::Refused`] if the name has no snapshot; other variants as documented there.
    pub fn snapshot(&mut self, name: &str) -> Result<ExtentGrant, ClientError> {
        self.grant(&Request::Snapshot { name: name.to_owned() }, Access::Read)
    }

    /// Returns a replica of the snapshot of a name for one microVM, until [`Client::release`] or
    /// the end of the connection. If none is ready, the manager images one.
    ///
    /// # Errors
    /// [`ClientError::Refused`] if the name has no snapshot or the pool is full; other variants as
    /// documented there.
    pub fn replica(&mut self, name: &str) -> Result<ReplicaGrant, ClientError> {
        let response = self.request(&Request::Replica { name: name.to_owned() })?;
        self.replica_of(response)
    }

    fn replica_of(
        &self,
        response: (Response, Option<OwnedFd>),
    ) -> Result<ReplicaGrant, ClientError> {
        match response {
            (Response::Replica { granted, source, imaging, prepared }, Some(descriptor)) => {
                let grant = ExtentGrant { descriptor, access: Access::Write, granted };
                Ok(ReplicaGrant { grant, source, imaging, prepared })
            }
            _ => Err(self.unexpected_response()),
        }
    }

    /// Returns a copy of a copy set of a snapshot that this connection has pinned, if one is
    /// ready; `None` if there is no set with this key.
    ///
    /// # Errors
    /// See [`ClientError`]. A missing copy is not an error.
    pub fn copy(&mut self, generation: u64, key: &str) -> Result<Option<CopyGrant>, ClientError> {
        let generation = Some(generation);
        let response = self.request(&Request::Copy { generation, key: key.to_owned() })?;
        self.copy_of(response)
    }

    /// [`Client::snapshot`], what a start wants of it, and with `confine` [`Client::confine`] if
    /// nothing is left to request, with one wait for the manager.
    ///
    /// # Errors
    /// As of these.
    pub fn start(
        &mut self,
        name: &str,
        wanted: Wanted<'_>,
        confine: bool,
    ) -> Result<StartGrant, ClientError> {
        let beside = match wanted {
            Wanted::Snapshot => None,
            Wanted::Copy(key) => Some(Request::Copy { generation: None, key: key.to_owned() }),
            Wanted::Replica => Some(Request::Replica { name: name.to_owned() }),
        };
        let requests = [
            Some(Request::Snapshot { name: name.to_owned() }),
            beside,
            confine.then_some(Request::ConfineForStart),
        ];
        self.send(requests.iter().flatten())?;
        // All answers are taken, also after a refusal.
        let [snapshot, beside, confined] =
            requests.map(|request| request.map(|_| self.receive()).transpose());
        let Some(snapshot) = snapshot? else { return Err(self.unexpected_response()) };
        let mut grant = StartGrant {
            snapshot: self.granted(snapshot, Access::Read)?,
            copy: None,
            replica: None,
        };
        match (wanted, beside?) {
            (Wanted::Copy(_), Some(response)) => grant.copy = self.copy_of(response)?,
            (Wanted::Replica, Some(response)) => grant.replica = Some(self.replica_of(response)?),
            _ => {}
        }
        match confined? {
            None | Some((Response::Confined(false), _)) => {}
            Some((Response::Confined(true), _)) => self.confinement = Confinement::Done,
            Some(_) => return Err(self.unexpected_response()),
        }
        Ok(grant)
    }

    fn copy_of(
        &self,
        response: (Response, Option<OwnedFd>),
    ) -> Result<Option<CopyGrant>, ClientError> {
        match response {
            (Response::Copy { runs, copied: Ok(pages) }, Some(descriptor)) => {
                let runs = decode_runs(&runs);
                let copied = first_pages(&runs, pages);
                Ok(Some(CopyGrant { runs, copy: Ok((copied, descriptor)) }))
            }
            (Response::Copy { runs, copied: Err(reason) }, _) => {
                Ok(Some(CopyGrant { runs: decode_runs(&runs), copy: Err(reason) }))
            }
            (Response::NoCopySet, _) => Ok(None),
            _ => Err(self.unexpected_response()),
        }
    }

    /// Returns a copy set of a snapshot that this connection has pinned; `None` if there is no set
    /// with this key.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn copy_set(&mut self, generation: u64, key: &str) -> Result<Option<CopySet>, ClientError> {
        match self.request(&Request::CopySet { generation, key: key.to_owned() })? {
            (Response::CopySet { revision, runs, state }, _) => {
                Ok(Some(CopySet { revision, runs: decode_runs(&runs), state }))
            }
            (Response::NoCopySet, _) => Ok(None),
            _ => Err(self.unexpected_response()),
        }
    }

    /// Stores a copy set for a snapshot that this connection has pinned, so that the manager keeps
    /// copies of these pages ready. The set replaces the one of `revision`, or is new if `revision`
    /// is `None`. Returns `false` and changes nothing if the stored set has another revision. `key`
    /// has at most 128 bytes, and the set 256 KiB, of which a run takes 8 bytes.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn store_copy_set(
        &mut self,
        generation: u64,
        key: &str,
        revision: Option<u64>,
        runs: &[PageRange],
        state: Vec<u8>,
    ) -> Result<bool, ClientError> {
        let (key, runs) = (key.to_owned(), encode_runs(runs));
        match self.request(&Request::StoreCopySet { generation, key, revision, runs, state })? {
            (Response::Noted, _) => Ok(true),
            (Response::OtherRevision, _) => Ok(false),
            _ => Err(self.unexpected_response()),
        }
    }

    /// Allocates an extent to freeze into. It contains old bytes: write all of guest memory, zeros
    /// included except where [`ExtentGrant::is_zeroed`], and the tail, then call
    /// [`MappedExtent::flush`] and [`Client::commit`].
    ///
    /// # Errors
    /// [`ClientError::Refused`] if the pool is full or another client writes a snapshot of this
    /// name; other variants as documented there.
    pub fn begin(
        &mut self,
        name: &str,
        guest_bytes: u64,
        tail_bytes: u64,
    ) -> Result<ExtentGrant, ClientError> {
        let name = name.to_owned();
        self.grant(&Request::Begin { name, guest_bytes, tail_bytes }, Access::Write)
    }

    /// Publishes an extent of [`Client::begin`] whose content is flushed.
    ///
    /// # Errors
    /// See [`ClientError`]; the name keeps its previous snapshot.
    pub fn commit(&mut self, generation: u64) -> Result<Extent, ClientError> {
        match self.request(&Request::Commit { generation })? {
            (Response::Published { extent }, _) => Ok(extent),
            _ => Err(self.unexpected_response()),
        }
    }

    /// Reports that the bytes of a snapshot that this connection has pinned were checked and are
    /// valid. Clients need not check them again until the medium is reopened.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn verified(&mut self, generation: u64) -> Result<(), ClientError> {
        match self.request(&Request::Verified { generation })? {
            (Response::Noted, _) => Ok(()),
            _ => Err(self.unexpected_response()),
        }
    }

    /// Whether a snapshot that this connection has pinned is the current one of its name. For the
    /// manager this is a start, so it pauses its background work.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn is_current(&mut self, generation: u64) -> Result<bool, ClientError> {
        match self.request(&Request::IsCurrent { generation })? {
            (Response::Current(is_current), _) => Ok(is_current),
            _ => Err(self.unexpected_response()),
        }
    }

    /// Confines this connection for good to what it was granted: it can release its grants,
    /// replace one copy set that exists, and request [`is_current`](Self::is_current) and
    /// [`copy_set`](Self::copy_set). The manager refuses all else with
    /// [`Refusal::Confined`](super::Refusal::Confined), and closes the connection after 256
    /// requests. All later requests come after this one; [`confined`](Self::confined) waits for its
    /// answer. A connection that is confined already stays so, without a request.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn confine(&mut self) -> Result<(), ClientError> {
        if self.confinement == Confinement::None {
            self.send([&Request::Confine])?;
            self.confinement = Confinement::Requested;
        }
        Ok(())
    }

    /// Waits until the manager has confined this connection, if that was requested.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn confined(&mut self) -> Result<(), ClientError> {
        if self.confinement != Confinement::Requested {
            return Ok(());
        }
        self.confinement = Confinement::Done;
        match self.receive()? {
            (Response::Noted, _) => Ok(()),
            _ => Err(self.unexpected_response()),
        }
    }

    /// Releases the grant of a generation. The manager uses its space again when no process has it
    /// mapped or has a descriptor of it.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn release(&mut self, generation: u64) -> Result<(), ClientError> {
        match self.request(&Request::Release { generation })? {
            (Response::Released, _) => Ok(()),
            _ => Err(self.unexpected_response()),
        }
    }

    /// Waits until the manager has imaged released replicas, made copies and zeroed free space. The
    /// manager does not pause for starts meanwhile.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn settle(&mut self) -> Result<(), ClientError> {
        match self.request(&Request::Settle)? {
            (Response::Noted, _) => Ok(()),
            _ => Err(self.unexpected_response()),
        }
    }

    /// Lists all extents and the free space.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn list(&mut self) -> Result<Listing, ClientError> {
        Ok(self.list_all()?.0)
    }

    /// Returns the usage of the arena of copies.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn arena(&mut self) -> Result<ArenaFacts, ClientError> {
        Ok(self.list_all()?.1)
    }

    fn list_all(&mut self) -> Result<(Listing, ArenaFacts), ClientError> {
        match self.request(&Request::List)? {
            (Response::Listing { listing, arena }, _) => Ok((listing, arena)),
            _ => Err(self.unexpected_response()),
        }
    }

    /// Removes a name. Its extent is freed when its last pin is released. Returns the bytes that
    /// are free immediately.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn reclaim(&mut self, name: &str) -> Result<u64, ClientError> {
        match self.request(&Request::Reclaim { name: name.to_owned() })? {
            (Response::Reclaimed { bytes }, _) => Ok(bytes),
            _ => Err(self.unexpected_response()),
        }
    }

    /// Frees unused replicas and clears removed slots. Returns the number of each.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn collect(&mut self) -> Result<(u64, u32), ClientError> {
        match self.request(&Request::Collect)? {
            (Response::Collected { slots, replicas }, _) => Ok((replicas, slots)),
            _ => Err(self.unexpected_response()),
        }
    }

    fn grant(&mut self, request: &Request, access: Access) -> Result<ExtentGrant, ClientError> {
        let response = self.request(request)?;
        self.granted(response, access)
    }

    fn granted(
        &self,
        response: (Response, Option<OwnedFd>),
        access: Access,
    ) -> Result<ExtentGrant, ClientError> {
        match response {
            (Response::Granted(granted), Some(descriptor)) => {
                Ok(ExtentGrant { descriptor, access, granted })
            }
            _ => Err(self.unexpected_response()),
        }
    }

    fn request(&mut self, request: &Request) -> Result<(Response, Option<OwnedFd>), ClientError> {
        self.send([request])?;
        self.receive()
    }

    /// Sends requests with one write, which wakes the manager once.
    fn send<'a>(
        &mut self,
        requests: impl IntoIterator<Item = &'a Request>,
    ) -> Result<(), ClientError> {
        self.confined()?;
        let frames = requests.into_iter().map(frame).collect::<io::Result<Vec<_>>>();
        let sent = frames.and_then(|frames| (&self.stream).write_all(&frames.concat()));
        sent.map_err(|source| self.broken(source))
    }

    /// Sends the body of a request that may be of another version, and receives the response.
    #[cfg(test)]
    pub(super) fn send_raw(&mut self, body: &[u8]) -> Result<(), ClientError> {
        let raw: serde_json::Value = serde_json::from_slice(body).unwrap();
        (&self.stream).write_all(&frame(&raw).unwrap()).unwrap();
        self.receive().map(drop)
    }

    fn receive(&mut self) -> Result<(Response, Option<OwnedFd>), ClientError> {
        match receive_with_descriptor(&self.stream, MAX_RESPONSE) {
            Ok((Response::Refused { refusal, message }, _)) => {
                Err(ClientError::Refused { refusal, message })
            }
            Ok(answer) => Ok(answer),
            Err(WireError::Closed) => Err(ClientError::Closed(self.path.clone())),
            Err(WireError::Io(source)) => Err(self.broken(source)),
            Err(WireError::Version(found)) => {
                Err(ClientError::Version { path: self.path.clone(), found })
            }
            Err(WireError::Malformed) => Err(self.unexpected_response()),
        }
    }

    fn unexpected_response(&self) -> ClientError {
        ClientError::UnexpectedResponse(self.path.clone())
    }

    fn broken(&self, source: io::Error) -> ClientError {
        match source.kind() {
            io::ErrorKind::BrokenPipe
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::UnexpectedEof => ClientError::Closed(self.path.clone()),
            _ => ClientError::Socket { path: self.path.clone(), source },
        }
    }
}
