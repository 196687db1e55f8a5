//! Which snapshot a command is about: a directory, or a name in a pool.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use firn_base::{error_chain, nanoseconds};
use thiserror::Error;

use firn_memory::copy_ahead::{
    RequestCopyError, Rule, WriteReport, learn, prepare_copies, request_copy,
};
use firn_memory::planners::{Planner, Store};
use firn_snapshot::{
    AttachError, Grant, OpenError, OpenPooledError, PageSet, Profile, Snapshot, Verify,
    open_pooled, open_replica,
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
    #[error(transparent)]
    Copy(#[from] RequestCopyError),
    #[error("{} is no name of a snapshot in a pool: it is not UTF-8", .0.display())]
    Name(PathBuf),
}

/// A snapshot, and what its pool granted for this run.
pub(crate) struct OpenedSnapshot {
    snapshot: Snapshot,
    grant: Option<Grant>,
}

impl OpenedSnapshot {
    pub(crate) fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    pub(crate) fn grant(&self) -> Option<&Grant> {
        self.grant.as_ref()
    }

    /// The cost of a replica, if one was requested.
    pub(crate) fn replica(&self) -> Option<firn_snapshot::ReplicaReport> {
        self.grant.as_ref()?.replica()
    }

    /// Requests copies of what the microVM is expected to write, for a planner that uses copies.
    /// Only a pool has them.
    pub(crate) fn take_copy(&mut self, planner: &dyn Planner) -> Result<(), OpenSnapshotError> {
        if let (Some(grant), Some(rule)) = (&mut self.grant, planner.copy_rule()) {
            request_copy(&self.snapshot, grant, rule.for_paging(nested_paging()))?;
        }
        Ok(())
    }

    /// Reports to the pool's manager what a run wrote. A failure does not affect the run.
    pub(crate) fn wrote(&mut self, writes: Option<&WriteReport>) {
        if let (Some(grant), Some(writes)) = (&mut self.grant, writes)
            && let Err(error) = learn(&self.snapshot, grant, &writes.written)
        {
            let error = error_chain(&error);
            output::note(&format!("firn: the pool does not learn from this run: {error}"));
        }
    }

    /// Returns a replica, with what was written to it if that is known. The memory must not be used
    /// any more.
    pub(crate) fn give_back(&mut self, written: Option<&PageSet>) {
        if let (Some(grant), Some(written)) = (&mut self.grant, written)
            && let Err(error) = grant.return_replica(written)
        {
            let error = error_chain(&error);
            output::note(&format!("firn: the pool is not told what this run wrote: {error}"));
        }
    }

    /// The time that the check of the pool's bytes took, in ns, if they were checked.
    pub(crate) fn check_ns(&self) -> Option<u64> {
        self.grant.as_ref()?.check_time().map(nanoseconds)
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
            return Ok(OpenedSnapshot { snapshot: Snapshot::open(&self.snapshot)?, grant: None });
        };
        // The snapshot has a connection of its own from then on.
        let pool = PoolAt::open(pool)?;
        let socket = pool.socket();
        let name = name(&self.snapshot)?;
        let (snapshot, grant) = match store {
            Store::Replica => open_replica(socket, name, self.verify.into())?,
            Store::Directory | Store::Extent => open_pooled(socket, name, self.verify.into())?,
        };
        Ok(OpenedSnapshot { snapshot, grant: Some(grant) })
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
    let rule = Rule::DEFAULT.for_paging(nested_paging());
    if let Err(error) = prepare_copies(socket, name, rule, profile) {
        let error = error_chain(&error);
        output::note(&format!("firn: copies are made at the first start, not before: {error}"));
    }
    Ok(())
}

/// Whether KVM uses nested paging on this host.
fn nested_paging() -> bool {
    !matches!(Virtualization::detect(), Ok(Virtualization::Software))
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
