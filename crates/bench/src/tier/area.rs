//! A test area on a tier's medium: bytes that a probe reads and writes, and that are gone with it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use firn_memory::page_cache::evict;
use firn_pool::{Access, Huge, MappedMedium, Medium, MemfdOptions};
use rustix::fs::{Advice, OFlags, fadvise};

use super::probe::ProbeError;
use super::{TierError, TierMedium};

/// The step in which an area is filled, and the block of bandwidth measurements.
pub(super) const BLOCK: usize = 1 << 20;
/// Alignment of buffers, offsets and lengths of direct reads and writes.
const SECTOR: usize = 4096;

/// A test area. Offsets are below its length.
#[derive(Debug)]
pub(super) enum Area {
    /// Memory: loads and stores.
    Memory { medium: Box<MappedMedium>, writable: bool },
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
    /// A buffer of this many random bytes: a file system could leave out zeros.
    pub(super) fn new(len: usize) -> Self {
        let mut bytes = vec![0; len + SECTOR];
        fastrand::fill(&mut bytes);
        let start = bytes.as_ptr().align_offset(SECTOR);
        Self { bytes, start, len }
    }

    pub(super) fn get(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

impl Area {
    /// Makes an area of `size` bytes, a multiple of 2 MiB, and fills it. A devdax device is only
    /// read, because it may hold a pool, and all of it is the area.
    pub(super) fn make(medium: &TierMedium, size: u64) -> Result<Self, ProbeError> {
        let failed = |source| ProbeError::io(medium, source);
        let memory = |medium| Self::Memory { medium: Box::new(medium), writable: true };
        let memfd = |huge, node| MappedMedium::memfd(MemfdOptions { size, huge, node });
        let area = match medium {
            TierMedium::Dram {} => memory(memfd(None, None)?),
            TierMedium::HugePages {} => memory(memfd(Some(Huge::Size2M), None)?),
            TierMedium::Node { node } => memory(memfd(None, Some(*node))?),
            TierMedium::Devdax { path } => {
                let device = Box::new(MappedMedium::open(path, Access::Read)?);
                let free = device.facts().size;
                if free < size {
                    let medium = medium.clone();
                    return Err(TierError::Full { medium, free, needed: size }.into());
                }
                return Ok(Self::Memory { medium: device, writable: false });
            }
            TierMedium::DaxFs { path } => {
                let directory = tempfile::Builder::new().prefix("firn-probe-").tempdir_in(path);
                let directory = directory.map_err(failed)?;
                // The mapping keeps the file until its end, and the directory is removed here.
                memory(MappedMedium::create_file(&directory.path().join("area"), size)?)
            }
            TierMedium::Disk { path } => Self::on_disk(path).map_err(failed)?,
        };
        area.fill(size).map_err(failed)?;
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
