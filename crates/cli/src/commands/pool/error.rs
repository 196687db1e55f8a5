//! Why a command of `firn pool` failed.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use firn_pool::{
    ClientError, CreateError, FindManagerError, LookupError, MediumError, MediumFailure, OpenError,
    RemoveError, RepairError, ServerError,
};

use crate::detach::DetachError;

/// Why a command of `firn pool` failed.
#[derive(Debug, Error)]
pub(crate) enum PoolCommandError {
    #[error(transparent)]
    Medium(#[from] MediumError),
    #[error(transparent)]
    Create(#[from] CreateError),
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Repair(#[from] RepairError),
    #[error(transparent)]
    Failure(#[from] MediumFailure),
    #[error(transparent)]
    Lookup(#[from] LookupError),
    #[error(transparent)]
    Server(#[from] ServerError),
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(transparent)]
    Find(#[from] FindManagerError),
    #[error(transparent)]
    Remove(#[from] RemoveError),
    #[error(transparent)]
    Detach(#[from] DetachError),
    #[error(
        "a memfd exists only while its process runs: create and serve it with `firn pool serve --medium memfd:SIZE`"
    )]
    MemfdAlone,
    #[error(
        "cannot repair a pool that a manager serves: stop the manager, then pass the pool's medium"
    )]
    RepairServed,
    #[error("cannot install signal handlers")]
    Signals(#[source] io::Error),
    #[error("cannot create the link {path}, through which clients find the manager by its medium")]
    Link { path: PathBuf, source: io::Error },
    #[error("cannot write the picture {path}")]
    Picture { path: PathBuf, source: io::Error },
}
