//! Opening a snapshot's directory and the files in it.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, fstat, openat, statat};
use rustix::io::Errno;

use crate::error::OpenError;
use crate::files::{CONTAINER_FILE, IMAGE_FILE};

/// Maximum number of attempts to open a snapshot that is being replaced.
pub(crate) const MAX_ATTEMPTS: u32 = 64;

/// The directory that a snapshot's files were opened in.
#[derive(Debug)]
pub struct SnapshotDirectory {
    dir: OwnedFd,
    path: PathBuf,
}

impl SnapshotDirectory {
    /// The directory at `path`.
    pub(crate) fn open(path: &Path) -> Result<Self, OpenError> {
        Ok(Self { dir: open_directory(path)?, path: path.into() })
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the path still names the snapshot: it was not replaced, moved or removed since its
    /// files were opened. Of a snapshot in a pool, see
    /// [`Grant::is_current`](crate::Grant::is_current).
    #[must_use]
    pub fn is_current(&self) -> bool {
        let image = statat(&self.dir, IMAGE_FILE, AtFlags::SYMLINK_NOFOLLOW);
        image.is_ok() && !was_replaced(&self.dir, &self.path)
    }

    /// Opens a file that a snapshot may lack.
    pub(crate) fn open_optional(&self, name: &str) -> Result<Option<File>, OpenError> {
        match open_file(&self.dir, &self.path, name) {
            Err(OpenError::MissingFile { .. }) => Ok(None),
            file => file.map(Some),
        }
    }

    /// The same, for reads that bypass the page cache (`O_DIRECT`), where the file system supports
    /// these.
    pub(crate) fn open_direct(&self, name: &str) -> Result<Option<File>, OpenError> {
        match open_with(&self.dir, &self.path, name, OFlags::DIRECT) {
            Err(OpenError::MissingFile { .. }) => Ok(None),
            Err(OpenError::Io { source, .. })
                if Errno::from_io_error(&source) == Some(Errno::INVAL) =>
            {
                self.open_optional(name)
            }
            file => file.map(Some),
        }
    }

    pub(crate) fn open_container(&self) -> Result<File, OpenError> {
        open_container(&self.dir, &self.path)
    }

    /// Whether the path no longer names the directory.
    pub(crate) fn was_replaced(&self) -> bool {
        was_replaced(&self.dir, &self.path)
    }
}

/// Opens the directory of a snapshot.
///
/// # Errors
/// [`OpenError`] when there is no directory at the path, or when it cannot be opened.
pub(crate) fn open_directory(path: &Path) -> Result<OwnedFd, OpenError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    openat(CWD, path, flags, Mode::empty()).map_err(|errno| match errno {
        Errno::NOENT => OpenError::NotFound { path: path.into() },
        Errno::NOTDIR => {
            OpenError::NotASnapshot { path: path.into(), reason: "it is not a directory" }
        }
        errno => OpenError::Io { path: path.into(), action: "open", source: errno.into() },
    })
}

/// Whether `path` no longer names the directory `dir`.
pub(crate) fn was_replaced(dir: &OwnedFd, path: &Path) -> bool {
    match (fstat(dir), statat(CWD, path, AtFlags::empty())) {
        (Ok(opened), Ok(named)) => (opened.st_dev, opened.st_ino) != (named.st_dev, named.st_ino),
        (Ok(_), Err(Errno::NOENT)) => true,
        _ => false,
    }
}

/// Opens `snapshot.firn`. A directory without this file and without an image is not a snapshot.
pub(crate) fn open_container(dir: &OwnedFd, path: &Path) -> Result<File, OpenError> {
    open_file(dir, path, CONTAINER_FILE).map_err(|error| match error {
        OpenError::MissingFile { .. }
            if statat(dir, IMAGE_FILE, AtFlags::SYMLINK_NOFOLLOW).is_err() =>
        {
            OpenError::NotASnapshot { path: path.into(), reason: "it holds no snapshot.firn" }
        }
        error => error,
    })
}

/// Opens regular file `name` of the directory for reading, and checks its length.
pub(crate) fn open_with_len(
    dir: &OwnedFd,
    path: &Path,
    name: &str,
    expected: u64,
) -> Result<File, OpenError> {
    let file = open_file(dir, path, name)?;
    check_len(&file, &path.join(name), expected)?;
    Ok(file)
}

/// Checks the length of an open file.
pub(crate) fn check_len(file: &File, path: &Path, expected: u64) -> Result<(), OpenError> {
    let actual = file
        .metadata()
        .map_err(|source| OpenError::Io { path: path.into(), action: "stat", source })?
        .len();
    if actual < expected {
        return Err(OpenError::Truncated { path: path.into(), section: None, expected, actual });
    }
    if actual > expected {
        return Err(OpenError::TooLong { path: path.into(), expected, actual });
    }
    Ok(())
}

pub(crate) fn open_file(dir: &OwnedFd, path: &Path, name: &str) -> Result<File, OpenError> {
    open_with(dir, path, name, OFlags::empty())
}

fn open_with(dir: &OwnedFd, path: &Path, name: &str, flags: OFlags) -> Result<File, OpenError> {
    // Without NONBLOCK, a FIFO of that name would block the open forever.
    let always = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let fd = openat(dir.as_fd(), name, always | flags, Mode::empty()).map_err(|errno| {
        let path = path.join(name);
        match errno {
            Errno::NOENT => OpenError::MissingFile { path },
            Errno::LOOP | Errno::NXIO => OpenError::NotAFile { path },
            errno => OpenError::Io { path, action: "open", source: errno.into() },
        }
    })?;
    let file = File::from(fd);
    match file.metadata() {
        Ok(metadata) if metadata.is_file() => Ok(file),
        Ok(_) => Err(OpenError::NotAFile { path: path.join(name) }),
        Err(source) => Err(OpenError::Io { path: path.join(name), action: "stat", source }),
    }
}
