//! Where a command finds its pool.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;

use firn_pool::{Access, Client, Listing, MappedMedium, Pool, PoolReader};

use super::PoolCommandError;

/// Names a pool.
#[derive(Debug, Args)]
pub(crate) struct PoolArgs {
    /// The pool: its medium (a devdax device or a file), or the socket of its manager
    #[arg(long = "pool", value_name = "PATH", env = "FIRN_POOL")]
    path: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// A manager, or a medium.
#[derive(Debug)]
pub(crate) enum Source {
    Manager(Client),
    Medium(PathBuf),
}

impl PoolArgs {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn source(&self) -> Result<Source, PoolCommandError> {
        if fs::metadata(&self.path).is_ok_and(|found| found.file_type().is_socket()) {
            return Ok(Source::Manager(Client::connect(&self.path)?));
        }
        Ok(Source::Medium(self.path.clone()))
    }
}

impl Source {
    /// The pool for reading, beside whoever writes it.
    pub(crate) fn reader(&mut self) -> Result<PoolReader, PoolCommandError> {
        let medium = match self {
            Self::Manager(client) => {
                let described = client.describe()?;
                MappedMedium::from_descriptor(described.descriptor, described.medium)?
            }
            Self::Medium(path) => MappedMedium::open(path, Access::Read)?,
        };
        Ok(PoolReader::open(Arc::new(medium))?)
    }

    /// All extents; a manager tells its pins, too.
    pub(crate) fn list(&mut self) -> Result<Listing, PoolCommandError> {
        match self {
            Self::Manager(client) => Ok(client.list()?),
            Self::Medium(_) => Ok(self.reader()?.list()),
        }
    }
}

/// The pool on a medium, for changing it.
pub(crate) fn open(path: &Path) -> Result<Pool, PoolCommandError> {
    Ok(Pool::open(Arc::new(MappedMedium::open(path, Access::Write)?))?)
}
