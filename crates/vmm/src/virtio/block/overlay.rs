//! A disk whose guest's writes stay outside its base.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{
    CWD, FallocateFlags, MemfdFlags, Mode, OFlags, fallocate, fstatfs, memfd_create, openat,
};
use rustix::io::Errno;
use vm_memory::VolatileSlice;

use firn_base::num::u64_of;
use firn_snapshot::ReadAt;

use super::disk::{OpenDiskError, ReadOnlyDisk, read_volatile_at, write_volatile_at};

/// Bytes of a cluster, the unit of copy-on-write.
pub(super) const CLUSTER: u64 = 4096;
/// Bytes of an extent that are copied at a time.
const PIECE: usize = 4096;

/// The initial content of an overlay disk.
#[derive(Debug)]
enum Base {
    File(File),
    /// In a snapshot's extent, which is not a file of its own.
    Extent(Arc<dyn ReadAt>),
}

/// The location of a part of an overlay disk.
#[derive(Clone, Copy)]
pub(super) enum Place<'a> {
    File(&'a File),
    Extent(&'a dyn ReadAt),
}

impl Place<'_> {
    pub(super) fn read_exact_at(self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        match self {
            Self::File(file) => FileExt::read_exact_at(file, buf, offset),
            Self::Extent(extent) => extent.read_exact_at(buf, offset),
        }
    }

    fn read_volatile_at(self, offset: u64, slice: &VolatileSlice<'_>) -> io::Result<()> {
        match self {
            Self::File(file) => read_volatile_at(file, offset, slice),
            Self::Extent(extent) => {
                let mut buf = vec![0; slice.len().min(PIECE)];
                for done in (0..slice.len()).step_by(PIECE) {
                    let buf = &mut buf[..PIECE.min(slice.len() - done)];
                    let (done, len) = (u64_of(done), u64_of(buf.len()));
                    extent.read_exact_at(buf, offset + done)?;
                    subslice(slice, done, len)?.copy_from(buf);
                }
                Ok(())
            }
        }
    }
}

/// A disk that the guest writes to without changing its base. Changed clusters of 4 KiB are in a
/// sparse unlinked file, which the kernel removes when the monitor ends.
#[derive(Debug)]
pub(crate) struct OverlayDisk {
    base: Base,
    size: u64,
    pub(super) upper: File,
    /// The clusters that `upper` contains, each at its offset on the disk.
    changed: Clusters,
    /// Those of them that take space: the others are holes.
    stored: Clusters,
    /// Limit of the space that `upper` takes, bytes.
    limit: u64,
}

/// A set of clusters of a disk: one bit for each.
#[derive(Debug)]
struct Clusters {
    bits: Vec<u64>,
    count: u64,
}

impl Clusters {
    /// None, of a disk of `size` bytes.
    fn none(size: u64) -> io::Result<Self> {
        let mut clusters = Self { bits: Vec::new(), count: 0 };
        clusters.grow(size)?;
        Ok(clusters)
    }

    /// Has place for the clusters of a disk of `size` bytes.
    fn grow(&mut self, size: u64) -> io::Result<()> {
        let words = usize::try_from(size.div_ceil(CLUSTER).div_ceil(64));
        self.bits.resize(words.map_err(io::Error::other)?, 0);
        Ok(())
    }

    fn contains(&self, cluster: u64) -> bool {
        let (word, bit) = place(cluster);
        self.bits.get(word).is_some_and(|word| word >> bit & 1 != 0)
    }

    fn set(&mut self, clusters: Range<u64>, present: bool) {
        for cluster in clusters {
            let (word, bit) = place(cluster);
            let Some(word) = self.bits.get_mut(word) else { return };
            match (*word >> bit & 1 != 0, present) {
                (false, true) => self.count += 1,
                (true, false) => self.count -= 1,
                _ => continue,
            }
            *word ^= 1 << bit;
        }
    }
}

impl OverlayDisk {
    /// A writable disk with the content of `base`. Writes of the guest go to the empty file
    /// `scratch`, or to memory where there is none.
    ///
    /// # Errors
    /// See [`OpenDiskError`].
    pub(crate) fn new(base: ReadOnlyDisk, scratch: Option<File>) -> Result<Self, OpenDiskError> {
        Self::over(Base::File(base.0.file), base.0.size, scratch).map_err(OpenDiskError::Upper)
    }

    /// A writable disk with the content in a snapshot's extent. Writes go to the same place as with
    /// [`OverlayDisk::new`].
    ///
    /// # Errors
    /// See [`OpenDiskError`].
    pub(crate) fn of_extent(
        content: Arc<dyn ReadAt>,
        scratch: Option<File>,
    ) -> Result<Self, OpenDiskError> {
        let size = content.size().map_err(OpenDiskError::Upper)?;
        Self::over(Base::Extent(content), size, scratch).map_err(OpenDiskError::Upper)
    }

    fn over(base: Base, size: u64, scratch: Option<File>) -> io::Result<Self> {
        let upper = scratch.map_or_else(memory_file, Ok)?;
        upper.set_len(size)?;
        let (changed, stored) = (Clusters::none(size)?, Clusters::none(size)?);
        Ok(Self { base, size, upper, changed, stored, limit: u64::MAX })
    }

    /// Appends zeros until the disk has `size` bytes, rounded up to complete clusters. A disk that
    /// is as large stays as it is.
    ///
    /// # Errors
    /// See [`OpenDiskError`].
    pub(crate) fn grown_to(mut self, size: u64) -> Result<Self, OpenDiskError> {
        if size > self.size {
            self.grow(size).map_err(OpenDiskError::Upper)?;
        }
        Ok(self)
    }

    fn grow(&mut self, size: u64) -> io::Result<()> {
        let size = size.checked_next_multiple_of(CLUSTER).ok_or(Errno::FBIG)?;
        if !self.size.is_multiple_of(CLUSTER) {
            self.copy_up(self.size / CLUSTER)?;
        }
        self.upper.set_len(size)?;
        self.changed.grow(size)?;
        self.stored.grow(size)?;
        // The new clusters are holes of `upper`.
        self.changed.set(self.size.div_ceil(CLUSTER)..size / CLUSTER, true);
        self.size = size;
        Ok(())
    }

    /// Limits the space that the guest's writes take, bytes. A write beyond it fails.
    #[must_use]
    pub(crate) fn with_limit(self, limit: u64) -> Self {
        Self { limit, ..self }
    }

    pub(super) fn size(&self) -> u64 {
        self.size
    }

    fn base(&self) -> Place<'_> {
        match &self.base {
            Base::File(file) => Place::File(file),
            Base::Extent(extent) => Place::Extent(&**extent),
        }
    }

    /// Checks that `clusters` can be stored within the limit.
    fn check_room(&self, clusters: Range<u64>) -> io::Result<()> {
        let new = clusters.filter(|cluster| !self.stored.contains(*cluster)).count();
        if (self.stored.count + u64_of(new)).saturating_mul(CLUSTER) > self.limit {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        Ok(())
    }

    /// The location of the byte at `offset`, and how many of the `len` bytes from there it
    /// contains.
    pub(super) fn extent(&self, offset: u64, len: u64) -> (Place<'_>, u64) {
        let changed = self.changed.contains(offset / CLUSTER);
        let mut end = (offset / CLUSTER + 1) * CLUSTER;
        while end < offset + len && self.changed.contains(end / CLUSTER) == changed {
            end += CLUSTER;
        }
        let place = if changed { Place::File(&self.upper) } else { self.base() };
        (place, len.min(end - offset))
    }

    pub(super) fn read_at(&self, offset: u64, slice: &VolatileSlice<'_>) -> io::Result<()> {
        let len = u64_of(slice.len());
        let mut done = 0;
        while done < len {
            let (place, part) = self.extent(offset + done, len - done);
            place.read_volatile_at(offset + done, &subslice(slice, done, part)?)?;
            done += part;
        }
        Ok(())
    }

    pub(super) fn write_at(&mut self, offset: u64, slice: &VolatileSlice<'_>) -> io::Result<()> {
        let len = u64_of(slice.len());
        let mut done = 0;
        while done < len {
            let at = offset + done;
            let (whole, part) = self.split(at, len - done);
            let data = subslice(slice, done, part)?;
            let clusters = at / CLUSTER..(at + part).div_ceil(CLUSTER);
            self.check_room(clusters.clone())?;
            if !whole {
                self.copy_up(at / CLUSTER)?;
            }
            // A write that fails may have taken space.
            self.stored.set(clusters.clone(), true);
            write_volatile_at(&self.upper, at, &data)?;
            self.changed.set(clusters, true);
            done += part;
        }
        Ok(())
    }

    pub(super) fn write_zeroes(&mut self, offset: u64, len: u64) -> io::Result<()> {
        let mut done = 0;
        while done < len {
            let at = offset + done;
            let (whole, part) = self.split(at, len - done);
            if whole {
                punch_hole(&self.upper, at, part)?;
                let clusters = at / CLUSTER..(at + part).div_ceil(CLUSTER);
                self.changed.set(clusters.clone(), true);
                self.stored.set(clusters, false);
            } else {
                let cluster = at / CLUSTER;
                self.check_room(cluster..cluster + 1)?;
                self.copy_up(cluster)?;
                self.stored.set(cluster..cluster + 1, true);
                let zeros = vec![0; usize::try_from(part).map_err(io::Error::other)?];
                self.upper.write_all_at(&zeros, at)?;
            }
            done += part;
        }
        Ok(())
    }

    /// How many of the `len` bytes at `offset` to write next, and whether they are complete
    /// clusters: as many complete clusters as possible, or a part of one cluster.
    fn split(&self, offset: u64, len: u64) -> (bool, u64) {
        let within = offset % CLUSTER;
        if within != 0 {
            return (false, len.min(CLUSTER - within));
        }
        // The end of the disk may truncate the last cluster.
        if offset + len == self.size() {
            return (true, len);
        }
        let whole = len / CLUSTER * CLUSTER;
        if whole == 0 { (false, len) } else { (true, whole) }
    }

    /// Copies `cluster` to `upper` unless it is there already.
    fn copy_up(&mut self, cluster: u64) -> io::Result<()> {
        if self.changed.contains(cluster) {
            return Ok(());
        }
        let start = cluster * CLUSTER;
        let len = CLUSTER.min(self.size() - start);
        let mut data = vec![0; usize::try_from(len).map_err(io::Error::other)?];
        self.base().read_exact_at(&mut data, start)?;
        self.upper.write_all_at(&data, start)?;
        self.changed.set(cluster..cluster + 1, true);
        self.stored.set(cluster..cluster + 1, true);
        Ok(())
    }
}

/// The word and the bit of a cluster in a set.
fn place(cluster: u64) -> (usize, u64) {
    (usize::try_from(cluster / 64).unwrap_or(usize::MAX), cluster % 64)
}

/// Whether a file is on a file system in memory.
///
/// # Errors
/// That of fstatfs(2).
pub fn is_in_memory(file: impl AsFd) -> io::Result<bool> {
    // By `f_type` (statfs(2)): tmpfs, ramfs, hugetlbfs.
    let in_memory = [0x0102_1994, 0x8584_58f6, 0x9584_58f6];
    Ok(in_memory.contains(&fstatfs(file)?.f_type))
}

/// A file for a guest's disk writes: unlinked, in a directory on a file system that supports such
/// files and holes; in memory otherwise. The process that starts a monitor makes it.
///
/// # Errors
/// The file cannot be created.
pub fn scratch_file(directory: &Path) -> io::Result<File> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let opened = openat(CWD, directory, flags, Mode::RUSR | Mode::WUSR);
    match opened.and_then(|file| punch_hole(&file, 0, CLUSTER).map(|()| file)) {
        // The file system or the kernel supports no unlinked files or no holes.
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => memory_file(),
        opened => Ok(opened?.into()),
    }
}

fn memory_file() -> io::Result<File> {
    Ok(memfd_create("firn-overlay", MemfdFlags::CLOEXEC)?.into())
}

fn punch_hole(file: impl AsFd, offset: u64, len: u64) -> Result<(), Errno> {
    fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len)
}

fn subslice<'a>(slice: &VolatileSlice<'a>, start: u64, len: u64) -> io::Result<VolatileSlice<'a>> {
    let start = usize::try_from(start).map_err(io::Error::other)?;
    let len = usize::try_from(len).map_err(io::Error::other)?;
    slice.subslice(start, len).map_err(io::Error::other)
}
