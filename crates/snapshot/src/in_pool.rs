//! Snapshots in a pool that a manager owns: freezing into it, and opening what it holds.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_base::PAGE_SIZE;
use firn_pool::{
    COPY_CHUNK, ChunkRun, Client, ClientError, CopyGrant, CopyRule, Grant, Imaging, MapExtentError,
    MappedExtent,
};
use thiserror::Error;

use crate::attach::AttachError;
use crate::container::Section;
use crate::copies::{Copies, CopyTable};
use crate::digests::DigestError;
use crate::error::OpenError;
use crate::extent::{ExtentTarget, Tail, identity_of, write_with_profile};
use crate::layout::{CHUNK_PAGES, CHUNK_SIZE};
use crate::page_set::PageSet;
use crate::profile::{Profile, Run};
use crate::read_at::ReadAt;
use crate::snapshot::{ExtentPlace, MAX_ATTEMPTS, Snapshot};

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

/// Why what an extent holds is not good.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CheckExtentError {
    /// Its tail is refused.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Its guest memory is not what was frozen.
    #[error(transparent)]
    Digest(#[from] DigestError),
    /// Its writable disk is not what was frozen.
    #[error("the writable disk is damaged: its digest does not match")]
    Overlay,
    /// Its writable disk cannot be read.
    #[error("the writable disk cannot be read")]
    ReadOverlay(#[source] io::Error),
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
    /// The replica's.
    replica_generation: Option<u64>,
    /// What it was granted is given up with it.
    connection: Client,
}

/// What having a replica took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplicaReport {
    /// What was compared and copied while the request waited: nothing where it was ready before.
    pub imaging: Imaging,
    /// What was compared and copied before, where it was ready.
    pub prepared: Option<Imaging>,
}

impl PooledSnapshot {
    /// Opens the sealed snapshot `name` of the pool whose manager listens on `socket`.
    ///
    /// # Errors
    /// See [`OpenPooledError`].
    pub fn open(socket: &Path, name: &str, verify: Verify) -> Result<Self, OpenPooledError> {
        Self::open_with(Client::connect(socket)?, name, verify)
    }

    /// Same as [`PooledSnapshot::open`], with a connection to the pool's manager, which the snapshot keeps.
    ///
    /// # Errors
    /// See [`OpenPooledError`].
    pub fn open_with(
        mut connection: Client,
        name: &str,
        verify: Verify,
    ) -> Result<Self, OpenPooledError> {
        let sealed = connection.snapshot(name)?;
        let extent = Arc::new(sealed.map()?);
        let mut snapshot = open(name, medium(&sealed)?, place(&sealed), &extent)?;
        let checked = match verify {
            Verify::Always => true,
            Verify::Once => !sealed.is_verified(),
            Verify::Never => false,
        };
        let begin = Instant::now();
        if checked {
            check_pages(&snapshot, &extent).map_err(|source| OpenPooledError::Damaged {
                name: name.to_owned(),
                pool: connection.path().to_owned(),
                source,
            })?;
            connection.verified(sealed.extent().generation)?;
            snapshot.set_checked(true);
        }
        let checked = checked.then(|| begin.elapsed());
        let generation = sealed.extent().generation;
        let (replica, replica_generation) = (None, None);
        Ok(Self { snapshot, replica, checked, generation, replica_generation, connection })
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
        Self::open_replica_with(Client::connect(socket)?, name, verify)
    }

    /// Same as [`PooledSnapshot::open_replica`], with a connection to the pool's manager, which the snapshot keeps.
    ///
    /// # Errors
    /// See [`OpenPooledError`].
    pub fn open_replica_with(
        mut connection: Client,
        name: &str,
        verify: Verify,
    ) -> Result<Self, OpenPooledError> {
        // A snapshot of that name may be frozen anew between the two: memory and tail have to be of one freeze.
        for _ in 0..MAX_ATTEMPTS {
            let mut sealed = Self::open_with(connection, name, verify)?;
            let granted = sealed.connection.replica(name)?;
            if granted.source.generation != sealed.generation {
                connection = sealed.connection;
                connection.release(granted.grant.extent().generation)?;
                connection.release(sealed.generation)?;
                continue;
            }
            let memory = &granted.grant;
            sealed.snapshot.run_on(medium(memory)?, place(memory));
            sealed.replica_generation = Some(memory.extent().generation);
            sealed.replica =
                Some(ReplicaReport { imaging: granted.imaging, prepared: granted.prepared });
            return Ok(sealed);
        }
        Err(OpenError::Replaced { path: name.into(), attempts: MAX_ATTEMPTS }.into())
    }
}

impl PooledSnapshot {
    /// Takes a copy of the chunks that a microVM of the sealed snapshot is expected to write, where the manager has one ready:
    /// [`Snapshot::copies`] has it then. `profile` names image pages, in whole chunks of 2 MiB, that the snapshot's profile
    /// expects by the rule; it is asked for only where the manager does not know it. Without a copy
    /// nothing is lost but time.
    ///
    /// # Errors
    /// See [`OpenPooledError`].
    pub fn take_copy(
        &mut self,
        rule: CopyRule,
        profile: impl FnOnce(&Snapshot) -> Result<Vec<Run>, OpenError>,
    ) -> Result<(), OpenPooledError> {
        let CopyGrant { expected, copy } =
            match self.connection.known_copy(self.generation, rule)? {
                Some(granted) => granted,
                None => {
                    let profile = chunks_of(&profile(&self.snapshot)?);
                    self.connection.copy(self.generation, rule, profile)?
                }
            };
        let expected = expected.into_iter().map(pages_of_chunks).collect();
        let copies = match copy {
            Ok((chunks, file)) => {
                let table = CopyTable::new(chunks.into_iter().map(pages_of_chunks));
                Copies { rule, expected, table, file: Some(file.into()), absent: None }
            }
            Err(reason) => Copies { rule, expected, absent: Some(reason), ..Copies::default() },
        };
        self.snapshot.run_with(copies);
        Ok(())
    }

    /// Gives the replica back, of which `written` names all image pages that were written: by the guest, by KVM, by the monitor. The memory
    /// must not be written any more. Without it, all of the replica is compared when this value is dropped.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn give_back(&mut self, written: &PageSet) -> Result<(), ClientError> {
        let Some(generation) = self.replica_generation.take() else { return Ok(()) };
        let written: Vec<_> = written.runs().map(|run| (run.start, run.end - run.start)).collect();
        self.connection.give_back(generation, &written)
    }

    /// Tells the manager which image pages a run wrote, or was right to have a copy of, in whole chunks of 2 MiB, so that it foresees
    /// the next run.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn wrote(&mut self, rule: CopyRule, chunks: &[Run]) -> Result<(), ClientError> {
        self.connection.wrote(self.generation, rule, chunks_of(chunks))
    }
}

const _: () = assert!(CHUNK_SIZE == COPY_CHUNK);

/// Runs of pages as runs of the chunks that are wholly in them.
fn chunks_of(runs: &[Run]) -> Vec<ChunkRun> {
    let chunks = runs.iter().filter_map(|run| {
        let first = run.first.div_ceil(CHUNK_PAGES);
        let count = (run.range().end / CHUNK_PAGES).checked_sub(first)?;
        Some((u32::try_from(first).ok()?, u32::try_from(count).ok()?))
    });
    chunks.filter(|(_, count)| *count > 0).collect()
}

fn pages_of_chunks((first, count): ChunkRun) -> Run {
    Run { first: u64::from(first) * CHUNK_PAGES, pages: u64::from(count) * CHUNK_PAGES }
}

/// Checks all that an extent holds: the sections of its tail, every page of guest memory against its digest, the writable disk
/// against its own. `name` is what errors call it.
///
/// # Errors
/// See [`CheckExtentError`].
pub fn check_extent(
    name: &str,
    medium: File,
    extent: MappedExtent,
) -> Result<(), CheckExtentError> {
    let extent = Arc::new(extent);
    // It is read, not mapped for a guest.
    let offset = extent.extent().offset;
    let place =
        ExtentPlace { offset, leaf: PAGE_SIZE, private: false, replica_of: None, checked: false };
    let snapshot = open(name, medium, place, &extent)?;
    snapshot.profile()?;
    check_pages(&snapshot, &extent)?;
    match (snapshot.manifest().overlay, snapshot.overlay()) {
        (Some(frozen), Some(overlay)) => {
            let found = identity_of(overlay).map_err(CheckExtentError::ReadOverlay)?;
            if found == frozen { Ok(()) } else { Err(CheckExtentError::Overlay) }
        }
        _ => Ok(()),
    }
}

fn check_pages(snapshot: &Snapshot, extent: &MappedExtent) -> Result<(), DigestError> {
    let total = snapshot.manifest().layout.total_bytes();
    let mut chunk = vec![0; usize::try_from(CHUNK_SIZE.min(total)).unwrap_or(usize::MAX)];
    let mut offset = 0;
    while offset < total {
        let len = usize::try_from(CHUNK_SIZE.min(total - offset)).unwrap_or(usize::MAX);
        extent.read_guest(offset, &mut chunk[..len]);
        snapshot.digests().check(offset / PAGE_SIZE, &chunk[..len])?;
        offset += CHUNK_SIZE;
    }
    Ok(())
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
        replica_of: None,
        checked: grant.is_verified(),
    }
}

/// The snapshot that a sealed extent holds.
fn open(
    name: &str,
    medium: File,
    place: ExtentPlace,
    extent: &Arc<MappedExtent>,
) -> Result<Snapshot, OpenError> {
    let tail: Arc<dyn ReadAt> = Arc::new(MappedTail(extent.clone()));
    let snapshot = Snapshot::open_extent(name, medium, place, &tail)?;
    // Mapped by its manifest, a larger memory would reach into the next extent.
    if snapshot.manifest().layout.total_bytes() != extent.extent().guest_bytes {
        return Err(OpenError::Malformed {
            path: name.into(),
            section: Section::Manifest,
            reason: "its guest memory is not as large as that of its extent",
        });
    }
    Ok(snapshot)
}

/// Puts a profile into the sealed snapshot `name` of the pool whose manager listens on `socket`, in the place of the one it has:
/// a new extent is written, and gets the name by one commit. Who has the old one mapped keeps it.
///
/// # Errors
/// [`AttachError`]; the snapshot is as it was. Where the pool has no room for both extents it says how much is missing.
pub fn set_pooled_profile(socket: &Path, name: &str, profile: &Profile) -> Result<(), AttachError> {
    let path = Path::new(name);
    let sealed_extent = || -> Result<_, OpenPooledError> {
        let mut connection = Client::connect(socket)?;
        let sealed = connection.snapshot(name)?;
        Ok((sealed.extent().generation, Arc::new(sealed.map()?), connection))
    };
    let (generation, extent, _pin) = sealed_extent()?;
    let tail: Arc<dyn ReadAt> = Arc::new(MappedTail(extent.clone()));
    let tail = Tail::open(&tail, path)?;
    let mut target = Update { target: PoolTarget::new(socket, name), socket, name, generation };
    let read = |offset, bytes: &mut [u8]| extent.read_guest(offset, bytes);
    write_with_profile(&tail, path, profile, read, &mut target)
}

/// A target for what was made of one generation: it replaces no other.
struct Update<'a> {
    target: PoolTarget,
    socket: &'a Path,
    name: &'a str,
    generation: u64,
}

impl ExtentTarget for Update<'_> {
    fn allocate(&mut self, guest_bytes: u64, tail_bytes: u64) -> io::Result<()> {
        self.target.allocate(guest_bytes, tail_bytes)
    }

    fn write_memory(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.target.write_memory(offset, bytes)
    }

    fn write_tail(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.target.write_tail(offset, bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.target.flush()
    }

    fn publish(&mut self) -> io::Result<()> {
        let mut connection = Client::connect(self.socket).map_err(io::Error::other)?;
        let now = connection.snapshot(self.name).map_err(io::Error::other)?;
        if now.extent().generation != self.generation {
            return Err(io::Error::other(
                "the function was frozen anew meanwhile; record it again",
            ));
        }
        self.target.publish()
    }
}

#[derive(Debug)]
struct MappedTail(Arc<MappedExtent>);

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
