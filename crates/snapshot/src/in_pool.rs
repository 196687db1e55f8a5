//! Snapshots in a pool that a manager owns: freezing into it, and opening what it holds.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_pool::{Client, ClientError, Grant, Imaging, MapExtentError, MappedExtent};
use thiserror::Error;

use crate::container::Section;
use crate::digests::DigestError;
use crate::error::OpenError;
use crate::extent::ExtentTarget;
use crate::layout::{CHUNK_SIZE, PAGE_SIZE};
use crate::read_at::ReadAt;
use crate::snapshot::{ExtentPlace, Snapshot};

/// Why a snapshot in a pool was not opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenPooledError {
    /// The manager did not grant it.
    #[error(transparent)]
    Manager(#[from] ClientError),
    /// Its extent could not be mapped.
    #[error(transparent)]
    Map(#[from] MapExtentError),
    /// The medium's descriptor could not be kept.
    #[error("keeping the descriptor of the pool's medium")]
    Descriptor(#[source] io::Error),
    /// What the extent holds is refused.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Its bytes are not those that were frozen.
    #[error("the snapshot {name} in the pool at {} is damaged; freeze it again", .pool.display())]
    Damaged {
        /// The snapshot.
        name: String,
        /// The socket of the pool's manager.
        pool: PathBuf,
        /// The first page that is.
        source: DigestError,
    },
}

/// When the bytes of a snapshot in a pool are checked against their digests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verify {
    /// Now.
    Always,
    /// Now, unless somebody has since the manager opened the medium: from then on nobody has it mapped for writing.
    Once,
    /// Not at all.
    Never,
}

/// A snapshot of a pool, and the connection that keeps its extent, or its replica, from being given to others.
#[derive(Debug)]
pub struct PooledSnapshot {
    /// The snapshot. Memory that is mapped from it must not outlive this value.
    pub snapshot: Snapshot,
    /// What the replica took, where one was asked for.
    pub replica: Option<ReplicaReport>,
    /// How long its bytes were checked, where they were.
    pub checked: Option<Duration>,
    generation: u64,
    /// What it was granted is given up with it.
    connection: Client,
}

/// What having a replica took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplicaReport {
    /// It was ready before it was asked for; otherwise the request waited for it.
    pub ready: bool,
    /// What was compared and copied while the request waited.
    pub imaging: Imaging,
}

impl PooledSnapshot {
    /// Opens the sealed snapshot `name` of the pool whose manager listens on `socket`.
    ///
    /// # Errors
    /// See [`OpenPooledError`].
    pub fn open(socket: &Path, name: &str, verify: Verify) -> Result<Self, OpenPooledError> {
        let mut connection = Client::connect(socket)?;
        let sealed = connection.snapshot(name)?;
        let mut snapshot = open(name, &sealed, sealed.map()?)?;
        let checked = check(socket, &mut connection, &sealed, &mut snapshot, verify)?;
        let generation = sealed.extent().generation;
        Ok(Self { snapshot, replica: None, checked, generation, connection })
    }

    /// Opens a replica of the snapshot, which the caller may run on and write to. The snapshot that it is made of is what
    /// is checked.
    ///
    /// # Errors
    /// See [`OpenPooledError`].
    pub fn open_replica(
        socket: &Path,
        name: &str,
        verify: Verify,
    ) -> Result<Self, OpenPooledError> {
        // A snapshot of that name may be frozen anew between the two: memory and tail have to be of one freeze.
        let (mut sealed, granted) = loop {
            let mut sealed = Self::open(socket, name, verify)?;
            let granted = sealed.connection.replica(name)?;
            if granted.source.generation == sealed.generation {
                break (sealed, granted);
            }
        };
        let memory = &granted.grant;
        sealed.snapshot.run_on(medium(memory)?, ExtentPlace { replica: true, ..place(memory) });
        sealed.replica = Some(ReplicaReport { ready: granted.ready, imaging: granted.imaging });
        Ok(sealed)
    }
}

/// Checks the snapshot's bytes if they have to be, and tells the manager.
fn check(
    socket: &Path,
    connection: &mut Client,
    sealed: &Grant,
    snapshot: &mut Snapshot,
    verify: Verify,
) -> Result<Option<Duration>, OpenPooledError> {
    let known = sealed.is_verified();
    if verify == Verify::Never || (verify == Verify::Once && known) {
        snapshot.set_checked(known);
        return Ok(None);
    }
    let begin = Instant::now();
    let mapped = sealed.map()?;
    let mut chunk = vec![0; usize::try_from(CHUNK_SIZE).unwrap_or(usize::MAX)];
    let total = snapshot.manifest().layout.total_bytes();
    let mut offset = 0;
    while offset < total {
        let len = usize::try_from(CHUNK_SIZE.min(total - offset)).unwrap_or(usize::MAX);
        mapped.read_guest(offset, &mut chunk[..len]);
        snapshot.digests().check(offset / PAGE_SIZE, &chunk[..len]).map_err(|source| {
            OpenPooledError::Damaged {
                name: snapshot.path().display().to_string(),
                pool: socket.to_owned(),
                source,
            }
        })?;
        offset += CHUNK_SIZE;
    }
    connection.verified(sealed.extent().generation)?;
    snapshot.set_checked(true);
    Ok(Some(begin.elapsed()))
}

fn medium(grant: &Grant) -> Result<File, OpenPooledError> {
    let medium = grant.descriptor().try_clone_to_owned();
    medium.map(File::from).map_err(OpenPooledError::Descriptor)
}

fn place(grant: &Grant) -> ExtentPlace {
    ExtentPlace {
        offset: grant.extent().offset,
        leaf: grant.leaf(),
        private: grant.has_private_mappings(),
        replica: false,
        checked: grant.is_verified(),
    }
}

/// The snapshot of a sealed extent, which is mapped in `tail`, too.
fn open(name: &str, sealed: &Grant, tail: MappedExtent) -> Result<Snapshot, OpenPooledError> {
    let tail: Arc<dyn ReadAt> = Arc::new(MappedTail(tail));
    let snapshot = Snapshot::open_extent(name, medium(sealed)?, place(sealed), &tail)?;
    // Mapped by its manifest, a larger memory would reach into the next extent.
    if snapshot.manifest().layout.total_bytes() != sealed.extent().guest_bytes {
        return Err(OpenPooledError::Open(OpenError::Malformed {
            path: name.into(),
            section: Section::Manifest,
            reason: "its guest memory is not as large as that of its extent",
        }));
    }
    Ok(snapshot)
}

#[derive(Debug)]
struct MappedTail(MappedExtent);

impl ReadAt for MappedTail {
    fn size(&self) -> io::Result<u64> {
        Ok(self.0.extent().tail_bytes)
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(buf.len() as u64);
        if end.is_none_or(|end| end > self.0.extent().tail_bytes) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.0.read_tail(offset, buf);
        Ok(())
    }
}

/// A name in a pool that a snapshot is frozen into, through the pool's manager.
#[derive(Debug)]
pub struct PoolTarget {
    socket: PathBuf,
    name: String,
    staging: Option<Staging>,
}

#[derive(Debug)]
struct Staging {
    connection: Client,
    generation: u64,
    mapped: MappedExtent,
}

impl PoolTarget {
    /// The snapshot will have the name `name` in the pool whose manager listens on `socket`.
    #[must_use]
    pub fn new(socket: &Path, name: &str) -> Self {
        Self { socket: socket.to_owned(), name: name.to_owned(), staging: None }
    }

    fn staging(&mut self) -> io::Result<&mut Staging> {
        self.staging.as_mut().ok_or_else(|| io::Error::other("nothing is allocated"))
    }
}

impl ExtentTarget for PoolTarget {
    fn allocate(&mut self, guest_bytes: u64, tail_bytes: u64) -> io::Result<()> {
        let mut connection = Client::connect(&self.socket).map_err(io::Error::other)?;
        let grant = connection.begin(&self.name, guest_bytes, tail_bytes);
        let grant = grant.map_err(io::Error::other)?;
        let (generation, mapped) = (grant.extent().generation, grant.map());
        let mapped = mapped.map_err(io::Error::other)?;
        self.staging = Some(Staging { connection, generation, mapped });
        Ok(())
    }

    fn write_memory(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.staging()?.mapped.write_guest(offset, bytes);
        Ok(())
    }

    fn write_tail(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.staging()?.mapped.write_tail(offset, bytes);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.staging()?.mapped.flush()
    }

    fn publish(&mut self) -> io::Result<()> {
        let staging = self.staging()?;
        staging.connection.commit(staging.generation).map_err(io::Error::other)?;
        self.staging = None;
        Ok(())
    }
}

#[cfg(test)]
#[path = "in_pool_tests.rs"]
mod tests;
