//! The files of /proc and /dev by which a process looks at itself, and by which it gets kernel
//! objects. They are opened once, since a jailed monitor opens none.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use procfs::process::Status;
use procfs::{FromRead, ProcError};
use rustix::io::Errno;
use thiserror::Error;

const PAGEMAP: &str = "/proc/self/pagemap";
const MAPS: &str = "/proc/self/maps";
const SMAPS: &str = "/proc/self/smaps";
const STATUS: &str = "/proc/self/status";
const NOWHERE: &str = "/dev/null";
/// The device that userfaultfds are opened from (Linux 6.1; userfaultfd(2)).
pub const USERFAULTFD_DEVICE: &str = "/dev/userfaultfd";
/// Bytes of the first read of a file.
const FIRST_READ: usize = 64 << 10;

/// The open files of this process. Any thread may use them at any time: they are read at offsets of
/// the caller's. A process without some of them, as in Firecracker's jail, gets an error where it
/// needs one.
#[derive(Debug)]
pub struct OwnFiles {
    pagemap: Opened<File>,
    maps: Opened<File>,
    smaps: Opened<File>,
    status: Opened<File>,
    nowhere: Opened<OwnedFd>,
    userfaultfd: Option<OwnedFd>,
}

/// Those of the files that are devices, which another process may open: a userfaultfd belongs to
/// the process that makes it.
#[derive(Debug)]
pub struct OwnDevices {
    /// /dev/null, for writing.
    pub nowhere: OwnedFd,
    /// [`USERFAULTFD_DEVICE`]; `None` where the kernel has no such device, or this process may not
    /// use it.
    pub userfaultfd: Option<OwnedFd>,
}

impl OwnDevices {
    /// Opens them.
    ///
    /// # Errors
    /// [`OwnFilesError`]: /dev/null cannot be opened.
    pub fn open() -> Result<Self, OwnFilesError> {
        Ok(Self { nowhere: open_nowhere()?, userfaultfd: open_userfaultfd() })
    }
}

/// A file of this process cannot be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("cannot open {path}; are /proc and /dev mounted?")]
pub struct OwnFilesError {
    path: &'static str,
    source: Errno,
}

impl From<OwnFilesError> for io::Error {
    fn from(error: OwnFilesError) -> Self {
        Self::new(error.source.kind(), error)
    }
}

type Opened<T> = Result<T, OwnFilesError>;

static FILES: OnceLock<OwnFiles> = OnceLock::new();

impl OwnFiles {
    /// The files, which the first call opens. A jailed process makes this call before it enters its
    /// jail.
    pub fn of_process() -> &'static Self {
        FILES.get_or_init(|| Self::open(open_nowhere(), open_userfaultfd()))
    }

    /// Makes the first call for a process that has got the devices from another one.
    pub fn open_with(devices: OwnDevices) {
        FILES.get_or_init(|| Self::open(Ok(devices.nowhere), devices.userfaultfd));
    }

    /// The files, if they are open. Async-signal-safe.
    pub(crate) fn opened() -> Option<&'static Self> {
        FILES.get()
    }

    fn open(nowhere: Opened<OwnedFd>, userfaultfd: Option<OwnedFd>) -> Self {
        let read = |path| open(path, File::options().read(true));
        Self {
            pagemap: read(PAGEMAP),
            maps: read(MAPS),
            smaps: read(SMAPS),
            status: read(STATUS),
            nowhere,
            userfaultfd,
        }
    }

    /// /proc/self/pagemap.
    pub(crate) fn pagemap(&self) -> Result<&File, OwnFilesError> {
        opened(&self.pagemap)
    }

    /// /proc/self/maps.
    pub(crate) fn maps(&self) -> Option<&File> {
        self.maps.as_ref().ok()
    }

    /// The text of /proc/self/smaps.
    pub(crate) fn smaps(&self) -> io::Result<String> {
        read(opened(&self.smaps)?)
    }

    /// The values of /proc/self/status.
    pub(crate) fn status(&self) -> Result<Status, ProcError> {
        let file = opened(&self.status).map_err(io::Error::from)?;
        Status::from_read(read(file)?.as_bytes())
    }

    /// /dev/null, for writing.
    pub(crate) fn nowhere(&self) -> Result<&OwnedFd, OwnFilesError> {
        opened(&self.nowhere)
    }

    /// [`USERFAULTFD_DEVICE`].
    pub(crate) fn userfaultfd(&self) -> Option<&OwnedFd> {
        self.userfaultfd.as_ref()
    }
}

fn opened<T>(file: &Opened<T>) -> Result<&T, OwnFilesError> {
    file.as_ref().map_err(|error| *error)
}

fn open_nowhere() -> Opened<OwnedFd> {
    open(NOWHERE, File::options().write(true)).map(OwnedFd::from)
}

fn open_userfaultfd() -> Option<OwnedFd> {
    let file = File::options().read(true).write(true).open(USERFAULTFD_DEVICE);
    file.ok().map(OwnedFd::from)
}

fn open(path: &'static str, options: &OpenOptions) -> Opened<File> {
    options.open(path).map_err(|error| OwnFilesError {
        path,
        source: Errno::from_io_error(&error).unwrap_or(Errno::IO),
    })
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
