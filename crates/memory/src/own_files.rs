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
/// the caller's.
#[derive(Debug)]
pub struct OwnFiles {
    pagemap: File,
    maps: File,
    smaps: File,
    status: File,
    devices: OwnDevices,
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
        let nowhere = open(NOWHERE, File::options().write(true))?.into();
        let userfaultfd = File::options().read(true).write(true).open(USERFAULTFD_DEVICE);
        Ok(Self { nowhere, userfaultfd: userfaultfd.ok().map(OwnedFd::from) })
    }
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
        get_or_try_init(&FILES, || Self::open(OwnDevices::open()?))
    }

    /// Makes the first call for a process that has got the devices from another one.
    ///
    /// # Errors
    /// [`OwnFilesError`].
    pub fn open_with(devices: OwnDevices) -> Result<(), OwnFilesError> {
        let opened = Self::open(devices)?;
        FILES.get_or_init(|| opened);
        Ok(())
    }

    /// The files, if they are open. Async-signal-safe.
    pub(crate) fn opened() -> Option<&'static Self> {
        FILES.get()
    }

    fn open(devices: OwnDevices) -> Result<Self, OwnFilesError> {
        let read = |path| open(path, File::options().read(true));
        Ok(Self {
            pagemap: read(PAGEMAP)?,
            maps: read(MAPS)?,
            smaps: read(SMAPS)?,
            status: read(STATUS)?,
            devices,
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
    pub(crate) fn nowhere(&self) -> &OwnedFd {
        &self.devices.nowhere
    }

    /// [`USERFAULTFD_DEVICE`].
    pub(crate) fn userfaultfd(&self) -> Option<&OwnedFd> {
        self.devices.userfaultfd.as_ref()
    }
}

fn open(path: &'static str, options: &OpenOptions) -> Result<File, OwnFilesError> {
    options.open(path).map_err(|source| OwnFilesError { path, source })
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
