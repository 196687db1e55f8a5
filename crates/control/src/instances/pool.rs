//! The daemon's connection to the manager of its pool.

use std::path::{Path, PathBuf};

use firn_pool::RemoveError;
use firn_run::{Instances, PoolManager, PoolManagerError};
use parking_lot::Mutex;

/// The pool that stores the daemon's snapshots.
#[derive(Debug)]
pub(crate) struct SnapshotPool {
    program: PathBuf,
    /// The medium, or the manager's socket.
    path: PathBuf,
    /// A connection, which keeps the manager running.
    manager: Mutex<PoolManager>,
}

impl SnapshotPool {
    /// Connects to the manager of the pool at `path`, a medium or a manager's socket. Starts the
    /// manager of a medium if it does not run: a process of the firn program at `program`. The
    /// microVMs of a daemon that was killed may be ending.
    pub(crate) fn open(program: &Path, path: &Path) -> Result<Self, PoolManagerError> {
        let manager = Mutex::new(PoolManager::open_after_others(program, path)?);
        Ok(Self { program: program.to_owned(), path: path.to_owned(), manager })
    }

    /// The manager's socket. Starts the manager again if it has ended.
    pub(crate) fn socket(&self) -> Result<PathBuf, PoolManagerError> {
        let mut manager = self.manager.lock();
        if !manager.is_alive() {
            *manager = PoolManager::open(&self.program, &self.path)?;
        }
        Ok(manager.socket().to_owned())
    }

    /// Removes a snapshot.
    pub(crate) fn remove(&self, name: &str) -> Result<(), RemoveError> {
        Instances::of_user().managers().remove_snapshot(&self.path, name)?;
        Ok(())
    }
}
