//! A file that is written with holes.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use firn_base::begin_writeback;
use rustix::fs::fstatvfs;

use crate::freeze_error::FreezeError;

/// A file that is written in runs, with holes between them, by several threads.
///
/// After the file system is full it only counts bytes, so that the error can report the total size.
#[derive(Debug)]
pub(crate) struct SparseFile {
    pub(crate) file: File,
    /// For errors.
    pub(crate) path: PathBuf,
    pub(crate) needed: AtomicU64,
    pub(crate) full: AtomicBool,
}

impl SparseFile {
    /// Takes an empty file and gives it its length, without data.
    pub(crate) fn new(file: File, path: impl Into<PathBuf>, len: u64) -> Result<Self, FreezeError> {
        let path = path.into();
        file.set_len(len).map_err(|source| FreezeError::Io {
            path: path.clone(),
            action: "extend",
            source,
        })?;
        Ok(Self { file, path, needed: AtomicU64::new(0), full: AtomicBool::new(false) })
    }

    /// Writes `bytes` at `offset`.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), FreezeError> {
        let len = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        self.needed.fetch_add(len, Ordering::Relaxed);
        if self.full.load(Ordering::Relaxed) {
            return Ok(());
        }
        match self.file.write_all_at(bytes, offset) {
            Err(error) if is_full(&error) => self.full.store(true, Ordering::Relaxed),
            Err(source) => return Err(self.io_error("write", source)),
            Ok(()) => {}
        }
        Ok(())
    }

    /// Starts to write a part of the file to storage, so that the sync at the end takes less time.
    pub(crate) fn begin_writeback(&self, offset: u64, len: u64) {
        begin_writeback(&self.file, offset..offset.saturating_add(len));
    }

    /// Closes the file and returns the bytes that were written, without holes. It returns an error
    /// if the file system was full.
    pub(crate) fn finish(self) -> Result<u64, FreezeError> {
        let needed = self.needed.into_inner();
        if self.full.into_inner() {
            return Err(no_space(&self.file, self.path, needed));
        }
        Ok(needed)
    }

    fn io_error(&self, action: &'static str, source: io::Error) -> FreezeError {
        FreezeError::Io { path: self.path.clone(), action, source }
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// The space that was available for `file` is the free space plus what the file itself occupies.
fn no_space(file: &File, path: PathBuf, needed: u64) -> FreezeError {
    let free = fstatvfs(file).map_or(0, |stat| stat.f_bavail.saturating_mul(stat.f_frsize));
    let taken = file.metadata().map_or(0, |metadata| metadata.blocks() * 512);
    FreezeError::NoSpace { path, needed, available: free.saturating_add(taken) }
}
