//! A client's side.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use firn_base::PageRange;
use uuid::Uuid;

use super::copies::{ArenaFacts, NoCopy};
use super::error::ClientError;
use super::wire::{MAX_RESPONSE, WireError, receive_with_descriptor, send};
use super::{ChunkRun, Granted, Request, Response};
use crate::extent::Extent;
use crate::mapped_extent::{MapExtentError, MappedExtent};
use crate::media::{Access, MediumFacts};
use crate::pool::{Imaging, Listing, PoolFacts, Recovery};

/// Runs of pages that fit into a request, whatever their numbers are.
const MOST_RUNS: usize = 20_000;

/// A connection to a pool's manager. What it was granted is given up when it is dropped: keep it for as long as the extents are used.
#[derive(Debug)]
pub struct Client {
    path: PathBuf,
    stream: UnixStream,
}

/// What a manager says of its pool.
#[derive(Debug)]
pub struct Description {
    /// What the pool is.
    pub pool: PoolFacts,
    /// What the medium is.
    pub medium: MediumFacts,
    /// What opening had to put right.
    pub recovery: Recovery,
    /// The manager's process.
    pub pid: u32,
    /// The medium, for reading.
    pub descriptor: OwnedFd,
}

/// An extent, and a descriptor of its medium.
#[derive(Debug)]
pub struct ExtentGrant {
    descriptor: OwnedFd,
    access: Access,
    granted: Granted,
}

impl ExtentGrant {
    /// Where it is.
    #[must_use]
    pub fn extent(&self) -> Extent {
        self.granted.extent
    }

    /// The pool's identity: with the extent's generation it names the content for ever.
    #[must_use]
    pub fn pool(&self) -> Uuid {
        self.granted.pool
    }

    /// Bytes to whose multiples the extent's parts are aligned.
    #[must_use]
    pub fn granule(&self) -> u64 {
        self.granted.granule
    }

    /// Whether a client has checked its bytes since the medium was opened.
    #[must_use]
    pub fn is_verified(&self) -> bool {
        self.granted.verified
    }

    /// Bytes of the largest leaf at which this host maps the medium.
    #[must_use]
    pub fn leaf(&self) -> u64 {
        self.granted.leaf
    }

    /// Whether the kernel has private mappings of the medium.
    #[must_use]
    pub fn has_private_mappings(&self) -> bool {
        self.granted.private_mappings
    }

    /// The medium: `O_RDONLY` for a snapshot, `O_RDWR` for a staging extent or a replica.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// The extent in this process's address space, which may outlive the grant, but not what it is granted for: the connection.
    ///
    /// # Errors
    /// The system refuses.
    pub fn map(&self) -> Result<MappedExtent, MapExtentError> {
        self.map_extent(self.granted.extent, self.access)
    }

    fn map_extent(&self, extent: Extent, access: Access) -> Result<MappedExtent, MapExtentError> {
        let Granted { granule, durability, .. } = self.granted;
        let failed = |source| MapExtentError { extent, source };
        let descriptor = self.descriptor.try_clone().map_err(failed)?;
        MappedExtent::map(descriptor, extent, granule, durability, access)
    }
}

/// A replica, and what it cost to make it.
#[derive(Debug)]
pub struct ReplicaGrant {
    /// Where it is; for writing.
    pub grant: ExtentGrant,
    /// The snapshot that it is a replica of.
    pub source: Extent,
    /// What was compared and copied while the request waited: nothing where it was ready before.
    pub imaging: Imaging,
    /// What was compared and copied before, where it was ready: after the run of the last who had it.
    pub prepared: Option<Imaging>,
}

impl ReplicaGrant {
    /// The snapshot that it is a replica of, mapped for reading. The replica keeps it pinned: the name may have another one by now, so
    /// do not ask for it by name.
    ///
    /// # Errors
    /// The system refuses.
    pub fn map_source(&self) -> Result<MappedExtent, MapExtentError> {
        self.grant.map_extent(self.source, Access::Read)
    }
}

/// A chunk set of a snapshot, as a client stored it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkSet {
    /// Names this state of the set, for [`Client::set_chunks`].
    pub revision: u64,
    /// The chunks of guest memory that the manager keeps copies of.
    pub chunks: Vec<ChunkRun>,
    /// The client's own state.
    pub state: Vec<u8>,
}

/// A chunk set, and a copy of it where one was ready.
#[derive(Debug)]
pub struct CopyGrant {
    /// The chunks of the set.
    pub chunks: Vec<ChunkRun>,
    /// The chunks that the copy holds, packed one behind the other in this order, and the copy: a memfd in pages of 2 MiB, for
    /// one microVM alone. Or why there is none.
    pub copy: Result<(Vec<ChunkRun>, OwnedFd), NoCopy>,
}

impl Client {
    /// Connects to a manager.
    ///
    /// # Errors
    /// [`ClientError::Gone`] where nobody listens.
    pub fn connect(path: &Path) -> Result<Self, ClientError> {
        match UnixStream::connect(path) {
            Ok(stream) => Ok(Self { path: path.to_owned(), stream }),
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
                ) =>
            {
                Err(ClientError::Gone(path.to_owned()))
            }
            Err(source) => Err(ClientError::Socket { path: path.to_owned(), source }),
        }
    }

    /// Uses a socket that is already connected to a manager, for a process that inherits or receives the connection. What the manager
    /// granted to the connection stays granted.
    #[must_use]
    pub fn from_stream(stream: UnixStream) -> Self {
        let peer = stream.peer_addr().ok();
        let path = peer.and_then(|peer| peer.as_pathname().map(Path::to_owned));
        Self { path: path.unwrap_or_else(|| PathBuf::from("(a connected socket)")), stream }
    }

    /// Returns the connected socket, to pass it to another process. What the manager granted to the connection stays granted.
    #[must_use]
    pub fn into_stream(self) -> UnixStream {
        self.stream
    }

    /// The manager's socket, for messages.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the pool is, with a descriptor for reading.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn describe(&mut self) -> Result<Description, ClientError> {
        match self.request(&Request::Describe)? {
            (Response::Described { pool, medium, recovery, pid }, Some(descriptor)) => {
                Ok(Description { pool, medium, recovery, pid, descriptor })
            }
            _ => Err(self.nonsense()),
        }
    }

    /// The snapshot of a name, pinned until [`Client::release`] or the connection's end.
    ///
    /// # Errors
    /// [`ClientError::Refused`] where there is none; others as they say.
    pub fn snapshot(&mut self, name: &str) -> Result<ExtentGrant, ClientError> {
        self.grant(&Request::Snapshot { name: name.to_owned() }, Access::Read)
    }

    /// A replica of the snapshot of a name for one microVM to run in, until [`Client::release`] or the connection's end. Where none is
    /// ready it is made now.
    ///
    /// # Errors
    /// [`ClientError::Refused`] where there is no such snapshot or no room; others as they say.
    pub fn replica(&mut self, name: &str) -> Result<ReplicaGrant, ClientError> {
        match self.request(&Request::Replica { name: name.to_owned() })? {
            (Response::Replica { granted, source, imaging, prepared }, Some(descriptor)) => {
                let grant = ExtentGrant { descriptor, access: Access::Write, granted };
                Ok(ReplicaGrant { grant, source, imaging, prepared })
            }
            _ => Err(self.nonsense()),
        }
    }

    /// A copy of a chunk set of a snapshot that this connection has pinned, where one is ready; `None` where there is no set of
    /// this key.
    ///
    /// # Errors
    /// See [`ClientError`]. A missing copy is not an error.
    pub fn copy(&mut self, generation: u64, key: &str) -> Result<Option<CopyGrant>, ClientError> {
        match self.request(&Request::Copy { generation, key: key.to_owned() })? {
            (Response::Copy { chunks, copied: Ok(copied) }, Some(descriptor)) => {
                Ok(Some(CopyGrant { chunks, copy: Ok((copied, descriptor)) }))
            }
            (Response::Copy { chunks, copied: Err(reason) }, _) => {
                Ok(Some(CopyGrant { chunks, copy: Err(reason) }))
            }
            (Response::NoChunkSet, _) => Ok(None),
            _ => Err(self.nonsense()),
        }
    }

    /// A chunk set of a snapshot that this connection has pinned; `None` where there is no set of this key.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn chunk_set(
        &mut self,
        generation: u64,
        key: &str,
    ) -> Result<Option<ChunkSet>, ClientError> {
        match self.request(&Request::ChunkSet { generation, key: key.to_owned() })? {
            (Response::ChunkSet { revision, chunks, state }, _) => {
                Ok(Some(ChunkSet { revision, chunks, state }))
            }
            (Response::NoChunkSet, _) => Ok(None),
            _ => Err(self.nonsense()),
        }
    }

    /// Stores a chunk set for a snapshot that this connection has pinned, so that the manager keeps copies of the chunks ready.
    /// It replaces the set of `revision`, or is a new set where `revision` is `None`. Returns `false`, and changes nothing,
    /// where the stored set is of another revision. `key` has at most 128 bytes.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn set_chunks(
        &mut self,
        generation: u64,
        key: &str,
        revision: Option<u64>,
        chunks: Vec<ChunkRun>,
        state: Vec<u8>,
    ) -> Result<bool, ClientError> {
        let key = key.to_owned();
        match self.request(&Request::SetChunks { generation, key, revision, chunks, state })? {
            (Response::Noted, _) => Ok(true),
            (Response::OtherRevision, _) => Ok(false),
            _ => Err(self.nonsense()),
        }
    }

    /// An extent to freeze into. Its bytes are whatever was there before: write all of guest memory, zeros too, and the tail; then
    /// [`MappedExtent::flush`], then [`Client::commit`].
    ///
    /// # Errors
    /// [`ClientError::Refused`] where there is no room, or somebody else writes that name; others as they say.
    pub fn begin(
        &mut self,
        name: &str,
        guest_bytes: u64,
        tail_bytes: u64,
    ) -> Result<ExtentGrant, ClientError> {
        let name = name.to_owned();
        self.grant(&Request::Begin { name, guest_bytes, tail_bytes }, Access::Write)
    }

    /// Publishes what was written into an extent of [`Client::begin`] and flushed.
    ///
    /// # Errors
    /// See [`ClientError`]; the name has what it had.
    pub fn commit(&mut self, generation: u64) -> Result<Extent, ClientError> {
        match self.request(&Request::Commit { generation })? {
            (Response::Published { extent }, _) => Ok(extent),
            _ => Err(self.nonsense()),
        }
    }

    /// Says that the bytes of a snapshot that this connection has were checked and are good: until the medium is opened again nobody
    /// has to check them.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn verified(&mut self, generation: u64) -> Result<(), ClientError> {
        match self.request(&Request::Verified { generation })? {
            (Response::Noted, _) => Ok(()),
            _ => Err(self.nonsense()),
        }
    }

    /// Gives up what was granted under a generation.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn release(&mut self, generation: u64) -> Result<(), ClientError> {
        match self.request(&Request::Release { generation })? {
            (Response::Released, _) => Ok(()),
            _ => Err(self.nonsense()),
        }
    }

    /// Waits until the manager has all ready that it makes ahead: replicas of microVMs that ended, and copies. It then does that
    /// as fast as it can, without regard for starts.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn settle(&mut self) -> Result<(), ClientError> {
        match self.request(&Request::Settle)? {
            (Response::Noted, _) => Ok(()),
            _ => Err(self.nonsense()),
        }
    }

    /// Gives up a replica, and says which pages of its guest memory were written: all that the guest wrote, by KVM's dirty log, and
    /// all that its monitor did. Nobody may write to it any more. The manager looks at these pages alone, and at a sample of
    /// the others; a list that is too long for a message is left out.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn give_back(&mut self, generation: u64, written: &[PageRange]) -> Result<(), ClientError> {
        if written.len() > MOST_RUNS {
            return self.release(generation);
        }
        let written = written.iter().map(|range| (range.first, range.pages)).collect();
        match self.request(&Request::GiveBack { generation, written })? {
            (Response::Released, _) => Ok(()),
            _ => Err(self.nonsense()),
        }
    }

    /// All extents, and what is free.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn list(&mut self) -> Result<Listing, ClientError> {
        Ok(self.list_all()?.0)
    }

    /// What the arena of copies holds.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn arena(&mut self) -> Result<ArenaFacts, ClientError> {
        Ok(self.list_all()?.1)
    }

    fn list_all(&mut self) -> Result<(Listing, ArenaFacts), ClientError> {
        match self.request(&Request::List)? {
            (Response::Listing { listing, arena }, _) => Ok((listing, arena)),
            _ => Err(self.nonsense()),
        }
    }

    /// Removes a name; its extent is freed once nobody has it pinned. Returns the bytes that are free at once.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn reclaim(&mut self, name: &str) -> Result<u64, ClientError> {
        match self.request(&Request::Reclaim { name: name.to_owned() })? {
            (Response::Reclaimed { bytes }, _) => Ok(bytes),
            _ => Err(self.nonsense()),
        }
    }

    /// Frees replicas that are only kept to be ready, and clears removed slots: how many of each.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn collect(&mut self) -> Result<(u64, u32), ClientError> {
        match self.request(&Request::Collect)? {
            (Response::Collected { slots, replicas }, _) => Ok((replicas, slots)),
            _ => Err(self.nonsense()),
        }
    }

    fn grant(&mut self, request: &Request, access: Access) -> Result<ExtentGrant, ClientError> {
        match self.request(request)? {
            (Response::Granted(granted), Some(descriptor)) => {
                Ok(ExtentGrant { descriptor, access, granted })
            }
            _ => Err(self.nonsense()),
        }
    }

    fn request(&mut self, request: &Request) -> Result<(Response, Option<OwnedFd>), ClientError> {
        send(&self.stream, request, None).map_err(|source| self.broken(source))?;
        match receive_with_descriptor(&self.stream, MAX_RESPONSE) {
            Ok((Response::Refused { refusal, message }, _)) => {
                Err(ClientError::Refused { refusal, message })
            }
            Ok(answer) => Ok(answer),
            Err(WireError::Closed) => Err(ClientError::Ended(self.path.clone())),
            Err(WireError::Io(source)) => Err(self.broken(source)),
            Err(WireError::Version(found)) => {
                Err(ClientError::Version { path: self.path.clone(), found })
            }
            Err(WireError::Malformed) => Err(self.nonsense()),
        }
    }

    fn nonsense(&self) -> ClientError {
        ClientError::Answer(self.path.clone())
    }

    fn broken(&self, source: io::Error) -> ClientError {
        match source.kind() {
            io::ErrorKind::BrokenPipe
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::UnexpectedEof => ClientError::Ended(self.path.clone()),
            _ => ClientError::Socket { path: self.path.clone(), source },
        }
    }
}
