//! The storage of a guest's disk: a file, or a file and the guest's changes to it.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use vm_memory::VolatileSlice;

use firn_base::num::u64_of;

use super::SECTOR;
use super::overlay::OverlayDisk;
use crate::open_file::OpenFile;

/// Why a disk cannot be opened.
#[derive(Debug, Error)]
pub enum OpenDiskError {
    /// The size of the file cannot be read.
    #[error("cannot read the size of the disk {path}")]
    Read {
        /// The disk.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file cannot be read at arbitrary offsets.
    #[error("the disk {path} is neither a regular file nor a block device: use a raw disk image")]
    Kind {
        /// The disk.
        path: PathBuf,
    },
    /// The file is empty, or its size is not a multiple of the sector size.
    #[error(
        "the disk {path} has {size} bytes, which is not a positive multiple of 512: it is truncated or \
         not a raw disk image; create it again"
    )]
    Size {
        /// The disk.
        path: PathBuf,
        /// Its size.
        size: u64,
    },
    /// The file is open for reading only: a defect of the caller.
    #[error(
        "the disk {path} is open for reading only: open it for writing, or make the drive read-only"
    )]
    NotWritable {
        /// The disk.
        path: PathBuf,
    },
    /// The file for the guest's writes cannot be used.
    #[error("cannot use the temporary file that takes the guest's disk writes")]
    Upper(#[source] io::Error),
}

/// When what a guest wrote to a drive that is a file of the caller survives the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DiskCache {
    /// When the host's kernel writes it back; the guest cannot ask for it.
    #[default]
    Unsafe,
    /// When the guest's flush is answered, which waits for fdatasync(2).
    Writeback,
}

/// The storage of a guest's disk.
#[derive(Debug)]
pub(crate) enum Disk {
    /// A disk that the guest reads.
    ReadOnly(ReadOnlyDisk),
    /// A disk that the guest reads and writes, whose base does not change.
    Overlay(OverlayDisk),
    /// A disk that the guest reads and writes.
    Writable(WritableDisk),
}

impl Disk {
    /// Size in bytes; a multiple of 512.
    #[must_use]
    pub(crate) fn size(&self) -> u64 {
        match self {
            Self::ReadOnly(disk) => disk.0.size,
            Self::Overlay(disk) => disk.size(),
            Self::Writable(disk) => disk.image.size,
        }
    }

    /// Whether the guest cannot write.
    #[must_use]
    pub(crate) fn is_read_only(&self) -> bool {
        matches!(self, Self::ReadOnly(_))
    }

    /// Whether parts of it can be emptied.
    pub(super) fn can_be_zeroed(&self) -> bool {
        matches!(self, Self::Overlay(_))
    }

    /// Whether the guest can flush it.
    pub(super) fn can_be_flushed(&self) -> bool {
        match self {
            Self::ReadOnly(_) | Self::Overlay(_) => true,
            Self::Writable(disk) => disk.cache == DiskCache::Writeback,
        }
    }

    /// Fills `slice` from the bytes at `offset`.
    pub(super) fn read_at(&self, offset: u64, slice: &VolatileSlice<'_>) -> io::Result<()> {
        match self {
            Self::ReadOnly(disk) => read_volatile_at(&disk.0.file, offset, slice),
            Self::Overlay(disk) => disk.read_at(offset, slice),
            Self::Writable(disk) => read_volatile_at(&disk.image.file, offset, slice),
        }
    }

    /// Writes `slice` at `offset`.
    pub(super) fn write_at(&mut self, offset: u64, slice: &VolatileSlice<'_>) -> io::Result<()> {
        match self {
            Self::ReadOnly(_) => Err(io::ErrorKind::ReadOnlyFilesystem.into()),
            Self::Overlay(disk) => disk.write_at(offset, slice),
            Self::Writable(disk) => write_volatile_at(&disk.image.file, offset, slice),
        }
    }

    /// Writes `len` zeros at `offset`.
    pub(super) fn write_zeroes(&mut self, offset: u64, len: u64) -> io::Result<()> {
        match self {
            Self::Overlay(disk) => disk.write_zeroes(offset, len),
            Self::ReadOnly(_) | Self::Writable(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Makes what was written survive the host, if that is what the guest's flush is for.
    pub(super) fn flush(&self) -> io::Result<()> {
        match self {
            // Nothing to do: writes exist only as long as the monitor, and a freeze stores and
            // syncs them.
            Self::ReadOnly(_) | Self::Overlay(_) => Ok(()),
            Self::Writable(disk) => disk.sync(),
        }
    }
}

/// A raw disk image: a file or a block device.
#[derive(Debug)]
pub(super) struct RawImage {
    pub(super) file: File,
    pub(super) size: u64,
}

/// A raw disk image that the guest does not change.
#[derive(Debug)]
pub(crate) struct ReadOnlyDisk(pub(super) RawImage);

/// A raw disk image that the guest's writes change.
#[derive(Debug)]
pub(crate) struct WritableDisk {
    image: RawImage,
    cache: DiskCache,
}

impl RawImage {
    /// An image of whole sectors, and at least one.
    pub(super) fn new(disk: OpenFile) -> Result<Self, OpenDiskError> {
        let path = disk.path.clone();
        let (image, size) = Self::of_any_size(disk)?;
        if size == 0 || image.size != size {
            return Err(OpenDiskError::Size { path, size });
        }
        Ok(image)
    }

    /// The whole sectors of an image, and the size of all of it.
    fn of_any_size(disk: OpenFile) -> Result<(Self, u64), OpenDiskError> {
        let failed = |source| OpenDiskError::Read { path: disk.path.clone(), source };
        let kind = rustix::fs::fstat(&disk.file).map_err(|errno| failed(errno.into()))?.st_mode;
        let kind = rustix::fs::FileType::from_raw_mode(kind);
        if !(kind.is_file() || kind.is_block_device()) {
            return Err(OpenDiskError::Kind { path: disk.path });
        }
        let size = disk.size().map_err(failed)?;
        Ok((Self { file: disk.file, size: size - size % SECTOR }, size))
    }
}

impl ReadOnlyDisk {
    /// The raw disk image in an open file.
    ///
    /// # Errors
    /// See [`OpenDiskError`].
    pub(crate) fn new(disk: OpenFile) -> Result<Self, OpenDiskError> {
        RawImage::new(disk).map(Self)
    }

    /// The whole sectors of the image in an open file, of which there may be none.
    ///
    /// # Errors
    /// See [`OpenDiskError`].
    pub(crate) fn of_any_size(disk: OpenFile) -> Result<Self, OpenDiskError> {
        RawImage::of_any_size(disk).map(|(image, _)| Self(image))
    }
}

impl WritableDisk {
    /// The whole sectors of the image in a file that is open for reading and writing, of which
    /// there may be none.
    ///
    /// # Errors
    /// See [`OpenDiskError`].
    pub(crate) fn new(disk: OpenFile, cache: DiskCache) -> Result<Self, OpenDiskError> {
        let path = disk.path.clone();
        let (image, _) = RawImage::of_any_size(disk)?;
        let flags = rustix::fs::fcntl_getfl(&image.file);
        let flags = flags
            .map_err(|errno| OpenDiskError::Read { path: path.clone(), source: errno.into() })?;
        if !flags.contains(OFlags::RDWR) {
            return Err(OpenDiskError::NotWritable { path });
        }
        Ok(Self { image, cache })
    }

    /// Waits until everything that was written survives the host.
    pub(crate) fn sync(&self) -> io::Result<()> {
        self.image.file.sync_data()
    }
}

/// Fills all of `slice` from `file`, directly into guest memory. The end of the file is an error.
pub(super) fn read_volatile_at(
    file: &File,
    offset: u64,
    slice: &VolatileSlice<'_>,
) -> io::Result<()> {
    transfer(slice, offset, io::ErrorKind::UnexpectedEof, |data, len, offset| {
        // SAFETY: `data` is valid for writes of `len` bytes: `transfer` takes both from a slice of
        // guest memory that it holds. Only the kernel accesses the bytes, so concurrent guest
        // writes are fine.
        unsafe { libc::pread64(file.as_raw_fd(), data.cast(), len, offset) }
    })
}

/// Writes all of `slice` to `file`, directly from guest memory.
pub(super) fn write_volatile_at(
    file: &File,
    offset: u64,
    slice: &VolatileSlice<'_>,
) -> io::Result<()> {
    transfer(slice, offset, io::ErrorKind::WriteZero, |data, len, offset| {
        // SAFETY: `data` is valid for reads of `len` bytes, as above.
        unsafe { libc::pwrite64(file.as_raw_fd(), data.cast_const().cast(), len, offset) }
    })
}

fn transfer(
    slice: &VolatileSlice<'_>,
    offset: u64,
    no_progress: io::ErrorKind,
    mut call: impl FnMut(*mut u8, usize, i64) -> isize,
) -> io::Result<()> {
    let mut done = 0;
    while done < slice.len() {
        let rest = slice.offset(done).map_err(io::Error::other)?;
        let at = i64::try_from(offset + u64_of(done)).map_err(io::Error::other)?;
        match usize::try_from(call(rest.ptr_guard_mut().as_ptr(), rest.len(), at)) {
            Ok(0) => return Err(no_progress.into()),
            Ok(bytes) => done += bytes,
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}
