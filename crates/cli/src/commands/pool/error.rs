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
    #[error("a memfd ends with its process: make and serve it at once, with `firn pool serve`")]
    MemfdAlone,
    #[error(
        "a pool that is served is repaired by opening it: end its manager, then name its medium"
    )]
    RepairServed,
    #[error("preparing to catch signals")]
    Signals(#[source] io::Error),
    #[error("making {path}, by which the manager is found by its medium's path")]
    Link { path: PathBuf, source: io::Error },
    #[error("writing the picture {path}")]
    Picture { path: PathBuf, source: io::Error },
}
