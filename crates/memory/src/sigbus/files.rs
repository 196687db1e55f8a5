//! The files that guest memory is mapped from, by their inodes: a jailed process reaches no file by
//! its path.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

/// The number of files that are known at once. Of others a report has the path alone.
const MAX_FILES: usize = 16;

/// A file; the inode is 0 in a free entry.
#[derive(Debug)]
struct Entry {
    inode: AtomicU64,
    /// -1 while the entry is free or being written.
    descriptor: AtomicI32,
}

static ENTRIES: [Entry; MAX_FILES] =
    [const { Entry { inode: AtomicU64::new(0), descriptor: AtomicI32::new(-1) } }; MAX_FILES];

/// A file that reports know until this is dropped, and open until then.
#[derive(Debug)]
pub(crate) struct KnownFile {
    entry: Option<&'static Entry>,
    _file: File,
}

impl KnownFile {
    /// # Errors
    /// The file cannot be duplicated or examined.
    pub(crate) fn new(file: &File) -> io::Result<Self> {
        let file = file.try_clone()?;
        let inode = file.metadata()?.ino();
        let entry = ENTRIES.iter().find(|entry| {
            entry.inode.compare_exchange(0, inode, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        });
        if let Some(entry) = entry {
            entry.descriptor.store(file.as_raw_fd(), Ordering::Release);
        }
        Ok(Self { entry, _file: file })
    }
}

impl Drop for KnownFile {
    fn drop(&mut self) {
        if let Some(entry) = self.entry {
            entry.descriptor.store(-1, Ordering::Release);
            entry.inode.store(0, Ordering::Release);
        }
    }
}

/// Calls `examine` with the known file of an inode. Async-signal-safe if `examine` is.
pub(super) fn with<T>(inode: u64, examine: impl FnOnce(BorrowedFd<'_>) -> T) -> Option<T> {
    let mut entries = ENTRIES.iter();
    let entry = entries.find(|entry| entry.inode.load(Ordering::Acquire) == inode)?;
    let descriptor = entry.descriptor.load(Ordering::Acquire);
    if descriptor < 0 {
        return None;
    }
    // SAFETY: guest memory keeps its files open, and ends after all threads that look for its lost
    // bytes.
    Some(examine(unsafe { BorrowedFd::borrow_raw(descriptor) }))
}
