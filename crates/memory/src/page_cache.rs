//! The page cache of a file: residency, preload and eviction.
//!
//! All functions are for regular files. Functions that look for stored data move the file position.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use firn_base::PAGE_SIZE;
use firn_base::num::usize_of;
use firn_snapshot::PageSet;
use rustix::fs::{Advice, SeekFrom, fadvise, fdatasync, seek, sendfile};
use rustix::io::Errno;
use serde::Serialize;

use crate::map;
use crate::own_files::OwnFiles;

/// Bytes that one call of mincore examines.
const WINDOW: u64 = 256 << 20;
/// Bytes of one request of a preload.
const READ: u64 = 1 << 20;
/// The number of attempts to evict a file.
const EVICTIONS: u32 = 10;

/// The number of pages of a file that are in the page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Residency {
    /// Examined pages.
    pub pages: u64,
    /// Examined pages that are cached.
    pub cached: u64,
}

impl Residency {
    /// Whether no page is cached.
    pub fn is_cold(&self) -> bool {
        self.cached == 0
    }

    /// Whether every page is cached.
    pub fn is_cached(&self) -> bool {
        self.cached == self.pages
    }
}

/// The number of a file's pages, including holes, that are in the page cache (`mincore(2)`). No
/// page is touched.
///
/// The kernel only reports the residency to the file's owner, to root and to processes that may
/// write to the file; to others it reports every page as cached.
///
/// # Errors
///
/// The error of `fstat`, `mmap` or `mincore`.
pub fn residency(file: &File) -> io::Result<Residency> {
    count(file, 0..file.metadata()?.len())
}

/// As [`residency`], without holes.
///
/// # Errors
///
/// The error of `fstat`, `lseek`, `mmap` or `mincore`.
pub fn stored_residency(file: &File) -> io::Result<Residency> {
    let mut sum = Residency::default();
    for_each_stored(file, 0..file.metadata()?.len(), |stored| {
        let part = count(file, stored)?;
        sum.pages += part.pages;
        sum.cached += part.cached;
        Ok(())
    })?;
    Ok(sum)
}

/// The cached pages among the first `pages` pages of a file, including holes (`mincore(2)`). No
/// page is touched; see [`residency`] for the required permissions.
///
/// # Errors
///
/// The error of `mmap` or `mincore`.
pub fn cached(file: &File, pages: u64) -> io::Result<PageSet> {
    let mut set = PageSet::new(pages);
    let mut at = 0;
    while at < pages {
        let len = (WINDOW / PAGE_SIZE).min(pages - at);
        let states = map::cached_pages(file, at * PAGE_SIZE, len * PAGE_SIZE)?;
        let mut page = at;
        for run in states.chunk_by(|a, b| a == b) {
            let end = page + run.len() as u64;
            if run[0] {
                set.insert_range(page..end);
            }
            page = end;
        }
        at += len;
    }
    Ok(set)
}

/// Reads the stored data of a range (in bytes, whole pages) into the page cache, and returns its
/// length in bytes.
///
/// It sends the file to /dev/null (`sendfile(2)`): like a read, this waits until each page is
/// cached, while readahead(2) and posix_fadvise(2) only request it. No page is copied, and a page
/// that is already cached costs almost nothing.
///
/// # Errors
///
/// The error of opening /dev/null, `lseek` or `sendfile`; [`io::ErrorKind::UnexpectedEof`] for a
/// range beyond the end of the file.
pub fn preload(file: &File, range: Range<u64>) -> io::Result<u64> {
    let nowhere = OwnFiles::of_process().nowhere()?;
    let mut read = 0;
    for_each_stored(file, range, |stored| {
        let mut at = stored.start;
        while at < stored.end {
            let len = usize_of(READ.min(stored.end - at));
            if sendfile(nowhere, file, Some(&mut at), len)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        read += stored.end - stored.start;
        Ok(())
    })?;
    Ok(read)
}

/// As [`preload`] for all stored data, in reads of one page without read-ahead: a file that was not
/// cached is then cached in folios of 4 KiB. Otherwise a file system with large folios reads ahead
/// in larger folios, which a host may map by larger leaves. It takes one request to storage for
/// each page.
///
/// # Errors
///
/// The error of `fstat`, `lseek`, `posix_fadvise` or `pread`.
pub fn preload_small(file: &File) -> io::Result<u64> {
    let len = file.metadata()?.len();
    let mut page = vec![0; usize_of(PAGE_SIZE)];
    let mut read = 0;
    fadvise(file, 0, None, Advice::Random)?;
    let result = for_each_stored(file, 0..len, |stored| {
        for at in stored.step_by(usize_of(PAGE_SIZE)) {
            let rest = &mut page[..usize_of(PAGE_SIZE.min(len - at))];
            file.read_exact_at(rest, at)?;
            read += rest.len() as u64;
        }
        Ok(())
    });
    fadvise(file, 0, None, Advice::Normal)?;
    result.map(|()| read)
}

/// Copies the stored data of a file through a buffer once, and returns its length in bytes. Unlike
/// [`preload`] it touches every page with the processor: where this host is a virtual machine, the
/// first touch of a page that a disk has written may cost a page fault of the machine below.
///
/// # Errors
///
/// The error of `fstat`, `lseek` or `pread`.
pub fn touch(file: &File) -> io::Result<u64> {
    let len = file.metadata()?.len();
    let mut buffer = vec![0; usize_of(READ)];
    let mut read = 0;
    for_each_stored(file, 0..len, |stored| {
        for at in stored.clone().step_by(buffer.len()) {
            let part = &mut buffer[..usize_of(READ.min(stored.end.min(len) - at))];
            file.read_exact_at(part, at)?;
            read += part.len() as u64;
        }
        Ok(())
    })?;
    Ok(read)
}

/// Evicts a file's pages from the page cache, and returns the remaining residency: pages that a
/// process maps stay. A page that a processor is adding to the kernel's lists, or that the kernel
/// has removed from them to reclaim it, stays, too; so the eviction is retried for up to a second.
///
/// # Errors
///
/// The error of `fdatasync`, `posix_fadvise`, or [`residency`].
pub fn evict(file: &File) -> io::Result<Residency> {
    // Dirty pages cannot be evicted.
    fdatasync(file)?;
    for attempt in 0..EVICTIONS {
        fadvise(file, 0, None, Advice::DontNeed)?;
        let left = residency(file)?;
        if left.is_cold() {
            return Ok(left);
        }
        std::thread::sleep(Duration::from_millis(1 << attempt));
    }
    residency(file)
}

/// Residency of a range that starts at a page.
fn count(file: &File, range: Range<u64>) -> io::Result<Residency> {
    let mut sum = Residency::default();
    let mut at = range.start;
    while at < range.end {
        let len = WINDOW.min(range.end - at);
        let pages = map::cached_pages(file, at, len)?;
        sum.pages += pages.len() as u64;
        sum.cached += pages.into_iter().filter(|&cached| cached).count() as u64;
        at += len;
    }
    Ok(sum)
}

/// Calls `each` for the stored parts of a range of a file, in ascending order, extended to whole
/// pages within the range.
pub(crate) fn for_each_stored(
    file: &File,
    range: Range<u64>,
    mut each: impl FnMut(Range<u64>) -> io::Result<()>,
) -> io::Result<()> {
    let mut at = range.start;
    while at < range.end {
        let start = match seek(file, SeekFrom::Data(at)) {
            Ok(start) if start < range.end => start,
            Ok(_) | Err(Errno::NXIO) => break,
            Err(e) => return Err(e.into()),
        };
        let stop = seek(file, SeekFrom::Hole(start))?;
        let start = (start - start % PAGE_SIZE).max(at);
        at = stop.next_multiple_of(PAGE_SIZE).min(range.end);
        each(start..at)?;
    }
    Ok(())
}

#[cfg(test)]
#[path = "page_cache_tests.rs"]
mod tests;
