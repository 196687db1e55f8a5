//! The loader: reads pages into the page cache concurrently with the start of a microVM.
//!
//! FaaSnap's concurrent paging (4.2): the loader starts when the request arrives, and neither the
//! guest's start nor its response waits for the loader. A page that the guest touches before the
//! loader is read for the guest; all other pages are already in the page cache. One loader runs for
//! each file at a time, whatever the number of microVMs: it holds a lock on the file (`flock`). A
//! loader that runs later finds every page cached and reads nothing.
//!
//! A packed file is read in sequence, without copying ([`preload`]). Ranges of the image are
//! requested with `POSIX_FADV_WILLNEED`, which reads nothing beyond them and allows the device its
//! full queue depth. docs/concepts/loader.md has the measurement. Where a plan leaves the ranges to
//! a BPF program ([`Work::Prefetch`]), the loader reads the first page, which triggers the program.

use std::fs::File;
use std::io;
use std::thread::JoinHandle;
use std::time::Instant;

use firn_base::{fs_verity, now_ns, ns_since};
use rustix::fs::{Advice, FlockOperation, fadvise, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::executor::Sources;
use crate::page_cache::preload;
use crate::plan::{LoadFile, Plan, When, Work};
use crate::process::ProcessCounters;

/// Bytes of one request: the kernel limits a request to the read-ahead of the device, 128 KiB by
/// default.
const REQUEST: u64 = 128 << 10;

/// The work of a loader.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoaderReport {
    /// Time from the request to the start of the loader, ns.
    pub start_ns: u64,
    /// Whether the loader is done. Otherwise it is running or has failed, and `loaded`,
    /// `read_bytes` and `ns` have no meaning.
    pub done: bool,
    /// Whether this process loaded; otherwise another process held the lock.
    pub loaded: bool,
    /// The number of ranges that the plan loads.
    pub ranges: u64,
    /// The bytes of these ranges.
    pub bytes: u64,
    /// Bytes that the loader read from storage: those that were not in the page cache before. What
    /// a BPF program has the kernel read ([`Work::Prefetch`]) is not among them.
    pub read_bytes: u64,
    /// Time from the start of the loader to its last request, ns.
    pub ns: u64,
}

/// Why a file was not loaded.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The file's descriptor cannot be duplicated.
    #[error("cannot duplicate the descriptor of the {file} for the loader")]
    Open {
        /// The file.
        file: LoadFile,
        /// The error of the system call.
        source: io::Error,
    },
    /// The plan loads a packed file, but none is open.
    #[error("the plan loads a packed file, but none is open")]
    NoPackedFile,
    /// The plan loads the image file, but the image is in a pool.
    #[error("the plan loads an image file, but the image is in a pool")]
    NoImageFile,
    /// The file cannot be locked.
    #[error("cannot lock the file to load")]
    Lock(#[source] io::Error),
    /// A range cannot be read.
    #[error("cannot load {len} bytes at {offset:#x} of the {file}{}", damage(*protected))]
    Read {
        /// The file.
        file: LoadFile,
        /// Whether fs-verity protects it.
        protected: bool,
        /// First byte.
        offset: u64,
        /// Length in bytes.
        len: u64,
        /// The error of the read.
        source: io::Error,
    },
    /// The counters of the thread cannot be read.
    #[error("cannot read the counters of this thread")]
    Counters(#[source] io::Error),
    /// The thread cannot be started.
    #[error("cannot start the loader's thread")]
    Thread(#[source] io::Error),
}

fn damage(protected: bool) -> &'static str {
    if protected { ", in which fs-verity found damage, or whose device failed" } else { "" }
}

/// A running loader.
#[derive(Debug)]
pub struct Loader {
    begun: LoaderReport,
    thread: JoinHandle<Result<LoaderReport, LoadError>>,
}

impl Loader {
    /// Starts the loader of a plan on a thread of its own; returns `None` where the plan loads
    /// nothing. Start it as soon as the plan exists. `request_ns` is the time of the request, ns of
    /// CLOCK_MONOTONIC.
    ///
    /// # Errors
    ///
    /// [`LoadError`] when it cannot be started.
    pub fn start(
        plan: &Plan,
        sources: &Sources<'_>,
        request_ns: u64,
    ) -> Result<Option<Self>, LoadError> {
        let (mut ranges, mut prefetched) = (Vec::new(), Vec::new());
        let mut from = None;
        for step in plan.schedule.iter().filter(|step| step.when == When::AtRequest) {
            match step.work {
                // A plan loads from one file.
                Work::Load { file, offset, len } if *from.get_or_insert(file) == file => {
                    ranges.push((offset, len));
                }
                Work::Prefetch { image } => prefetched.push(image.len),
                _ => {}
            }
        }
        let Some(from) = from else { return Ok(None) };
        let file = sources.loaded(from).ok_or(match from {
            LoadFile::Image => LoadError::NoImageFile,
            LoadFile::Packed => LoadError::NoPackedFile,
        })?;
        let file = file.try_clone().map_err(|source| LoadError::Open { file: from, source })?;
        let begun = LoaderReport {
            start_ns: now_ns().saturating_sub(request_ns),
            ranges: (ranges.len() + prefetched.len()) as u64,
            bytes: ranges.iter().map(|(_, len)| len).chain(&prefetched).sum(),
            ..LoaderReport::default()
        };
        let thread = std::thread::Builder::new().name("loader".into());
        let run = move || load(from, &file, &ranges, begun);
        let thread = thread.spawn(run).map_err(LoadError::Thread)?;
        Ok(Some(Self { begun, thread }))
    }

    /// The start time and the ranges. The results are known when the loader is done.
    #[must_use]
    pub fn begun(&self) -> LoaderReport {
        self.begun
    }

    /// Whether the loader has ended, so that [`finish`](Self::finish) does not wait.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits for the end of the loader.
    ///
    /// # Errors
    ///
    /// [`LoadError`]. Pages that were not loaded are read on their page fault.
    pub fn finish(self) -> Result<LoaderReport, LoadError> {
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// Loads ranges (offset and length in bytes) of a file, in order, unless another process holds the
/// lock.
fn load(
    from: LoadFile,
    file: &File,
    ranges: &[(u64, u64)],
    begun: LoaderReport,
) -> Result<LoaderReport, LoadError> {
    let start = Instant::now();
    let mut report = LoaderReport { done: true, ..begun };
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => report.loaded = true,
        Err(Errno::WOULDBLOCK) => return Ok(report),
        Err(errno) => return Err(LoadError::Lock(errno.into())),
    }
    // The open file description, and with it a lock, lasts as long as the microVM.
    let _unlock = Unlock(file);
    let before = ProcessCounters::of_this_thread().map_err(LoadError::Counters)?;
    for &(offset, len) in ranges {
        let done = match from {
            LoadFile::Packed => preload(file, offset..offset.saturating_add(len)).map(drop),
            LoadFile::Image => request(file, offset, len),
        };
        done.map_err(|source| {
            let protected = matches!(fs_verity::measure(file), Ok(Some(_)));
            LoadError::Read { file: from, protected, offset, len, source }
        })?;
    }
    let after = ProcessCounters::of_this_thread().map_err(LoadError::Counters)?;
    report.read_bytes = after.read_bytes.saturating_sub(before.read_bytes);
    report.ns = ns_since(start);
    Ok(report)
}

/// Releases the lock of a file when dropped.
struct Unlock<'a>(&'a File);

impl Drop for Unlock<'_> {
    fn drop(&mut self) {
        // Fails for no lock that is held.
        let _ = flock(self.0, FlockOperation::Unlock);
    }
}

/// Requests a range from the kernel.
fn request(file: &File, offset: u64, len: u64) -> io::Result<()> {
    let end = offset.saturating_add(len);
    let mut at = offset;
    while at < end {
        let len = REQUEST.min(end - at);
        fadvise(file, at, std::num::NonZeroU64::new(len), Advice::WillNeed)?;
        at += len;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
