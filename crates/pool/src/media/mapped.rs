//! Devices, files and memfds, each mapped completely.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Instant;

use firn_base::num::{round_down, usize_of};
use parking_lot::Mutex;
use rustix::fs::{
    FallocateFlags, FileType, FlockOperation, MemfdFlags, SealFlags, fallocate, fcntl_add_seals,
    fdatasync, flock, fstat, fstatfs, ftruncate, memfd_create,
};
use rustix::io::Errno;

use super::devdax::Sysfs;
use super::memory::{has_clients, mark_client, reopen};
use super::{
    Access, Durability, ExtentDescriptor, FlushInstruction, How, Index, Medium, MediumError,
    MediumFacts, MediumKind, Memory, NodeBytes, fence,
};
use crate::layout::GRANULE;

/// The byte at which the descriptions of all clients are marked. An extent begins later.
const CLIENT: u64 = 0;
/// The byte at which marks are tried.
const PROBE: u64 = 1;
const TMPFS: i64 = 0x0102_1994;
const HUGETLBFS: i64 = 0x9584_58f6;

/// Properties of a memfd medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemfdOptions {
    /// Bytes.
    pub size: u64,
    /// Use huge pages, which must be reserved (`/sys/kernel/mm/hugepages`).
    pub huge: Option<Huge>,
    /// Bind the memory to this NUMA node.
    pub node: Option<u32>,
}

/// Sizes of reserved huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Huge {
    /// 2 MiB.
    Size2M,
    /// 1 GiB: a processor with `pdpe1gb`.
    Size1G,
}

impl Huge {
    fn bytes(self) -> u64 {
        match self {
            Self::Size2M => 2 << 20,
            Self::Size1G => 1 << 30,
        }
    }
}

impl MemfdOptions {
    /// Creates a memfd with these pages, of `size` bytes. Its size is sealed.
    fn create(self, name: &str, size: u64) -> rustix::io::Result<File> {
        let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        flags |= match self.huge {
            Some(Huge::Size2M) => MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
            Some(Huge::Size1G) => MemfdFlags::HUGETLB | MemfdFlags::HUGE_1GB,
            None => MemfdFlags::empty(),
        };
        let file = memfd_create(name, flags)?;
        ftruncate(&file, size)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(file.into())
    }
}

/// A device, file or memfd, mapped completely.
#[derive(Debug)]
pub struct MappedMedium {
    memory: Memory,
    file: File,
    sysfs: Option<Sysfs>,
    facts: MediumFacts,
    /// Whether a mapping keeps the mark of the descriptor that it was made with, so that the marks
    /// show which extents are in use.
    marks_last: bool,
    /// How a memfd was made.
    memfd: Option<MemfdOptions>,
    /// The ranges with memory of their own, by offset.
    parts: Mutex<BTreeMap<u64, Part>>,
    /// Open for the next grants, for reading and for writing.
    spares: Mutex<[Option<File>; 2]>,
}

/// Memory of its own of a range of a memfd.
#[derive(Debug)]
struct Part {
    /// None once the range has begun to get the medium's memory again.
    file: Option<File>,
    leaf: u64,
}

impl MappedMedium {
    /// Opens a devdax device or a file. Opening for writing locks it and builds its index.
    ///
    /// # Errors
    /// [`MediumError::InUse`] if another process has it open for writing; the other variants of
    /// [`MediumError`] as documented there.
    pub fn open(path: &Path, access: Access) -> Result<Self, MediumError> {
        let writable = access == Access::Write;
        let open_error = |source| MediumError::Open { path: path.to_owned(), source };
        let file = OpenOptions::new().read(true).write(writable).open(path).map_err(open_error)?;
        let stat = fstat(&file).map_err(|errno| open_error(errno.into()))?;
        let no_medium = |what| MediumError::NoMedium { path: path.to_owned(), what };
        let found = match FileType::from_raw_mode(stat.st_mode) {
            FileType::CharacterDevice => {
                let sysfs = Sysfs::of(path, &stat)
                    .ok_or_else(|| no_medium("a character device but not a devdax"))?;
                Found {
                    kind: MediumKind::Devdax,
                    size: sysfs.size()?,
                    granule: sysfs.align()?.max(GRANULE),
                    sysfs: Some(sysfs),
                }
            }
            FileType::RegularFile => {
                let fs = fstatfs(&file).map_err(|errno| open_error(errno.into()))?;
                let kind = match fs.f_type {
                    TMPFS => MediumKind::Tmpfs,
                    HUGETLBFS => MediumKind::Hugetlbfs,
                    // Mapping shows whether this is a DAX file.
                    _ => MediumKind::File,
                };
                let page = u64::try_from(fs.f_bsize).unwrap_or(0);
                let granule =
                    if kind == MediumKind::Hugetlbfs { page.max(GRANULE) } else { GRANULE };
                let size = u64::try_from(stat.st_size).unwrap_or(0);
                Found { kind, size, granule, sysfs: None }
            }
            FileType::BlockDevice => return Err(no_medium("a block device")),
            FileType::Directory => return Err(no_medium("a directory")),
            FileType::Socket => return Err(no_medium("a socket")),
            _ => return Err(no_medium("neither a devdax device nor a file")),
        };
        if writable {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => return Err(MediumError::InUse(path.to_owned())),
                Err(errno) => return Err(open_error(errno.into())),
            }
            // Recovery would free the extents that these clients use.
            if has_clients(&file, CLIENT).map_err(open_error)? {
                return Err(MediumError::HasClients(path.to_owned()));
            }
        }
        Self::map(file, path.display().to_string(), found, access, None)
    }

    /// Creates a file of `size` bytes, reserves its space, and opens it for writing.
    ///
    /// # Errors
    /// [`MediumError::Exists`] if the file exists, [`MediumError::Reserve`] if the file system has
    /// too little space; the other variants as documented there.
    pub fn create_file(path: &Path, size: u64) -> Result<Self, MediumError> {
        // Guest memory contains the guest's secrets.
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
        let file = file.map_err(|source| match source.kind() {
            io::ErrorKind::AlreadyExists => MediumError::Exists(path.to_owned()),
            _ => MediumError::Open { path: path.to_owned(), source },
        })?;
        let opened = reserve(&file, size)
            .map_err(|errno| MediumError::Reserve {
                name: path.display().to_string(),
                size,
                source: errno.into(),
            })
            .and_then(|()| Self::open(path, Access::Write));
        if opened.is_err() {
            // This call created the file. The caller gets the original error.
            let _ = std::fs::remove_file(path);
        }
        opened
    }

    /// Creates a memfd, allocates all its memory, and seals its size.
    ///
    /// # Errors
    /// [`MediumError::Reserve`] or [`MediumError::Populate`] if there is too little memory or too
    /// few huge pages; the other variants as documented there.
    pub fn memfd(options: MemfdOptions) -> Result<Self, MediumError> {
        let MemfdOptions { size, huge, node } = options;
        let granule = huge.map_or(GRANULE, Huge::bytes);
        let size = round_down(size, granule);
        let mut name = "memfd".to_owned();
        if let Some(huge) = huge {
            name.push_str(&format!(" of huge pages of {}", firn_base::format_bytes(huge.bytes())));
        }
        if let Some(node) = node {
            name.push_str(&format!(" on NUMA node {node}"));
        }
        let file = options.create("firn-pool", size);
        let file = file.map_err(|errno| MediumError::Reserve {
            name: name.clone(),
            size,
            source: errno.into(),
        })?;
        let kind = if huge.is_some() { MediumKind::Hugetlbfs } else { MediumKind::Memfd };
        let found = Found { kind, size, granule, sysfs: None };
        Self::map(file, name, found, Access::Write, Some(options))
    }

    /// Maps a medium for reading, given a descriptor and the facts from another process.
    ///
    /// # Errors
    /// The medium is smaller than the facts state, or mapping fails.
    pub fn from_descriptor(descriptor: OwnedFd, facts: MediumFacts) -> Result<Self, MediumError> {
        let file = File::from(descriptor);
        let map_error = |source: io::Error| MediumError::Map {
            name: facts.name.clone(),
            size: facts.size,
            source,
        };
        let stat = fstat(&file).map_err(|errno| map_error(errno.into()))?;
        let sysfs = Sysfs::of(Path::new(&facts.name), &stat);
        let size = match &sysfs {
            Some(sysfs) => sysfs.size()?,
            None => u64::try_from(stat.st_size).unwrap_or(0),
        };
        if size < facts.size || facts.size == 0 {
            let name = facts.name.clone();
            return Err(MediumError::TooSmall { name, size, least: facts.size.max(GRANULE) });
        }
        let how = How { writable: false, synchronous: false, align: facts.granule };
        let memory = Memory::map(&file, 0, facts.size, how).map_err(|e| map_error(e.into()))?;
        Ok(Self {
            memory,
            file,
            sysfs,
            facts: MediumFacts { index: None, nodes: Vec::new(), ..facts },
            marks_last: false,
            memfd: None,
            parts: Mutex::default(),
            spares: Mutex::default(),
        })
    }

    fn map(
        file: File,
        name: String,
        found: Found,
        access: Access,
        memfd: Option<MemfdOptions>,
    ) -> Result<Self, MediumError> {
        let Found { mut kind, granule, sysfs, size } = found;
        let size = round_down(size, granule);
        if size == 0 {
            return Err(MediumError::TooSmall { name, size: found.size, least: granule });
        }
        let how = How { writable: access == Access::Write, synchronous: false, align: granule };
        let memory = match kind {
            MediumKind::File => map_file(&file, size, how),
            _ => Memory::map(&file, 0, size, how),
        };
        let memory = memory.map_err(|errno| MediumError::Map {
            name: name.clone(),
            size,
            source: errno.into(),
        })?;
        if memory.is_synchronous() {
            kind = MediumKind::DaxFile;
        }
        if let Some(node) = memfd.and_then(|options| options.node) {
            memory.bind(0, size, node).map_err(|errno| MediumError::Node {
                name: name.clone(),
                node,
                source: errno.into(),
            })?;
        }
        let durability = match kind {
            MediumKind::Devdax | MediumKind::DaxFile => {
                Durability::CacheLines(FlushInstruction::detect())
            }
            MediumKind::File => Durability::FileSync,
            _ => Durability::Volatile,
        };
        let index = match access {
            Access::Write if kind != MediumKind::File => {
                let index = build_index(&memory, kind, granule);
                let source = |errno: Errno| errno.into();
                Some(index.map_err(|errno| MediumError::Populate {
                    name: name.clone(),
                    source: source(errno),
                })?)
            }
            _ => None,
        };
        let nodes = match (&index, &sysfs) {
            (None, _) => Vec::new(),
            (Some(_), Some(sysfs)) => {
                sysfs.node().map(|node| NodeBytes { node, bytes: size }).into_iter().collect()
            }
            (Some(_), None) => super::nodes::of_mapping(memory.base().addr()),
        };
        let facts = MediumFacts { kind, name, size, granule, durability, index, nodes };
        let marks_last = access == Access::Write && do_marks_last(&file, granule).unwrap_or(false);
        let (parts, spares) = (Mutex::default(), Mutex::default());
        Ok(Self { memory, file, sysfs, facts, marks_last, memfd, parts, spares })
    }

    /// Allocates the pages of a new range and maps them.
    fn populate(&self, offset: u64, len: u64) -> rustix::io::Result<()> {
        if let Some(node) = self.memfd.and_then(|options| options.node) {
            self.memory.bind(offset, len, node)?;
        }
        advise_huge(&self.memory, self.facts.kind, offset, len)?;
        self.memory.populate_range(offset, len)
    }
}

/// Whether a mapping keeps the mark of a descriptor that is closed, and loses it with its end. All
/// files of Linux do so; a driver of a device could do otherwise.
fn do_marks_last(file: &File, granule: u64) -> io::Result<bool> {
    let client = reopen(file, true)?;
    mark_client(&client, PROBE)?;
    let how = How { writable: false, synchronous: false, align: granule };
    let mapped = Memory::map(&client, 0, granule, how)?;
    drop(client);
    let lasts = has_clients(file, PROBE)?;
    drop(mapped);
    Ok(lasts && !has_clients(file, PROBE)?)
}

/// Properties of the file at a path.
#[derive(Debug)]
struct Found {
    kind: MediumKind,
    size: u64,
    granule: u64,
    sysfs: Option<Sysfs>,
}

/// Sets the size of an empty file and reserves its space. tmpfs allocates huge pages only for
/// mappings with `MADV_HUGEPAGE`; `fallocate` would get small pages as soon as huge pages are not
/// immediately available. For tmpfs, the pages are therefore allocated when the medium is mapped,
/// and this function only checks that enough space is free.
fn reserve(file: &File, size: u64) -> rustix::io::Result<()> {
    let fs = fstatfs(file)?;
    if fs.f_type != TMPFS {
        return fallocate(file, FallocateFlags::empty(), 0, size);
    }
    let block = u64::try_from(fs.f_bsize).unwrap_or(0);
    // A tmpfs without a size limit reports 0 blocks.
    if fs.f_blocks > 0 && fs.f_bavail.saturating_mul(block) < size {
        return Err(Errno::NOSPC);
    }
    ftruncate(file, size)
}

/// Maps a file with MAP_SYNC, which the kernel supports only on DAX file systems, and otherwise
/// without it.
fn map_file(file: &File, size: u64, how: How) -> rustix::io::Result<Memory> {
    match Memory::map(file, 0, size, How { synchronous: true, ..how }) {
        Err(Errno::OPNOTSUPP | Errno::INVAL) => Memory::map(file, 0, size, how),
        result => result,
    }
}

/// Requests leaves of 2 MiB of shared memory.
fn advise_huge(memory: &Memory, kind: MediumKind, offset: u64, len: u64) -> rustix::io::Result<()> {
    if !matches!(kind, MediumKind::Memfd | MediumKind::Tmpfs) {
        return Ok(());
    }
    match memory.advise_huge(offset, len) {
        // EINVAL: a kernel without transparent huge pages.
        Err(Errno::INVAL) => Ok(()),
        result => result,
    }
}

/// The leaves of a populated range.
fn leaf(memory: &Memory, kind: MediumKind, granule: u64, offset: u64, len: u64) -> u64 {
    match kind {
        MediumKind::Devdax | MediumKind::Hugetlbfs => granule,
        _ => super::leaf::of_mapping(memory.base().addr() + usize_of(offset), len),
    }
}

/// Builds the host's page tables with the largest leaves that the medium supports.
fn build_index(memory: &Memory, kind: MediumKind, granule: u64) -> rustix::io::Result<Index> {
    advise_huge(memory, kind, 0, memory.len())?;
    let begin = Instant::now();
    memory.populate()?;
    let duration = begin.elapsed();
    let leaf = leaf(memory, kind, granule, 0, memory.len());
    Ok(Index { leaf, entries: memory.len() / leaf, duration })
}

impl Medium for MappedMedium {
    fn facts(&self) -> &MediumFacts {
        &self.facts
    }

    fn load(&self, offset: u64, buffer: &mut [u8]) {
        self.memory.load(offset, buffer);
    }

    fn load_word(&self, offset: u64) -> u64 {
        self.memory.load_word(offset)
    }

    fn store(&self, offset: u64, bytes: &[u8]) {
        self.memory.store(offset, bytes);
    }

    fn store_word(&self, offset: u64, value: u64) {
        self.memory.store_word(offset, value);
    }

    fn flush(&self, offset: u64, len: u64) {
        if let Durability::CacheLines(instruction) = self.facts.durability {
            self.memory.flush(instruction, offset, len);
        }
    }

    fn fence(&self) -> io::Result<()> {
        match self.facts.durability {
            Durability::CacheLines(_) => fence(),
            Durability::FileSync => fdatasync(&self.file)?,
            Durability::Volatile => {}
        }
        Ok(())
    }

    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        match self.facts.durability {
            // The file system marks the blocks as unwritten. The journal has that no later than the
            // next sync of the file.
            Durability::FileSync => {
                fallocate(
                    &self.file,
                    FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
                    offset,
                    len,
                )?;
            }
            Durability::CacheLines(instruction) => {
                self.memory.zero_if_needed(offset, len);
                // Zeros that another process stored may be in caches only.
                self.memory.flush(instruction, offset, len);
                fence();
            }
            Durability::Volatile => self.memory.zero_if_needed(offset, len),
        }
        Ok(())
    }

    fn current_size(&self) -> io::Result<u64> {
        let size = match &self.sysfs {
            Some(sysfs) => sysfs.size().map_err(io::Error::other)?,
            None => u64::try_from(fstat(self.file.as_fd())?.st_size).unwrap_or(0),
        };
        Ok(round_down(size, self.facts.granule))
    }

    fn descriptor(&self, access: Access) -> io::Result<OwnedFd> {
        // The lock is a read lock, so the description must be open for reading in both cases.
        let file = reopen(&self.file, access == Access::Write)?;
        mark_client(&file, CLIENT)?;
        Ok(file.into())
    }

    fn grant(&self, access: Access, offset: u64) -> io::Result<ExtentDescriptor> {
        let parts = self.parts.lock();
        let writable = access == Access::Write;
        let (file, begin, leaf) = match parts.get(&offset) {
            Some(Part { file: Some(file), leaf }) => (reopen(file, writable)?, 0, *leaf),
            _ => {
                let spare = self.spares.lock()[usize::from(writable)].take();
                let file = spare.map_or_else(|| reopen(&self.file, writable), Ok)?;
                (file, offset, self.facts.leaf())
            }
        };
        mark_client(&file, CLIENT)?;
        mark_client(&file, offset)?;
        Ok(ExtentDescriptor { descriptor: file.into(), offset: begin, leaf })
    }

    fn prepare_grants(&self) {
        for (spare, writable) in self.spares.lock().iter_mut().zip([false, true]) {
            if spare.is_none() {
                *spare = reopen(&self.file, writable).ok();
            }
        }
    }

    fn is_held(&self, offset: u64) -> bool {
        let parts = self.parts.lock();
        let file = parts.get(&offset).and_then(|part| part.file.as_ref()).unwrap_or(&self.file);
        // What is not known is held.
        !self.marks_last || has_clients(file, offset).unwrap_or(true)
    }

    fn separate(&self, offset: u64, len: u64) -> io::Result<()> {
        let Some(options) = self.memfd else { return Ok(()) };
        let file = options.create("firn-replica", len)?;
        let own = file.try_clone()?;
        // First, so that both together never take more than the medium.
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&self.file, hole, offset, len)?;
        self.parts.lock().insert(offset, Part { file: Some(file), leaf: self.facts.granule });
        self.memory.replace(offset, len, own, 0)?;
        self.populate(offset, len)?;
        let leaf = leaf(&self.memory, self.facts.kind, self.facts.granule, offset, len);
        if let Some(part) = self.parts.lock().get_mut(&offset) {
            part.leaf = leaf;
        }
        Ok(())
    }

    fn join(&self, offset: u64, len: u64) -> io::Result<bool> {
        // Its memory is free for the medium's once nothing refers to it.
        match self.parts.lock().get_mut(&offset) {
            Some(part) => {
                self.memory.vacate(offset, len)?;
                part.file = None;
            }
            None => return Ok(false),
        }
        self.memory.replace(offset, len, &self.file, offset)?;
        self.populate(offset, len)?;
        self.parts.lock().remove(&offset);
        Ok(true)
    }
}

#[cfg(test)]
#[path = "mapped_tests.rs"]
mod tests;
