//! What a pool's manager grants for one run of a snapshot.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_base::PageRange;
use firn_pool::{
    COPY_CHUNK, Client, ClientError, CopyGrant, CopySet, ExtentGrant, Imaging, StartGrant, Wanted,
};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::copies::{Copies, CopyTable};
use crate::directory::MAX_ATTEMPTS;
use crate::error::{OpenError, OpenPooledError};
use crate::in_pool::{check_pages, open_extent};
use crate::keys::Verifier;
use crate::layout::CHUNK_SIZE;
use crate::snapshot::Snapshot;

/// When the bytes of a snapshot in a pool are checked against their digests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verify {
    /// At each opening.
    Always,
    /// At the first opening since the manager opened the medium. After that, no process has the
    /// extent mapped for writing.
    Once,
    /// Never.
    Never,
}

/// What is checked when a snapshot in a pool is opened.
#[derive(Debug, Clone, Copy)]
pub struct Checks<'a> {
    /// When its bytes are checked against their digests. With [`Verify::Always`] guest memory and
    /// disk are also compared with the signature.
    pub bytes: Verify,
    /// What has to confirm its signature, before anything of it is parsed.
    pub signature: Option<&'a Verifier>,
}

impl From<Verify> for Checks<'_> {
    fn from(bytes: Verify) -> Self {
        Self { bytes, signature: None }
    }
}

/// Where guest memory is in a pool, and how it can be mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExtentPlace {
    /// Offset of guest memory in the [file](Grant::take_medium) that it is mapped from, in bytes.
    pub offset: u64,
    /// Bytes of the largest leaf at which this host maps the medium.
    pub leaf: u64,
    /// Whether the kernel supports private mappings of the medium. A device of persistent memory
    /// supports shared mappings only.
    pub private: bool,
    /// Whether it is a replica, which one microVM owns and writes.
    pub replica: bool,
    /// Whether the bytes, or those that the replica was copied from, were checked since the
    /// manager opened the medium.
    pub checked: bool,
}

/// The cost of a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplicaReport {
    /// What the manager compared and copied while the request waited. Nothing when the replica
    /// was ready.
    pub imaging: Imaging,
    /// What the manager compared and copied before the request, when the replica was ready.
    pub prepared: Option<Imaging>,
}

/// What a pool's manager grants for one run of a [`Snapshot`]: the extent that guest memory is
/// mapped from, and copies of the chunks that the run is expected to write.
///
/// The grant ends when this value is dropped. The snapshot, and memory that is mapped from the
/// grant, must not outlive it.
#[derive(Debug)]
pub struct Grant {
    medium: Mutex<Option<File>>,
    extent: ExtentPlace,
    copies: Option<Copies>,
    replica: Option<ReplicaReport>,
    check_time: Option<Duration>,
    /// Generation of the sealed extent.
    generation: u64,
    connection: Mutex<Client>,
}

/// Opens the sealed snapshot `name` of the pool whose manager listens on `socket`.
///
/// # Errors
/// See [`OpenPooledError`].
pub fn open_pooled<'a>(
    socket: &Path,
    name: &str,
    checks: impl Into<Checks<'a>>,
) -> Result<(Snapshot, Grant), OpenPooledError> {
    open(Client::connect(socket)?, name, checks.into(), Wanted::Snapshot, false)
}

/// Opens a snapshot for a start, with a connection to the pool's manager, which the grant keeps:
/// like [`open_pooled`], where a copy is wanted [with it](Grant::take_copy), or like
/// [`open_replica`]. Where nothing is left to request, the connection is
/// [confined](Client::confine). It waits for the manager once.
///
/// # Errors
/// See [`OpenPooledError`].
pub fn open_for_start(
    connection: Client,
    name: &str,
    checks: Checks<'_>,
    wanted: Wanted<'_>,
) -> Result<(Snapshot, Grant), OpenPooledError> {
    // What is checked is reported to the manager.
    open(connection, name, checks, wanted, checks.bytes != Verify::Always)
}

fn open(
    mut connection: Client,
    name: &str,
    checks: Checks<'_>,
    wanted: Wanted<'_>,
    confine: bool,
) -> Result<(Snapshot, Grant), OpenPooledError> {
    // A freeze may replace the snapshot between the two requests: memory and tail must come from
    // the same freeze.
    let is_of = |start: &StartGrant| {
        let replica = start.replica.as_ref();
        replica.is_none_or(|it| it.source.generation == start.snapshot.extent().generation)
    };
    for _ in 0..MAX_ATTEMPTS {
        let start = connection.start(name, wanted, confine)?;
        if is_of(&start) {
            return open_granted(connection, name, checks, wanted, start);
        }
        let replica = start.replica.map(|replica| replica.grant);
        for grant in [Some(start.snapshot), replica].into_iter().flatten() {
            connection.release(grant.extent().generation)?;
        }
    }
    Err(OpenError::Replaced { path: name.into(), attempts: MAX_ATTEMPTS }.into())
}

fn open_granted(
    mut connection: Client,
    name: &str,
    checks: Checks<'_>,
    wanted: Wanted<'_>,
    StartGrant { snapshot: sealed, copy, replica }: StartGrant,
) -> Result<(Snapshot, Grant), OpenPooledError> {
    let mut extent = place(&sealed);
    let generation = sealed.extent().generation;
    let snapshot = open_extent(name, &Arc::new(sealed.map()?), checks.signature)?;
    let check = match checks.bytes {
        Verify::Always => true,
        Verify::Once => !sealed.is_verified(),
        Verify::Never => false,
    };
    let begin = Instant::now();
    if check {
        check_pages(&snapshot).map_err(|source| OpenPooledError::Damaged {
            name: name.to_owned(),
            pool: connection.path().to_owned(),
            source,
        })?;
        connection.verified(generation)?;
        extent.checked = true;
    }
    if checks.bytes == Verify::Always {
        snapshot.check_signed_files()?;
    }
    let check_time = check.then(|| begin.elapsed());
    let memory = replica.as_ref().map_or(&sealed, |replica| &replica.grant);
    if replica.is_some() {
        extent = ExtentPlace { checked: extent.checked, replica: true, ..place(memory) };
    }
    let copies = match (wanted, copy) {
        (Wanted::Copy(key), Some(copy)) => Some(copies(key, copy)),
        _ => None,
    };
    let grant = Grant {
        medium: Mutex::new(Some(medium(memory)?)),
        extent,
        copies,
        replica: replica
            .as_ref()
            .map(|replica| ReplicaReport { imaging: replica.imaging, prepared: replica.prepared }),
        check_time,
        generation,
        connection: Mutex::new(connection),
    };
    Ok((snapshot, grant))
}

/// Opens a snapshot like [`open_pooled`], with a grant for a replica that the caller may write.
/// What is checked is the sealed extent that the replica was copied from.
///
/// # Errors
/// See [`OpenPooledError`].
pub fn open_replica<'a>(
    socket: &Path,
    name: &str,
    checks: impl Into<Checks<'a>>,
) -> Result<(Snapshot, Grant), OpenPooledError> {
    open(Client::connect(socket)?, name, checks.into(), Wanted::Replica, false)
}

impl Grant {
    /// What to map guest memory from: the pool's medium, read-only for a sealed extent, writable
    /// for a replica, or the memfd of a replica. The medium gives access to all extents, so it is
    /// returned once, and the caller closes it before the guest runs.
    #[must_use]
    pub fn take_medium(&self) -> Option<File> {
        self.medium.lock().take()
    }

    /// Where guest memory is.
    #[must_use]
    pub fn extent(&self) -> ExtentPlace {
        self.extent
    }

    /// The copies that [`take_copy`](Self::take_copy) requested.
    #[must_use]
    pub fn copies(&self) -> Option<&Copies> {
        self.copies.as_ref()
    }

    /// The cost of the replica, if this is one.
    #[must_use]
    pub fn replica(&self) -> Option<ReplicaReport> {
        self.replica
    }

    /// The time that the check of the snapshot's bytes took, if they were checked.
    #[must_use]
    pub fn check_time(&self) -> Option<Duration> {
        self.check_time
    }

    /// Takes a copy of the copy set of a key, where the manager has one ready;
    /// [`copies`](Self::copies) returns it. Returns `false` where the manager has no such set.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn take_copy(&mut self, key: &str) -> Result<bool, ClientError> {
        let Some(copy) = self.connection.get_mut().copy(self.generation, key)? else {
            return Ok(false);
        };
        self.copies = Some(copies(key, copy));
        Ok(true)
    }

    /// The revision and the client's state of the copy set of a key; `None` where the manager has
    /// no such set.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn copy_set(&mut self, key: &str) -> Result<Option<(u64, Vec<u8>)>, ClientError> {
        let set = self.connection.get_mut().copy_set(self.generation, key)?;
        Ok(set.map(|CopySet { revision, state, .. }| (revision, state)))
    }

    /// Stores a copy set, so that the manager keeps copies of these image pages ready. The set
    /// replaces the one of `revision`, or is new where `revision` is `None`. Returns `false`, and
    /// changes nothing, where the stored set has another revision.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn store_copy_set(
        &mut self,
        key: &str,
        revision: Option<u64>,
        runs: &[PageRange],
        state: Vec<u8>,
    ) -> Result<bool, ClientError> {
        self.connection.get_mut().store_copy_set(self.generation, key, revision, runs, state)
    }

    /// Whether the pool still has this snapshot under its name. For the manager this is a start, so
    /// it pauses its background work.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn is_current(&self) -> Result<bool, ClientError> {
        self.connection.lock().is_current(self.generation)
    }

    /// [Confines](Client::confine) the connection to the pool's manager to this grant.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn confine(&mut self) -> Result<(), ClientError> {
        self.connection.get_mut().confine()
    }

    /// Waits until the manager has [confined](Client::confined) the connection.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn confined(&self) -> Result<(), ClientError> {
        self.connection.lock().confined()
    }
}

fn copies(key: &str, CopyGrant { runs: expected, copy }: CopyGrant) -> Copies {
    let key = key.to_owned();
    match copy {
        Ok((runs, file)) => {
            let table = CopyTable::new(runs);
            Copies { key, expected, table, file: Some(file.into()), absent: None }
        }
        Err(reason) => Copies { key, expected, absent: Some(reason), ..Copies::default() },
    }
}

const _: () = assert!(CHUNK_SIZE == COPY_CHUNK);

fn medium(grant: &ExtentGrant) -> Result<File, OpenPooledError> {
    let medium = grant.descriptor().try_clone_to_owned();
    medium.map(File::from).map_err(OpenPooledError::Descriptor)
}

fn place(grant: &ExtentGrant) -> ExtentPlace {
    ExtentPlace {
        offset: grant.begin(),
        leaf: grant.leaf(),
        private: grant.has_private_mappings(),
        replica: false,
        checked: grant.is_verified(),
    }
}

#[cfg(test)]
#[path = "grant_tests.rs"]
mod tests;
