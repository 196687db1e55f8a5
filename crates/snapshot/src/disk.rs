//! Disks: reading them without their holes, and identifying them by digest.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, openat};
use thiserror::Error;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::freeze_error::FreezeError;
use crate::manifest::{DiskIdentity, DiskInfo};
use crate::read_at::{ReadAt, next_data};

/// Bytes that one inner digest of a disk covers (2 MiB).
const BLOCK_SIZE: u64 = 2 << 20;
/// Bytes at the start of a disk that [`DiskIdentity::head`] covers. They include a file system's
/// superblock with its UUID and timestamps.
const HEAD_SIZE: usize = 64 << 10;

/// A disk that can be read from start to end.
pub trait DiskSource {
    /// Length in bytes. It must not change while the disk is read.
    ///
    /// # Errors
    /// Any error of determining the length.
    fn size(&mut self) -> io::Result<u64>;

    /// The first range at or after `offset` that may contain nonzero bytes, cut at `offset`; `None`
    /// if all bytes up to the end are zero.
    ///
    /// # Errors
    /// Any error of reading the disk.
    fn next_data(&mut self, offset: u64) -> io::Result<Option<Range<u64>>>;

    /// Fills `buf` from `offset`; the range must be within the disk.
    ///
    /// # Errors
    /// Any error of reading the disk.
    fn read(&mut self, buf: &mut [u8], offset: u64) -> io::Result<()>;
}

/// A file as a disk; its holes are skipped. The file's position is moved.
impl DiskSource for &File {
    fn size(&mut self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn next_data(&mut self, offset: u64) -> io::Result<Option<Range<u64>>> {
        next_data(self, offset)
    }

    fn read(&mut self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.read_exact_at(buf, offset)
    }
}

/// Why a read-only disk cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DiskError {
    /// The disk cannot be opened.
    #[error("disk {id} cannot be opened at {}", .path.display())]
    Open {
        /// Name of the disk.
        id: String,
        /// The expected path.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// The path is not a regular file.
    #[error("disk {id}: {} is not a regular file; give the file that holds the disk", .path.display())]
    NotAFile {
        /// Name of the disk.
        id: String,
        /// The path.
        path: PathBuf,
    },
    /// The disk cannot be read.
    #[error("disk {id} cannot be read from {}", .path.display())]
    Read {
        /// Name of the disk.
        id: String,
        /// The path.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// The content differs from that at the freeze.
    #[error(
        "disk {id}: {} differs from the disk at the freeze (length or digest); restore that file, \
         or freeze again",
        .path.display()
    )]
    Changed {
        /// Name of the disk.
        id: String,
        /// The path.
        path: PathBuf,
    },
}

impl DiskIdentity {
    /// Reads and digests all of `file` except its holes. The file's position is moved.
    ///
    /// # Errors
    /// Any error of reading the file.
    pub fn of(file: &File) -> io::Result<Self> {
        scan(&mut &*file, |_, _| Ok(()))
    }

    /// Whether `file` has this length and the same first 64 KiB.
    fn head_matches(&self, file: &File) -> io::Result<bool> {
        if file.metadata()?.len() != self.len {
            return Ok(false);
        }
        let mut head = vec![0; head_len(self.len)];
        file.read_exact_at(&mut head, 0)?;
        Ok(xxh3_64(&head) == self.head)
    }
}

impl DiskInfo {
    /// Describes the disk in file `path`; reads all of it. Links in the path are resolved.
    ///
    /// # Errors
    /// [`DiskError`] when it cannot be read, or is not a regular file.
    pub fn new(id: impl Into<String>, path: impl AsRef<Path>) -> Result<Self, DiskError> {
        let (id, path) = (id.into(), path.as_ref());
        let path = path.canonicalize().map_err(|source| DiskError::Open {
            id: id.clone(),
            path: path.into(),
            source,
        })?;
        let identity = DiskIdentity { len: 0, head: 0, digest: 0 };
        let disk = Self { id, path, identity };
        let file = disk.open_unchecked()?;
        disk.identified(&file)
    }

    /// Describes the disk in an open file; reads all of it. `path` is the path at which a start
    /// opens it: absolute, without links.
    ///
    /// # Errors
    /// [`DiskError`] when it cannot be read, or is not a regular file.
    pub fn of_file(
        id: impl Into<String>,
        path: impl Into<PathBuf>,
        file: &File,
    ) -> Result<Self, DiskError> {
        let identity = DiskIdentity { len: 0, head: 0, digest: 0 };
        let disk = Self { id: id.into(), path: path.into(), identity };
        disk.check_kind(file)?;
        disk.identified(file)
    }

    fn identified(self, file: &File) -> Result<Self, DiskError> {
        let identity = DiskIdentity::of(file).map_err(|source| self.read_error(source))?;
        Ok(Self { identity, ..self })
    }

    /// Opens the disk read-only for a start, and checks its length and its first 64 KiB.
    /// [`crate::verify()`] checks the rest.
    ///
    /// # Errors
    /// [`DiskError`] when it is missing, cannot be read, or differs from the disk at the freeze.
    pub fn open(&self) -> Result<File, DiskError> {
        let file = self.open_unchecked()?;
        self.check_file(&file)?;
        Ok(file)
    }

    /// Checks length and first 64 KiB of an open file against the disk's, as [`DiskInfo::open`]
    /// does.
    ///
    /// # Errors
    /// [`DiskError`] when it cannot be read, is not a regular file, or differs from the disk at the
    /// freeze.
    pub fn check_file(&self, file: &File) -> Result<(), DiskError> {
        self.check_kind(file)?;
        match self.identity.head_matches(file) {
            Ok(true) => Ok(()),
            Ok(false) => Err(self.changed_error()),
            Err(source) => Err(self.read_error(source)),
        }
    }

    /// Checks all of the disk. `progress` receives the number of bytes read so far.
    pub(crate) fn check(&self, progress: &mut dyn FnMut(u64)) -> Result<(), DiskError> {
        let file = self.open()?;
        match digest_with_progress(&file, progress) {
            Ok(found) if found == self.identity => Ok(()),
            Ok(_) => Err(self.changed_error()),
            Err(source) => Err(self.read_error(source)),
        }
    }

    fn open_unchecked(&self) -> Result<File, DiskError> {
        // Without NONBLOCK, a FIFO there would block the open forever.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = openat(CWD, &self.path, flags, Mode::empty())
            .map(File::from)
            .map_err(|errno| self.open_error(errno.into()))?;
        self.check_kind(&file)?;
        Ok(file)
    }

    /// Checks that an open file is a regular one.
    fn check_kind(&self, file: &File) -> Result<(), DiskError> {
        match file.metadata() {
            Ok(metadata) if metadata.is_file() => Ok(()),
            Ok(_) => Err(DiskError::NotAFile { id: self.id.clone(), path: self.path.clone() }),
            Err(source) => Err(self.open_error(source)),
        }
    }

    fn open_error(&self, source: io::Error) -> DiskError {
        DiskError::Open { id: self.id.clone(), path: self.path.clone(), source }
    }

    fn changed_error(&self) -> DiskError {
        DiskError::Changed { id: self.id.clone(), path: self.path.clone() }
    }

    fn read_error(&self, source: io::Error) -> DiskError {
        DiskError::Read { id: self.id.clone(), path: self.path.clone(), source }
    }
}

/// The identity of `file`; `progress` receives the number of bytes read so far.
pub(crate) fn digest_with_progress(
    file: &File,
    progress: &mut dyn FnMut(u64),
) -> io::Result<DiskIdentity> {
    scan(&mut &*file, |offset, bytes| {
        progress(offset + u64::try_from(bytes.len()).unwrap_or(u64::MAX));
        Ok::<_, io::Error>(())
    })
}

/// Reads `source` from start to end, passes each block that may contain data to `block` (offset,
/// bytes), and returns the identity of the whole.
pub(crate) fn scan<E: From<io::Error>>(
    source: &mut dyn DiskSource,
    mut block: impl FnMut(u64, &[u8]) -> Result<(), E>,
) -> Result<DiskIdentity, E> {
    let len = source.size()?;
    let block_size = usize::try_from(BLOCK_SIZE.min(len)).unwrap_or(usize::MAX);
    let mut buf = vec![0; block_size];
    let zero_block = xxh3_64(&buf);
    let mut head = xxh3_64(&buf[..head_len(len)]);
    let mut digest = Xxh3::new();
    let mut data = 0..0;
    let mut offset = 0;
    while offset < len {
        let end = (offset + BLOCK_SIZE).min(len);
        let bytes = &mut buf[..usize::try_from(end - offset).unwrap_or(usize::MAX)];
        let mut holds_data = false;
        let mut position = offset;
        while position < end {
            if data.end <= position {
                data = source.next_data(position)?.unwrap_or(len..len);
                if data.start < position || data.end <= data.start && data.start < len {
                    return Err(
                        io::Error::other("data range in front of the offset asked for").into()
                    );
                }
            }
            let piece = data.start.clamp(position, end)..data.end.min(end);
            if piece.start >= piece.end {
                break;
            }
            if !holds_data {
                bytes.fill(0);
                holds_data = true;
            }
            let within = |at: u64| usize::try_from(at - offset).unwrap_or(usize::MAX);
            source.read(&mut bytes[within(piece.start)..within(piece.end)], piece.start)?;
            position = piece.end;
        }
        let block_digest = if holds_data {
            if offset == 0 {
                head = xxh3_64(&bytes[..head_len(len)]);
            }
            block(offset, bytes)?;
            xxh3_64(bytes)
        } else if end - offset == BLOCK_SIZE.min(len) {
            zero_block
        } else {
            bytes.fill(0);
            xxh3_64(bytes)
        };
        digest.update(&block_digest.to_le_bytes());
        offset = end;
    }
    Ok(DiskIdentity { len, head, digest: digest.digest() })
}

fn head_len(len: u64) -> usize {
    usize::try_from(len).map_or(HEAD_SIZE, |len| len.min(HEAD_SIZE))
}

/// Bytes as a disk.
struct Disk<'a>(&'a dyn ReadAt);

impl DiskSource for Disk<'_> {
    fn size(&mut self) -> io::Result<u64> {
        self.0.size()
    }

    fn next_data(&mut self, offset: u64) -> io::Result<Option<Range<u64>>> {
        self.0.next_data(offset)
    }

    fn read(&mut self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.0.read_exact_at(buf, offset)
    }
}

/// The identity of a writable disk's content.
pub(crate) fn identity_of(disk: &dyn ReadAt) -> io::Result<DiskIdentity> {
    scan(&mut Disk(disk), |_, _| Ok(()))
}

/// An error of copying a disk.
pub(crate) enum ScanError {
    Read(io::Error),
    Write(FreezeError),
}

impl From<io::Error> for ScanError {
    fn from(error: io::Error) -> Self {
        Self::Read(error)
    }
}

impl From<ScanError> for FreezeError {
    fn from(error: ScanError) -> Self {
        match error {
            ScanError::Read(source) => Self::Overlay { source },
            ScanError::Write(error) => error,
        }
    }
}

#[cfg(test)]
#[path = "disk_tests.rs"]
mod tests;
