//! Finding the manager of a pool by the path of its medium.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use thiserror::Error;

use super::client::Client;
use super::error::{ClientError, Refusal};
use crate::media::{Access, MappedMedium, MediumError};
use crate::pool::{LookupError, OpenError, Pool, ReclaimError};

/// The directory in which managers publish their sockets, so that clients that know only a pool's
/// medium find its manager.
///
/// A path names a pool in one of two ways: it is the medium (a devdax device or a file), or the
/// socket of a manager.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManagerDirectory {
    path: PathBuf,
}

/// Why the manager of a pool was not found.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FindManagerError {
    /// The directory cannot be created, or other users can write there.
    #[error("cannot use the directory of manager sockets {path}")]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The pool's path cannot be examined.
    #[error("cannot examine the pool's medium {medium}")]
    Medium {
        /// The medium.
        medium: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// What is in place of the manager's socket leads elsewhere, or belongs to another user.
    #[error("{0} is not a socket of this user: remove it if it is not in use")]
    Foreign(PathBuf),
    /// The manager's socket exists, but connecting to it failed.
    #[error(transparent)]
    Manager(#[from] ClientError),
}

/// Why a snapshot was not removed from a pool.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RemoveError {
    /// The pool's manager was not found.
    #[error(transparent)]
    Find(#[from] FindManagerError),
    /// The manager refused, or the connection to it failed.
    #[error(transparent)]
    Manager(#[from] ClientError),
    /// No manager runs and the medium cannot be opened.
    #[error(transparent)]
    Medium(#[from] MediumError),
    /// No manager runs and the pool on the medium cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// No manager runs and the pool on the medium refuses.
    #[error(transparent)]
    Reclaim(#[from] ReclaimError),
}

impl RemoveError {
    /// Whether the pool has no snapshot of this name.
    #[must_use]
    pub fn is_unknown(&self) -> bool {
        match self {
            Self::Manager(ClientError::Refused { refusal, .. }) => *refusal == Refusal::Unknown,
            Self::Reclaim(error) => {
                matches!(error, ReclaimError::Lookup(LookupError::Unknown(_)))
            }
            _ => false,
        }
    }
}

impl ManagerDirectory {
    /// The directory at `path`, which need not exist.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// Creates the directory for this user alone. If it exists, [checks](Self::check) it.
    ///
    /// # Errors
    /// It cannot be created, or [`ManagerDirectory::check`] fails.
    pub fn create(&self) -> io::Result<()> {
        // A link to a folder would be taken for the folder.
        self.check()?;
        DirBuilder::new().recursive(true).mode(0o700).create(&self.path)?;
        self.check()
    }

    /// Checks that the directory, if it exists, is no symbolic link, and that no other user can
    /// write there: such a user could answer in a manager's place, or have files elsewhere removed.
    ///
    /// # Errors
    /// It is a link or no directory, or other users can write there.
    pub fn check(&self) -> io::Result<()> {
        let found = match fs::symlink_metadata(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            found => found?,
        };
        let others = found.mode() & 0o022 != 0;
        let wrong = if found.file_type().is_symlink() {
            "it is a symbolic link; remove it, or name a folder with FIRN_RUN_DIR"
        } else if !found.is_dir() {
            "it is no folder; remove it, or name a folder with FIRN_RUN_DIR"
        } else if others || found.uid() != rustix::process::geteuid().as_raw() {
            "others can write to it; name another with FIRN_RUN_DIR"
        } else {
            return Ok(());
        };
        Err(io::Error::new(io::ErrorKind::PermissionDenied, wrong))
    }

    /// The path at which the manager of the pool on `medium` publishes its socket, whether or not
    /// it runs. Returns `None` if `medium` does not exist or is a socket. Creates the directory if
    /// necessary.
    ///
    /// # Errors
    /// [`FindManagerError::Medium`] and [`FindManagerError::Directory`].
    pub fn socket_of(&self, medium: &Path) -> Result<Option<PathBuf>, FindManagerError> {
        let found = match fs::metadata(medium) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => {
                return Err(FindManagerError::Medium { medium: medium.to_owned(), source });
            }
            Ok(found) => found,
        };
        let kind = found.file_type();
        if kind.is_socket() {
            return Ok(None);
        }
        self.create()
            .map_err(|source| FindManagerError::Directory { path: self.path.clone(), source })?;
        let id = if kind.is_char_device() {
            format!("device-{:x}", found.rdev())
        } else {
            format!("{:x}-{:x}", found.dev(), found.ino())
        };
        // Names of microVMs, which may share the directory, have no dot.
        Ok(Some(self.path.join(format!("pool-{id}.sock"))))
    }

    /// Removes the sockets of managers that were killed.
    pub fn sweep(&self) {
        if self.check().is_err() {
            return;
        }
        let Some(_lock) = lock_folder(&self.path) else { return };
        for entry in fs::read_dir(&self.path).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let own = name.to_str().and_then(|name| name.strip_prefix("pool-"));
            let own = own.is_some_and(|name| name.ends_with(".sock"));
            let path = entry.path();
            if own && entry.file_type().is_ok_and(|kind| kind.is_socket()) && is_dead(&path) {
                // Another process may sweep too.
                let _ = fs::remove_file(path);
            }
        }
    }

    /// Connects to the manager of `pool`, a medium or a manager's socket. Returns `None` if `pool`
    /// is a medium without a running manager. Starts no process.
    ///
    /// # Errors
    /// See [`FindManagerError`].
    pub fn connect(&self, pool: &Path) -> Result<Option<Client>, FindManagerError> {
        match self.socket_of(pool) {
            Ok(Some(socket)) => {
                check_socket(&socket)?;
                Ok(connect_running(&socket)?)
            }
            Ok(None) => Ok(Some(Client::connect(pool)?)),
            // No manager can publish a socket there.
            Err(_) => Ok(None),
        }
    }

    /// Removes the snapshot `name` from `pool`, a medium or a manager's socket, and returns the
    /// bytes that are free immediately. The extent of a pinned snapshot is freed when its last pin
    /// ends. The manager of the pool does the work. If none runs, this process opens the medium for
    /// the time of the call. Starts no process.
    ///
    /// # Errors
    /// See [`RemoveError`].
    pub fn remove_snapshot(&self, pool: &Path, name: &str) -> Result<u64, RemoveError> {
        if let Some(mut manager) = self.connect(pool)? {
            return Ok(manager.reclaim(name)?);
        }
        let medium = MappedMedium::open(pool, Access::Write)?;
        Ok(Pool::open(Arc::new(medium))?.reclaim(name)?)
    }
}

/// Locks a folder in which managers make and remove their sockets, until the result is dropped.
/// `None` if it cannot be opened.
pub(super) fn lock_folder(folder: &Path) -> Option<fs::File> {
    let file = fs::File::open(folder).ok()?;
    file.lock().ok()?;
    Some(file)
}

/// Whether no process listens on a socket. The caller has locked its folder.
fn is_dead(socket: &Path) -> bool {
    let connected = UnixStream::connect(socket);
    connected.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

/// Checks that a published socket, if there is one, is a socket of this user and no link to one.
fn check_socket(socket: &Path) -> Result<(), FindManagerError> {
    let own = |found: &fs::Metadata| {
        found.file_type().is_socket() && found.uid() == rustix::process::geteuid().as_raw()
    };
    match fs::symlink_metadata(socket) {
        Ok(found) if !own(&found) => Err(FindManagerError::Foreign(socket.to_owned())),
        _ => Ok(()),
    }
}

/// Connects to the manager that publishes `socket`; `None` if none answers.
fn connect_running(socket: &Path) -> Result<Option<Client>, ClientError> {
    let connected = Client::connect(socket).and_then(|mut client| {
        // A manager that is terminating closes the connection instead of answering.
        client.describe()?;
        Ok(client)
    });
    match connected {
        Err(ClientError::NotRunning(_) | ClientError::Closed(_)) => Ok(None),
        connected => connected.map(Some),
    }
}

#[cfg(test)]
#[path = "directory_tests.rs"]
mod tests;
