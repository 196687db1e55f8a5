//! Snapshots in a pool that a manager owns: freezing into it, and opening what it holds.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use firn_pool::{Client, ClientError, Grant, Imaging, MapExtentError, MappedExtent};
use thiserror::Error;

use crate::error::OpenError;
use crate::extent::ExtentTarget;
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
}

/// A snapshot of a pool, and the connection that keeps its extent, or its replica, from being given to others.
#[derive(Debug)]
pub struct PooledSnapshot {
    /// The snapshot. Memory that is mapped from it must not outlive this value.
    pub snapshot: Snapshot,
    /// What the replica took, where one was asked for.
    pub replica: Option<ReplicaReport>,
    _connection: Client,
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
    pub fn open(socket: &Path, name: &str) -> Result<Self, OpenPooledError> {
        let mut connection = Client::connect(socket)?;
        let sealed = connection.snapshot(name)?;
        let snapshot = open(name, &sealed, sealed.map()?, false)?;
        Ok(Self { snapshot, replica: None, _connection: connection })
    }

    /// Opens a replica of the snapshot, which the caller may run on and write to.
    ///
    /// # Errors
    /// See [`OpenPooledError`].
    pub fn open_replica(socket: &Path, name: &str) -> Result<Self, OpenPooledError> {
        let mut connection = Client::connect(socket)?;
        let granted = connection.replica(name)?;
        let report = ReplicaReport { ready: granted.ready, imaging: granted.imaging };
        // The pin that the replica has on its source holds the source's tail, too.
        let sealed = connection.snapshot(name)?;
        let snapshot = open(name, &granted.grant, sealed.map()?, true)?;
        Ok(Self { snapshot, replica: Some(report), _connection: connection })
    }
}

/// The snapshot whose memory is `memory`'s, and whose tail is that of `tail`.
fn open(
    name: &str,
    memory: &Grant,
    tail: MappedExtent,
    replica: bool,
) -> Result<Snapshot, OpenPooledError> {
    let medium = memory.descriptor().try_clone_to_owned().map_err(OpenPooledError::Descriptor)?;
    let place = ExtentPlace {
        offset: memory.extent().offset,
        leaf: memory.leaf(),
        private: memory.has_private_mappings(),
        replica,
    };
    let tail: Arc<dyn ReadAt> = Arc::new(MappedTail(tail));
    Ok(Snapshot::open_extent(name, File::from(medium), place, &tail)?)
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
