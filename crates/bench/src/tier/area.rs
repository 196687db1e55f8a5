//! A test area on a tier's medium: bytes that a probe reads and writes, and that are gone with it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use firn_memory::page_cache::evict;
use firn_pool::{Access, Huge, MappedMedium, Medium, MemfdOptions};
use rustix::fs::{Advice, OFlags, fadvise};
use tempfile::TempDir;

use super::medium::TierMedium;
use super::probe::ProbeError;

/// The step in which an area is filled, and the block of bandwidth measurements.
pub(super) const BLOCK: usize = 1 << 20;
/// Alignment of buffers, offsets and lengths of direct reads and writes.
const SECTOR: usize = 4096;

/// A test area. Offsets are below its length.
#[derive(Debug)]
pub(super) enum Area {
    /// Memory: loads and stores.
    Memory { medium: Box<MappedMedium>, writable: bool, _directory: Option<TempDir> },
    /// A file without a name on a disk: past the page cache, and through it.
    Disk { direct: File, cached: File },
}

/// A buffer for an area, aligned for direct reads.
#[derive(Debug)]
pub(super) struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    /// A buffer of this many bytes without a run of zeros, which a file system could leave out.
    pub(super) fn new(len: usize) -> Self {
        let bytes: Vec<u8> =
            std::iter::repeat_with(|| fastrand::u8(1..)).take(len + SECTOR).collect();
        let start = bytes.as_ptr().align_offset(SECTOR);
        Self { bytes, start, len }
    }

    pub(super) fn get(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

impl Area {
    /// Makes an area of `size` bytes, a multiple of [`BLOCK`], and fills it. A devdax device is
    /// only read, because it may hold a pool.
    pub(super) fn make(medium: &TierMedium, size: u64) -> Result<Self, ProbeError> {
        let memfd = |huge, node| {
            let medium = MappedMedium::memfd(MemfdOptions { size, huge, node })?;
            Ok(Self::Memory { medium: Box::new(medium), writable: true, _directory: None })
        };
        let area = match medium {
            TierMedium::Dram {} => memfd(None, None),
            TierMedium::HugePages {} => memfd(Some(Huge::Size2M), None),
            TierMedium::Node { node } => memfd(None, Some(*node)),
            TierMedium::Devdax { path } => {
                let medium = MappedMedium::open(path, Access::Read)?;
                return Ok(Self::Memory {
                    medium: Box::new(medium),
                    writable: false,
                    _directory: None,
                });
            }
            TierMedium::DaxFs { path } => {
                let failed = |source| ProbeError::Io { medium: medium.clone(), source };
                let directory = tempfile::Builder::new().prefix("firn-probe-").tempdir_in(path);
                let directory = directory.map_err(failed)?;
                let file = directory.path().join("area");
                let medium = Box::new(MappedMedium::create_file(&file, size)?);
                Ok(Self::Memory { medium, writable: true, _directory: Some(directory) })
            }
            TierMedium::Disk { path } => Self::on_disk(path)
                .map_err(|source| ProbeError::Io { medium: medium.clone(), source }),
        };
        let area: Self = area?;
        area.fill(size).map_err(|source| ProbeError::Io { medium: medium.clone(), source })?;
        Ok(area)
    }

    fn on_disk(directory: &Path) -> io::Result<Self> {
        // Without a name: it is gone however this process ends.
        let cached = tempfile::tempfile_in(directory)?;
        let same = format!("/proc/self/fd/{}", cached.as_raw_fd());
        let direct = i32::try_from(OFlags::DIRECT.bits()).unwrap_or_default();
        let direct = OpenOptions::new().read(true).write(true).custom_flags(direct).open(same)?;
        // A microVM's memory is mapped with MADV_RANDOM in the study: no read-ahead.
        fadvise(&cached, 0, None, Advice::Random)?;
        Ok(Self::Disk { direct, cached })
    }

    fn fill(&self, size: u64) -> io::Result<()> {
        let mut block = Buffer::new(BLOCK);
        for offset in (0..size).step_by(BLOCK) {
            self.store(offset, block.get())?;
        }
        self.sync()
    }

    /// Bytes of the area, if the medium decides it.
    pub(super) fn len(&self) -> Option<u64> {
        match self {
            Self::Memory { medium, writable: false, .. } => Some(medium.facts().size),
            _ => None,
        }
    }

    /// Whether writes can be measured.
    pub(super) fn is_writable(&self) -> bool {
        !matches!(self, Self::Memory { writable: false, .. })
    }

    /// Reads from the medium, past the page cache. Disks need offsets and lengths of whole
    /// sectors, and a [`Buffer`].
    pub(super) fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        match self {
            Self::Memory { medium, .. } => {
                medium.load(offset, buffer);
                Ok(())
            }
            Self::Disk { direct, .. } => direct.read_exact_at(buffer, offset),
        }
    }

    /// Reads as a restored guest does: memory directly, a disk through the page cache.
    pub(super) fn touch(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        match self {
            Self::Memory { .. } => self.read(offset, buffer),
            Self::Disk { cached, .. } => cached.read_exact_at(buffer, offset),
        }
    }

    /// Writes, and waits until the bytes are as durable as the medium makes them.
    pub(super) fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.store(offset, bytes)?;
        self.sync_range(offset, bytes.len() as u64)
    }

    fn store(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Memory { medium, .. } => {
                medium.store(offset, bytes);
                Ok(())
            }
            Self::Disk { direct, .. } => direct.write_all_at(bytes, offset),
        }
    }

    fn sync_range(&self, offset: u64, len: u64) -> io::Result<()> {
        match self {
            Self::Memory { medium, .. } => {
                medium.flush(offset, len);
                medium.fence()
            }
            Self::Disk { direct, .. } => direct.sync_data(),
        }
    }

    fn sync(&self) -> io::Result<()> {
        match self {
            Self::Memory { medium, .. } => medium.fence(),
            Self::Disk { direct, .. } => direct.sync_all(),
        }
    }

    /// Empties the page cache of the area.
    pub(super) fn evict(&self) -> io::Result<()> {
        match self {
            Self::Memory { .. } => Ok(()),
            Self::Disk { cached, .. } => evict(cached).map(drop),
        }
    }
}
