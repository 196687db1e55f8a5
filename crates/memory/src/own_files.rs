//! The files of /proc and /dev by which a process looks at itself, and by which it gets kernel
//! objects. They are opened once, since a jailed monitor opens none.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use firn_base::get_or_try_init;
use procfs::process::Status;
use procfs::{FromRead, ProcError};
use rustix::fs::{Mode, OFlags};
use thiserror::Error;

const PAGEMAP: &str = "/proc/self/pagemap";
const MAPS: &str = "/proc/self/maps";
const SMAPS: &str = "/proc/self/smaps";
const STATUS: &str = "/proc/self/status";
const NOWHERE: &str = "/dev/null";
const USERFAULTFD: &str = "/dev/userfaultfd";
/// Bytes of the first read of a file.
const FIRST_READ: usize = 64 << 10;

/// The open files of this process. Any thread may use them at any time: they are read at offsets of
/// the caller's.
#[derive(Debug)]
pub struct OwnFiles {
    pagemap: File,
    maps: File,
    smaps: File,
    status: File,
    nowhere: File,
    /// `None` where the kernel has no such device, or this process may not use it.
    userfaultfd: Option<OwnedFd>,
}

/// A file of this process cannot be opened.
#[derive(Debug, Error)]
#[error("cannot open {path}; are /proc and /dev mounted?")]
pub struct OwnFilesError {
    path: &'static str,
    source: io::Error,
}

impl From<OwnFilesError> for io::Error {
    fn from(error: OwnFilesError) -> Self {
        Self::new(error.source.kind(), error)
    }
}

static FILES: OnceLock<OwnFiles> = OnceLock::new();

impl OwnFiles {
    /// The files, which the first call opens. A jailed process makes this call before it enters its
    /// jail.
    ///
    /// # Errors
    /// [`OwnFilesError`].
    pub fn of_process() -> Result<&'static Self, OwnFilesError> {
        get_or_try_init(&FILES, Self::open)
    }

    /// The files, if they are open. Async-signal-safe.
    pub(crate) fn opened() -> Option<&'static Self> {
        FILES.get()
    }

    fn open() -> Result<Self, OwnFilesError> {
        let open = |path, options: &OpenOptions| {
            options.open(path).map_err(|source| OwnFilesError { path, source })
        };
        let (mut read, mut write) = (File::options(), File::options());
        let (read, write) = (read.read(true), write.write(true));
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        Ok(Self {
            pagemap: open(PAGEMAP, read)?,
            maps: open(MAPS, read)?,
            smaps: open(SMAPS, read)?,
            status: open(STATUS, read)?,
            nowhere: open(NOWHERE, write)?,
            userfaultfd: rustix::fs::open(USERFAULTFD, flags, Mode::empty()).ok(),
        })
    }

    /// /proc/self/pagemap.
    pub(crate) fn pagemap(&self) -> &File {
        &self.pagemap
    }

    /// /proc/self/maps.
    pub(crate) fn maps(&self) -> &File {
        &self.maps
    }

    /// The text of /proc/self/smaps.
    pub(crate) fn smaps(&self) -> io::Result<String> {
        read(&self.smaps)
    }

    /// The values of /proc/self/status.
    pub(crate) fn status(&self) -> Result<Status, ProcError> {
        Status::from_read(read(&self.status)?.as_bytes())
    }

    /// /dev/null, for writing.
    pub(crate) fn nowhere(&self) -> &File {
        &self.nowhere
    }

    /// /dev/userfaultfd.
    pub(crate) fn userfaultfd(&self) -> Option<&OwnedFd> {
        self.userfaultfd.as_ref()
    }
}

/// The whole text of a file of /proc, whose length is not known before.
fn read(file: &File) -> io::Result<String> {
    let (mut text, mut len) = (vec![0; FIRST_READ], 0);
    loop {
        match file.read_at(&mut text[len..], len as u64)? {
            0 => break,
            more => len += more,
        }
        if len == text.len() {
            text.resize(2 * len, 0);
        }
    }
    text.truncate(len);
    String::from_utf8(text).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

#[cfg(test)]
#[path = "own_files_tests.rs"]
mod tests;
