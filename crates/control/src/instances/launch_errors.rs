//! Why microVMs are not started or frozen, and snapshots not removed.

use std::time::Duration;

use firn_pool::RemoveError;
use firn_run::{Failed, FreezeInstanceError, PoolManagerError};
use firn_snapshot::KeyError;

use crate::blocking::TaskFailed;
use crate::functions::{ImageError, PLANNER_VARIABLE};

/// A microVM did not start.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The function's image cannot be used.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The function's after-restore hooks failed.
    #[error("the function failed: {}", .0.error)]
    Function(Failed),
    /// The microVM's monitor reported an error.
    #[error("the microVM did not start")]
    Start(#[source] firn_run::StartError),
    /// The snapshot is in a pool, but the daemon has none.
    #[error("the snapshot {0:?} is in a pool; start the daemon with --pool")]
    NoPool(String),
    /// The pool's manager cannot be reached.
    #[error(transparent)]
    Pool(#[from] PoolManagerError),
    /// The key of the snapshot's signature cannot be used.
    #[error("cannot check the snapshot's signature")]
    Key(#[from] KeyError),
    /// The task that starts the microVM failed.
    #[error(transparent)]
    Task(#[from] TaskFailed),
}

impl LaunchError {
    /// Whether the pool's manager cannot start while microVMs of the one before it run.
    pub(crate) fn is_of_earlier_clients(&self) -> bool {
        matches!(self, Self::Pool(PoolManagerError::HasClients { .. }))
    }
}

/// A microVM was not frozen.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FreezeError {
    #[error("cannot freeze the microVM")]
    Freeze(#[from] FreezeInstanceError),
    #[error("the freeze took longer than {0:?} (--start-limit)")]
    TimedOut(Duration),
    #[error("the snapshot's place is not available")]
    Place(#[source] LaunchError),
    #[error("cannot sign the snapshot")]
    Key(#[from] KeyError),
    #[error(transparent)]
    Task(#[from] TaskFailed),
}

/// A frozen version has no planner.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PlanError {
    #[error("the planner that {PLANNER_VARIABLE} names cannot thaw the snapshot")]
    Named(#[source] LaunchError),
    /// The last planner's error.
    #[error("no planner can thaw the snapshot")]
    None(#[source] LaunchError),
    #[error(transparent)]
    Task(#[from] TaskFailed),
}

/// A snapshot was not removed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RemoveSnapshotError {
    #[error("cannot remove the snapshot's directory")]
    Directory(#[source] std::io::Error),
    #[error("cannot remove the snapshot from the pool")]
    Pool(#[from] RemoveError),
    #[error("the snapshot is in a pool; start the daemon with --pool")]
    NoPool,
    #[error("the removal of the snapshot took longer than {0:?} (--start-limit)")]
    TimedOut(Duration),
    #[error(transparent)]
    Task(#[from] TaskFailed),
}

impl RemoveSnapshotError {
    /// Whether the pool has no snapshot of this name.
    pub(crate) fn is_missing(&self) -> bool {
        matches!(self, Self::Pool(error) if error.is_unknown())
    }
}

impl From<firn_run::StartError> for LaunchError {
    fn from(error: firn_run::StartError) -> Self {
        match error {
            firn_run::StartError::Function(failed) => Self::Function(failed),
            error => Self::Start(error),
        }
    }
}
