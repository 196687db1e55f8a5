//! Names of running microVMs: each has a directory with its sockets, owned by its process.
//!
//! The owner removes the directory when it ends. An owner that was killed leaves it behind,
//! unlocked; the next process that finds it removes it.
//!
//! The directories are real ones of this user. Symbolic links in their place are refused and never
//! followed: files elsewhere would be created and removed.

use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_pool::ManagerDirectory;
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::process::geteuid;
use thiserror::Error;

/// Longest name of a microVM, bytes: with it, socket paths stay within what the kernel takes.
pub const MAX_NAME: usize = 63;
/// How often a name is tried, and the pause between: a lister holds the lock for an instant.
const CLAIM_ATTEMPTS: u32 = 5;
const CLAIM_PAUSE: Duration = Duration::from_millis(2);
/// `O_NOFOLLOW`, and `O_NONBLOCK` for what is no file.
const NO_LINK: i32 = (OFlags::NOFOLLOW.bits() | OFlags::NONBLOCK.bits()).cast_signed();
const LOCK: &str = "lock";
const CONTROL: &str = "control.sock";
const VSOCK: &str = "vsock.sock";

/// The sockets of a running microVM.
#[derive(Clone, Debug)]
pub struct Instance {
    name: String,
    path: PathBuf,
}

/// The directory of a microVM of this process; removed when dropped.
#[derive(Debug)]
pub struct OwnedInstance {
    instance: Instance,
    // Held until after the directory is removed: a lock that is held shows that the owner runs.
    _lock: File,
}

/// Why a name cannot be claimed.
#[derive(Debug, Error)]
pub enum ClaimError {
    /// Not a name.
    #[error(
        "{0:?} is no name for a microVM: use 1 to {MAX_NAME} of a-z, 0-9 and -, with no - at \
         either end"
    )]
    Name(String),
    /// A running microVM has it.
    #[error("a microVM named {0} is already running: choose another name, or stop it first")]
    Taken(String),
    /// The directory cannot be made.
    #[error("cannot create {path} for the microVM's sockets")]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// Why there is no such microVM.
#[derive(Debug, Error)]
pub enum FindError {
    /// None of that name runs.
    #[error("no microVM named {name} is running; {}", running_text(.running))]
    Unknown {
        /// The name.
        name: String,
        /// Names of those that run.
        running: Vec<String>,
    },
    /// The directory of names cannot be read.
    #[error("cannot read {path}")]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

fn running_text(running: &[String]) -> String {
    if running.is_empty() {
        "none is".into()
    } else {
        format!("running are {}", running.join(", "))
    }
}

impl Instance {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its monitor's control socket.
    #[must_use]
    pub fn control_socket(&self) -> PathBuf {
        self.path.join(CONTROL)
    }

    /// Its vsock's unix socket.
    #[must_use]
    pub fn vsock_socket(&self) -> PathBuf {
        self.path.join(VSOCK)
    }
}

impl std::ops::Deref for OwnedInstance {
    type Target = Instance;

    fn deref(&self) -> &Instance {
        &self.instance
    }
}

impl Drop for OwnedInstance {
    fn drop(&mut self) {
        remove(&self.instance.path);
    }
}

/// The directory of all running microVMs of this user.
#[derive(Clone, Debug)]
pub struct Instances {
    base: PathBuf,
}

impl Instances {
    /// Those in a directory; it need not exist.
    #[must_use]
    pub fn in_directory(base: PathBuf) -> Self {
        Self { base }
    }

    /// This user's: `$FIRN_RUN_DIR`, else `firn` under `$XDG_RUNTIME_DIR` or, for root, `/run`.
    #[must_use]
    pub fn of_user() -> Self {
        let base = std::env::var_os("FIRN_RUN_DIR").map(PathBuf::from).unwrap_or_else(|| {
            let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
            match runtime {
                Some(runtime) if !geteuid().is_root() => runtime.join("firn"),
                _ if geteuid().is_root() => PathBuf::from("/run/firn"),
                _ => std::env::temp_dir().join(format!("firn-{}", geteuid().as_raw())),
            }
        });
        Self::in_directory(base)
    }

    /// The directory.
    pub(crate) fn directory(&self) -> &Path {
        &self.base
    }

    /// Claims a name for a microVM of this process.
    ///
    /// # Errors
    /// See [`ClaimError`].
    pub fn claim(&self, name: &str) -> Result<OwnedInstance, ClaimError> {
        if !is_name(name) {
            return Err(ClaimError::Name(name.to_owned()));
        }
        let path = self.base.join(name);
        let failed = |source| ClaimError::Directory { path: path.clone(), source };
        self.managers().create().map_err(failed)?;
        // Another process may inspect or remove the same stale directory: then this waits, or
        // creates it again.
        let mut attempts = 0;
        loop {
            attempts += 1;
            match DirBuilder::new().mode(0o700).create(&path) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(failed(error));
                }
                _ => {}
            }
            check_directory(&path).map_err(failed)?;
            let lock = match lock_file(&path) {
                Ok(lock) => lock,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(failed(error)),
            };
            match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) if attempts < CLAIM_ATTEMPTS => {
                    std::thread::sleep(CLAIM_PAUSE);
                    continue;
                }
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    return Err(ClaimError::Taken(name.to_owned()));
                }
                Err(error) => return Err(failed(error.into())),
            }
            if !is_current(&lock, &path) {
                continue;
            }
            for socket in [CONTROL, VSOCK] {
                match fs::remove_file(path.join(socket)) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => {
                        return Err(failed(error));
                    }
                    _ => {}
                }
            }
            let instance = Instance { name: name.to_owned(), path };
            return Ok(OwnedInstance { instance, _lock: lock });
        }
    }

    /// The directory in which the managers of pools publish their sockets, which is this one.
    #[must_use]
    pub fn managers(&self) -> ManagerDirectory {
        ManagerDirectory::new(self.base.clone())
    }

    /// The sockets of the microVM of a name, whether or not it runs.
    #[must_use]
    pub fn named(&self, name: &str) -> Instance {
        Instance { name: name.to_owned(), path: self.base.join(name) }
    }

    /// The running microVM of a name.
    ///
    /// # Errors
    /// See [`FindError`].
    pub fn find(&self, name: &str) -> Result<Instance, FindError> {
        let mut running = self.running()?;
        match running.iter().position(|instance| instance.name == name) {
            Some(at) => Ok(running.swap_remove(at)),
            None => Err(FindError::Unknown {
                name: name.to_owned(),
                running: running.into_iter().map(|instance| instance.name).collect(),
            }),
        }
    }

    /// All running microVMs, by name. Directories of killed owners, and sockets of killed managers
    /// of pools, are removed: a monitor that outlives its owner for a moment has no access to them.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn running(&self) -> Result<Vec<Instance>, FindError> {
        let failed = |source| FindError::Directory { path: self.base.clone(), source };
        self.managers().check().map_err(failed)?;
        self.managers().sweep();
        let entries = match fs::read_dir(&self.base) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(failed)?,
        };
        let mut running = Vec::new();
        for entry in entries {
            let path = entry.map_err(failed)?.path();
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
            if check_directory(&path).is_ok() && is_alive_or_swept(&path) {
                running.push(Instance { name: name.to_owned(), path });
            }
        }
        running.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(running)
    }
}

fn is_name(name: &str) -> bool {
    (1..=MAX_NAME).contains(&name.len())
        && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        && !name.starts_with('-')
        && !name.ends_with('-')
}

/// Checks that the directory of a microVM, if there is one, is a real one of this user.
fn check_directory(path: &Path) -> io::Result<()> {
    let own = |found: &Metadata| found.is_dir() && found.uid() == geteuid().as_raw();
    match fs::symlink_metadata(path) {
        Ok(found) if !own(&found) => Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "it is a symbolic link, or not a folder of this user; remove it, or use another name",
        )),
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn lock_file(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.create(true).truncate(false).write(true).custom_flags(NO_LINK);
    options.open(path.join(LOCK))
}

/// Whether `lock` is still the lock of the directory, and not of one that was removed.
fn is_current(lock: &File, path: &Path) -> bool {
    let (Ok(ours), Ok(theirs)) = (lock.metadata(), fs::symlink_metadata(path.join(LOCK))) else {
        return false;
    };
    (ours.dev(), ours.ino()) == (theirs.dev(), theirs.ino())
}

/// Whether a microVM's process holds this directory; if none does, the directory is removed.
fn is_alive_or_swept(path: &Path) -> bool {
    let lock = OpenOptions::new().read(true).custom_flags(NO_LINK).open(path.join(LOCK));
    let Ok(lock) = lock else {
        // It is being created or removed: only an empty directory may be removed.
        let _ = fs::remove_dir(path);
        return false;
    };
    if flock(&lock, FlockOperation::NonBlockingLockShared).is_err() {
        return true;
    }
    // The lock is exclusive, so that no process claims the name at the same time. A process that
    // holds the lock also removes, or claims. A lock that is no longer in the directory gives no
    // right to touch its present contents.
    if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() && is_current(&lock, path) {
        remove(path);
    }
    false
}

/// Removes the directory of a microVM. The caller holds its lock. The lock is removed after the
/// sockets: from then on the name can be claimed, and the files of a new owner are not touched. The
/// next process that lists the names removes what remains.
fn remove(path: &Path) {
    for file in [CONTROL, VSOCK, LOCK] {
        let _ = fs::remove_file(path.join(file));
    }
    let _ = fs::remove_dir(path);
}

#[cfg(test)]
#[path = "instance_tests.rs"]
mod tests;
