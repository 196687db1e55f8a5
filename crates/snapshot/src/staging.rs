//! The staging directory of a snapshot, which is published in one step.
//!
//! A staging directory is in the same parent directory as the destination, has a name that only
//! this module uses, and is locked (flock) while its owner runs. A staging directory without a lock
//! was left by a killed freeze; the next freeze removes it.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, Dir, FlockOperation, Mode, OFlags, RenameFlags, flock, fstat, fsync, mkdirat,
    openat, renameat, renameat_with, statat, unlinkat,
};
use rustix::io::Errno;
use rustix::path::Arg;
use uuid::Uuid;

use crate::container::MAGIC;
use crate::files::{CONTAINER_FILE, FILES};
use crate::freeze_error::FreezeError;
use crate::manifest::ProtectedFile;
use crate::protect::protect_file;

/// Staging directories are named PREFIX, a UUID, SUFFIX.
const PREFIX: &str = ".firn-";
const SUFFIX: &str = ".partial";
/// Maximum number of attempts to create a directory when another freeze removes it before it is
/// locked, and to publish when other processes replace the destination at the same time.
const MAX_ATTEMPTS: u32 = 64;
const DIR_FLAGS: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// A locked directory next to the destination, removed on drop unless it was published.
#[derive(Debug)]
pub(crate) struct Staging {
    destination: PathBuf,
    destination_name: OsString,
    parent_path: PathBuf,
    parent: OwnedFd,
    /// Open while the lock is needed.
    dir: OwnedFd,
    name: String,
    published: bool,
}

impl Staging {
    /// Makes a staging directory for `destination`, after removing those that killed freezes left
    /// there.
    pub(crate) fn create(destination: &Path) -> Result<Self, FreezeError> {
        // A slash at the end would hide a link.
        let destination = &destination.components().collect::<PathBuf>();
        // If the destination is a link, the snapshot is replaced, not the link.
        let destination = match destination.symlink_metadata() {
            Ok(metadata) if metadata.is_symlink() => destination
                .canonicalize()
                .map_err(|source| io_error(destination, "resolve the link", source))?,
            _ => destination.clone(),
        };
        let Some(destination_name) = destination.file_name().map(OsStr::to_owned) else {
            return Err(FreezeError::BadDestination { path: destination });
        };
        let parent_path = match destination.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
            _ => PathBuf::from("."),
        };
        let parent =
            openat(CWD, &parent_path, DIR_FLAGS.difference(OFlags::NOFOLLOW), Mode::empty())
                .map_err(|errno| FreezeError::Parent {
                    path: parent_path.clone(),
                    source: errno.into(),
                })?;
        check_replaceable(&parent, &destination_name, &destination)?;
        sweep(&parent);
        for _ in 0..MAX_ATTEMPTS {
            let name = format!("{PREFIX}{}{SUFFIX}", Uuid::new_v4());
            // Guest memory contains the guest's secrets.
            mkdirat(&parent, &name, Mode::RWXU)
                .map_err(|errno| io_error(&parent_path.join(&name), "create", errno.into()))?;
            if let Some(dir) = lock(&parent, &name)
                .map_err(|errno| io_error(&parent_path.join(&name), "lock", errno.into()))?
            {
                let published = false;
                return Ok(Self {
                    destination,
                    destination_name,
                    parent_path,
                    parent,
                    dir,
                    name,
                    published,
                });
            }
        }
        Err(FreezeError::Contended { path: destination })
    }

    /// The path that file `name` will have, for errors.
    fn path_of(&self, name: &str) -> PathBuf {
        self.destination.join(name)
    }

    /// Creates file `name`, that only its owner can read and write.
    pub(crate) fn create_file(&self, name: &str) -> Result<File, FreezeError> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let fd = openat(&self.dir, name, flags, Mode::RUSR | Mode::WUSR)
            .map_err(|errno| io_error(&self.path_of(name), "create", errno.into()))?;
        Ok(fd.into())
    }

    /// Removes file `name`.
    pub(crate) fn remove_file(&self, name: &str) -> Result<(), FreezeError> {
        unlinkat(&self.dir, name, AtFlags::empty())
            .map_err(|errno| io_error(&self.path_of(name), "remove", errno.into()))
    }

    /// The directory.
    pub(crate) fn directory(&self) -> &OwnedFd {
        &self.dir
    }

    /// The length in bytes of `file`, which has the name `name`.
    pub(crate) fn len_of(&self, file: &File, name: &str) -> Result<u64, FreezeError> {
        let metadata = file.metadata();
        Ok(metadata.map_err(|source| io_error(&self.path_of(name), "look at", source))?.len())
    }

    /// Syncs `file`, which has the name `name`, and returns the bytes that it occupies on the
    /// medium.
    pub(crate) fn sync(&self, file: &File, name: &str) -> Result<u64, FreezeError> {
        let metadata = file.sync_all().and_then(|()| file.metadata());
        let metadata = metadata.map_err(|source| io_error(&self.path_of(name), "sync", source))?;
        Ok(metadata.blocks() * 512)
    }

    /// Protects file `name` with fs-verity, if it is one that is to be protected and the file
    /// system supports it. The file must be synced and closed.
    pub(crate) fn protect(&self, name: &str) -> Result<Option<ProtectedFile>, FreezeError> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&self.dir, name, flags, Mode::empty())
            .map_err(|errno| io_error(&self.path_of(name), "open", errno.into()))?;
        protect_file(&file.into(), &self.destination, name)
    }

    /// Moves a synced file into the snapshot that is open as `dir`, and replaces the file of that
    /// name.
    pub(crate) fn move_into(&self, dir: &OwnedFd, name: &str) -> Result<(), FreezeError> {
        renameat(&self.dir, name, dir, name)
            .and_then(|()| fsync(dir))
            .map_err(|errno| io_error(&self.path_of(name), "put in place", errno.into()))
    }

    /// Publishes the directory, whose files are synced, at the destination, and removes the
    /// previous snapshot. What is not a snapshot is not published: no freeze would replace it.
    pub(crate) fn publish(mut self) -> Result<(), FreezeError> {
        check_is_snapshot(&self.dir, &self.destination).map_err(|error| match error {
            FreezeError::NotASnapshot { reason, .. } => FreezeError::Report { reason },
            error => error,
        })?;
        let sync = |fd: &OwnedFd, path: &Path| {
            fsync(fd).map_err(|errno| io_error(path, "sync", errno.into()))
        };
        sync(&self.dir, &self.parent_path.join(&self.name))?;
        let replaced = self.rename()?;
        self.published = true;
        sync(&self.parent, &self.parent_path)?;
        if replaced && let Ok(old) = openat(&self.parent, &self.name, DIR_FLAGS, Mode::empty()) {
            // The new snapshot is in place: the next freeze removes what cannot be removed now.
            remove_dir(&self.parent, &old, &self.name);
        }
        Ok(())
    }

    /// Renames the directory to the destination; returns whether there was a snapshot, which then
    /// has the staging directory's name.
    fn rename(&self) -> Result<bool, FreezeError> {
        let (parent, name) = (&self.parent, &self.destination_name);
        for _ in 0..MAX_ATTEMPTS {
            // rename(2) does not replace a directory that contains files.
            match renameat(parent, &self.name, parent, name) {
                Ok(()) => return Ok(false),
                Err(Errno::EXIST | Errno::NOTEMPTY | Errno::NOTDIR) => {}
                Err(errno) => return Err(io_error(&self.destination, "rename to", errno.into())),
            }
            check_replaceable(parent, name, &self.destination)?;
            match renameat_with(parent, &self.name, parent, name, RenameFlags::EXCHANGE) {
                Ok(()) => return Ok(true),
                // The destination was removed: a plain rename works again.
                Err(Errno::NOENT) => {}
                Err(Errno::INVAL | Errno::NOSYS) => {
                    return Err(FreezeError::ExchangeUnsupported {
                        path: self.destination.clone(),
                    });
                }
                Err(errno) => return Err(io_error(&self.destination, "exchange", errno.into())),
            }
        }
        Err(FreezeError::Contended { path: self.destination.clone() })
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !self.published {
            remove_dir(&self.parent, &self.dir, &self.name);
        }
    }
}

/// Opens and locks a staging directory; `None` when another has the lock, or when the name is no
/// longer this directory's once it is locked.
fn lock(parent: &OwnedFd, name: &str) -> Result<Option<OwnedFd>, Errno> {
    let dir = match openat(parent, name, DIR_FLAGS, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(None),
        result => result?,
    };
    match flock(&dir, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => return Ok(None),
        result => result?,
    }
    Ok(is_at(&dir, parent, name).then_some(dir))
}

/// Whether `name` in `parent` is the directory that is open as `dir`.
fn is_at(dir: &OwnedFd, parent: &OwnedFd, name: impl Arg) -> bool {
    match (fstat(dir), statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)) {
        (Ok(open), Ok(named)) => (open.st_dev, open.st_ino) == (named.st_dev, named.st_ino),
        _ => false,
    }
}

/// Removes the staging directories in `parent` whose owners do not run any more. Errors are
/// ignored: the directories only use space.
fn sweep(parent: &OwnedFd) {
    let Ok(entries) = Dir::read_from(parent) else { return };
    for entry in entries.flatten() {
        let Some(name) = entry.file_name().to_str().ok().filter(|name| is_staging(name)) else {
            continue;
        };
        // The name is checked again under the lock: a directory that its owner published in between
        // has another name and is kept.
        if let Ok(Some(dir)) = lock(parent, name) {
            remove_dir(parent, &dir, name);
        }
    }
}

fn is_staging(name: &str) -> bool {
    name.strip_prefix(PREFIX)
        .and_then(|rest| rest.strip_suffix(SUFFIX))
        .is_some_and(|uuid| Uuid::try_parse(uuid).is_ok())
}

/// Removes a snapshot's directory: known files by name, then the directory, which remains if it
/// contains other files.
fn remove_dir(parent: &OwnedFd, dir: &OwnedFd, name: &str) {
    for file in FILES {
        let _ = unlinkat(dir, file, AtFlags::empty());
    }
    let _ = unlinkat(parent, name, AtFlags::REMOVEDIR);
}

/// Checks that the destination does not exist or is a snapshot without other files.
fn check_replaceable(parent: &OwnedFd, name: &OsStr, path: &Path) -> Result<(), FreezeError> {
    for _ in 0..MAX_ATTEMPTS {
        let dir = match openat(parent, name, DIR_FLAGS, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(()),
            Err(Errno::NOTDIR | Errno::LOOP) => {
                return Err(not_a_snapshot(path, "it is not a directory"));
            }
            Err(errno) => return Err(io_error(path, "open", errno.into())),
            Ok(dir) => dir,
        };
        match check_is_snapshot(&dir, path) {
            // Another freeze replaced the destination: the examined directory is being removed.
            Err(_) if !is_at(&dir, parent, name) => {}
            result => return result,
        }
    }
    Err(FreezeError::Contended { path: path.into() })
}

/// Checks that `dir` contains a snapshot's files and no others.
fn check_is_snapshot(dir: &OwnedFd, path: &Path) -> Result<(), FreezeError> {
    let io = |errno: Errno| io_error(path, "look at", errno.into());
    for entry in Dir::read_from(dir).map_err(io)? {
        let entry = entry.map_err(io)?;
        let name = entry.file_name().to_bytes();
        let known = FILES.iter().any(|file| file.as_bytes() == name);
        if !known && name != b"." && name != b".." {
            return Err(not_a_snapshot(path, "it holds other files than a snapshot's"));
        }
    }
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let container = match openat(dir, CONTAINER_FILE, flags, Mode::empty()) {
        Err(Errno::NOENT) => return Err(not_a_snapshot(path, "it holds no snapshot.firn")),
        result => result.map_err(io)?,
    };
    let mut magic = [0; MAGIC.len()];
    match rustix::io::pread(&container, &mut magic, 0) {
        Ok(_) if magic == MAGIC => Ok(()),
        _ => {
            let reason = "its snapshot.firn does not start with \"firn snapshot\"";
            Err(not_a_snapshot(path, reason))
        }
    }
}

fn not_a_snapshot(path: &Path, reason: &'static str) -> FreezeError {
    FreezeError::NotASnapshot { path: path.into(), reason }
}

fn io_error(path: &Path, action: &'static str, source: io::Error) -> FreezeError {
    FreezeError::Io { path: path.into(), action, source }
}

#[cfg(test)]
#[path = "staging_tests.rs"]
mod tests;
