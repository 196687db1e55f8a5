//! Which snapshot a command is about: a directory, or a name in a pool.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use firn_base::{error_chain, nanoseconds};
use thiserror::Error;

use firn_memory::WriteReport;
use firn_memory::planners::{Firn, Planner, Store, read_chunks, written_chunks};
use firn_snapshot::{
    AttachError, CopyRule, OpenError, OpenPooledError, PageSet, PooledSnapshot, Profile, Run,
    Snapshot, Verify, runs_of,
};
use firn_vmm::{Destination, Virtualization};

use crate::output;
use crate::pool_at::{PoolAt, PoolAtError};

/// A snapshot that is there.
#[derive(Debug, Clone, Args)]
pub(crate) struct SnapshotArgs {
    /// Directory of the snapshot, or its name where --pool is given
    snapshot: PathBuf,
    /// The pool that the snapshot is in: its medium, whose manager is started where none runs, or its manager's socket
    #[arg(long, value_name = "PATH")]
    pool: Option<PathBuf>,
    /// When the bytes of a snapshot in a pool are checked: at each thaw, once for each opening of the pool's medium, or
    /// never
    #[arg(long, default_value = "once", requires = "pool")]
    verify: VerifyArg,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum VerifyArg {
    Always,
    Once,
    Never,
}

impl From<VerifyArg> for Verify {
    fn from(argument: VerifyArg) -> Self {
        match argument {
            VerifyArg::Always => Self::Always,
            VerifyArg::Once => Self::Once,
            VerifyArg::Never => Self::Never,
        }
    }
}

/// Why a snapshot was not opened.
#[derive(Debug, Error)]
pub(crate) enum OpenSnapshotError {
    #[error(transparent)]
    Directory(#[from] OpenError),
    #[error(transparent)]
    Pool(#[from] OpenPooledError),
    #[error(transparent)]
    Manager(#[from] PoolAtError),
    #[error("{} is no name of a snapshot in a pool: it is not UTF-8", .0.display())]
    Name(PathBuf),
}

/// A snapshot, and what keeps its pool from giving it to others.
pub(crate) enum OpenedSnapshot {
    Directory(Box<Snapshot>),
    Pool(Box<PooledSnapshot>),
}

impl OpenedSnapshot {
    pub(crate) fn snapshot(&self) -> &Snapshot {
        match self {
            Self::Directory(snapshot) => snapshot,
            Self::Pool(pooled) => &pooled.snapshot,
        }
    }

    /// What the pool did for a replica, if one was asked for.
    pub(crate) fn replica(&self) -> Option<firn_snapshot::ReplicaReport> {
        match self {
            Self::Directory(_) => None,
            Self::Pool(pooled) => pooled.replica,
        }
    }

    /// Takes a copy of what the microVM is expected to write, for a planner that runs on copies: from a pool alone.
    pub(crate) fn take_copy(&mut self, planner: &dyn Planner) -> Result<(), OpenSnapshotError> {
        if let (Self::Pool(pooled), Some(rule)) = (self, planner.copies()) {
            pooled.take_copy(rule, |snapshot| {
                Ok(snapshot.profile()?.map(|profile| wanted(&profile, rule)).unwrap_or_default())
            })?;
        }
        Ok(())
    }

    /// Tells the pool's manager what a run wrote. The run was good without it.
    pub(crate) fn wrote(&mut self, writes: Option<&WriteReport>) {
        if let (Self::Pool(pooled), Some(writes)) = (self, writes)
            && let Some(rule) = pooled.snapshot.copies().map(|copies| copies.rule)
            && let Err(error) = pooled.wrote(rule, &used(&pooled.snapshot, rule, &writes.written))
        {
            let error = error_chain(&error);
            output::note(&format!("firn: the pool does not learn from this run: {error}"));
        }
    }

    /// Gives a replica back, with what was written to it, where that is known. The memory is not used any more.
    pub(crate) fn give_back(&mut self, written: Option<&PageSet>) {
        if let (Self::Pool(pooled), Some(written)) = (self, written)
            && let Err(error) = pooled.give_back(written)
        {
            let error = error_chain(&error);
            output::note(&format!("firn: the pool is not told what this run wrote: {error}"));
        }
    }

    /// How long the pool's bytes were checked, ns, where they were.
    pub(crate) fn check_ns(&self) -> Option<u64> {
        match self {
            Self::Directory(_) => None,
            Self::Pool(pooled) => pooled.checked.map(nanoseconds),
        }
    }
}

impl SnapshotArgs {
    /// The planner where none is named: the best that a snapshot without a recording can be restored by.
    pub(crate) fn default_planner(&self) -> &'static str {
        if self.pool.is_some() { "firn" } else { "firecracker" }
    }

    /// Opens the snapshot for a planner that maps it from `store`.
    pub(crate) fn open(&self, store: Store) -> Result<OpenedSnapshot, OpenSnapshotError> {
        let Some(pool) = &self.pool else {
            return Ok(OpenedSnapshot::Directory(Box::new(Snapshot::open(&self.snapshot)?)));
        };
        // The snapshot has a connection of its own from then on.
        let pool = PoolAt::open(pool)?;
        let socket = pool.socket();
        let name = name(&self.snapshot)?;
        let pooled = match store {
            Store::Replica => PooledSnapshot::open_replica(socket, name, self.verify.into())?,
            Store::Directory | Store::Extent => {
                PooledSnapshot::open(socket, name, self.verify.into())?
            }
        };
        Ok(OpenedSnapshot::Pool(Box::new(pooled)))
    }
}

/// Why a snapshot did not get its new profile.
#[derive(Debug, Error)]
pub(crate) enum SetProfileError {
    #[error(transparent)]
    Name(#[from] OpenSnapshotError),
    #[error(transparent)]
    Attach(#[from] AttachError),
}

impl SnapshotArgs {
    /// Puts a profile into the snapshot. In a pool, that takes a second extent until the first is not used any more.
    pub(crate) fn set_profile(&self, profile: &Profile) -> Result<(), SetProfileError> {
        let Some(pool) = &self.pool else {
            return Ok(firn_snapshot::set_profile(&self.snapshot, profile)?);
        };
        let pool = PoolAt::open(pool).map_err(OpenSnapshotError::from)?;
        Ok(set_pooled_profile(pool.socket(), name(&self.snapshot)?, profile)?)
    }
}

/// Puts a profile into a snapshot in a pool, and has the manager make copies by it, so that the next start has one.
pub(crate) fn set_pooled_profile(
    socket: &Path,
    name: &str,
    profile: &Profile,
) -> Result<(), AttachError> {
    firn_snapshot::set_pooled_profile(socket, name, profile)?;
    let announced = PooledSnapshot::open(socket, name, Verify::Never);
    let announced = announced
        .and_then(|mut pooled| pooled.take_copy(Firn::RULE, |_| Ok(wanted(profile, Firn::RULE))));
    if let Err(error) = announced {
        let error = error_chain(&error);
        output::note(&format!("firn: copies are made at the first start, not before: {error}"));
    }
    Ok(())
}

/// The chunks that are copied by a rule.
fn wanted(profile: &Profile, rule: CopyRule) -> Vec<Run> {
    let mut chunks = written_chunks(profile, rule.written);
    chunks.extend(read_chunks(profile, read_from(rule)));
    chunks.sort_unstable_by_key(|chunk| chunk.first);
    chunks
}

/// From how many pages on a chunk is copied that is only read: none is where KVM's page tables are nested.
fn read_from(rule: CopyRule) -> u64 {
    match Virtualization::detect() {
        Ok(Virtualization::Software) => rule.read,
        _ => 0,
    }
}

/// The chunks that a run was right to have a copy of: what it wrote, and what its profile says that it reads.
fn used(snapshot: &Snapshot, rule: CopyRule, written: &[Run]) -> Vec<Run> {
    let read_from = read_from(rule);
    if read_from == 0 {
        return written.to_vec();
    }
    let profile = snapshot.profile().ok().flatten();
    let read = profile.map(|profile| read_chunks(&profile, read_from)).unwrap_or_default();
    let end = snapshot.manifest().layout.pages();
    let mut pages = PageSet::new(end);
    for run in written.iter().chain(&read).map(Run::range) {
        pages.insert_range(run.start.min(end)..run.end.min(end));
    }
    runs_of(&pages)
}

/// Where a snapshot goes: the directory `to`, or that name in the pool.
pub(crate) fn destination(
    pool: Option<&PoolAt>,
    to: &Path,
) -> Result<Destination, OpenSnapshotError> {
    let Some(pool) = pool else { return Ok(Destination::Directory(to.to_owned())) };
    Ok(Destination::Pool { socket: pool.socket().to_owned(), name: name(to)?.to_owned() })
}

/// The name of a snapshot in a pool.
fn name(argument: &Path) -> Result<&str, OpenSnapshotError> {
    argument.to_str().ok_or_else(|| OpenSnapshotError::Name(argument.to_owned()))
}
