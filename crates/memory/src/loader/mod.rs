//! The loader: has the kernel read pages into the page cache while everything else goes on.
//!
//! FaaSnap's concurrent paging (4.2): the loader begins when the request arrives, and neither the guest's start nor its
//! answer waits for its end. A page that the guest touches first is read for the guest; all others are found in the page
//! cache. However many microVMs of a snapshot start at the same time, one loads: who holds a lock on the file (`flock`). Who
//! comes when all is loaded finds every page cached and reads nothing.
//!
//! A packed file is read in sequence, without copying ([`preload`]). Ranges of the image are asked for by `POSIX_FADV_WILLNEED`, which reads
//! nothing beyond them and lets the device have as many requests at once as it takes. docs/concepts/loader.md has the measurement.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::thread::JoinHandle;
use std::time::Instant;

use firn_base::{now_ns, ns_since};
use rustix::fs::{Advice, FlockOperation, fadvise, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::executor::Sources;
use crate::page_cache::preload;
use crate::plan::{LoadFile, Plan, When, Work};
use crate::process::{ProcessCounters, ProcessCountersError};

/// Bytes of one request: the kernel cuts what is asked for at once to the read-ahead of the device, 128 KiB by
/// default.
const REQUEST: u64 = 128 << 10;

/// What a loader did, or is to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoaderReport {
    /// From the request to its start, ns: what had to come first.
    pub start_ns: u64,
    /// Whether it got to its end. It has not while it is at work, nor where it failed: then `loaded`, `read_bytes` and `ns` say nothing.
    pub done: bool,
    /// Whether this process loaded; otherwise another one was at it.
    pub loaded: bool,
    /// Ranges that the plan has it load.
    pub ranges: u64,
    /// Bytes of these.
    pub bytes: u64,
    /// Bytes that it made storage read: what was not in the page cache before.
    pub read_bytes: u64,
    /// From its start to its last request, ns.
    pub ns: u64,
}

/// Why a file was not loaded.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The file cannot be opened a second time, for a lock of its own.
    #[error("opening the {file} for the loader; is /proc mounted?")]
    Open {
        /// The file.
        file: LoadFile,
        /// What the kernel said.
        source: io::Error,
    },
    /// The plan loads a packed file, and there is none.
    #[error("the plan loads a packed file, and none was opened")]
    NoPackedFile,
    /// The plan loads the image file, and the image is in a pool.
    #[error("the plan loads an image file, but the image is in a pool")]
    NoImageFile,
    /// The lock cannot be had.
    #[error("locking the file to load")]
    Lock(#[source] io::Error),
    /// The kernel reads nothing.
    #[error("loading {len} bytes at {offset:#x}")]
    Read {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        len: u64,
        /// What the kernel said.
        source: io::Error,
    },
    /// The counters of the thread cannot be read.
    #[error(transparent)]
    Counters(#[from] ProcessCountersError),
    /// No thread.
    #[error("starting the loader's thread")]
    Thread(#[source] io::Error),
}

/// A loader at work.
#[derive(Debug)]
pub struct Loader {
    begun: LoaderReport,
    thread: JoinHandle<Result<LoaderReport, LoadError>>,
}

impl Loader {
    /// Starts the loader of a plan on a thread of its own; `None` where the plan has it load nothing. The best time is as soon
    /// as there is a plan: it needs nothing else. `request_ns` is when the request came in, ns of CLOCK_MONOTONIC.
    ///
    /// # Errors
    ///
    /// [`LoadError`] when it cannot be started.
    pub fn start(
        plan: &Plan,
        sources: &Sources<'_>,
        request_ns: u64,
    ) -> Result<Option<Self>, LoadError> {
        let mut ranges = Vec::new();
        let mut from = None;
        for step in plan.schedule.iter().filter(|step| step.when == When::AtRequest) {
            if let Work::Load { file, offset, len } = step.work {
                // Plans load from one file.
                if *from.get_or_insert(file) == file {
                    ranges.push((offset, len));
                }
            }
        }
        let Some(from) = from else { return Ok(None) };
        let file = match from {
            LoadFile::Image => sources.image.file().ok_or(LoadError::NoImageFile)?,
            LoadFile::Packed => sources.packed().ok_or(LoadError::NoPackedFile)?.file(),
        };
        // A lock is of an opening, and so is the state of read-ahead: neither is to be the snapshot's.
        let file = File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
            .map_err(|source| LoadError::Open { file: from, source })?;
        let begun = LoaderReport {
            start_ns: now_ns().saturating_sub(request_ns),
            ranges: ranges.len() as u64,
            bytes: ranges.iter().map(|(_, len)| len).sum(),
            ..LoaderReport::default()
        };
        let thread = std::thread::Builder::new().name("loader".into());
        let run = move || load(from, &file, &ranges, begun);
        let thread = thread.spawn(run).map_err(LoadError::Thread)?;
        Ok(Some(Self { begun, thread }))
    }

    /// When it began, and what it is to load. What it does is known when it has ended.
    #[must_use]
    pub fn begun(&self) -> LoaderReport {
        self.begun
    }

    /// Whether it has ended: [`finish`](Self::finish) does not wait then.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits for its end.
    ///
    /// # Errors
    ///
    /// [`LoadError`]. Pages that were not loaded are read when they are touched.
    pub fn finish(self) -> Result<LoaderReport, LoadError> {
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// Loads ranges (bytes: offset and length) of a file, in order, unless somebody else does.
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
    let before = ProcessCounters::of_this_thread()?;
    for &(offset, len) in ranges {
        let done = match from {
            LoadFile::Packed => preload(file, offset..offset.saturating_add(len)).map(drop),
            LoadFile::Image => request(file, offset, len),
        };
        done.map_err(|source| LoadError::Read { offset, len, source })?;
    }
    let after = ProcessCounters::of_this_thread()?;
    report.read_bytes = after.read_bytes.saturating_sub(before.read_bytes);
    report.ns = ns_since(start);
    Ok(report)
}

/// Has the kernel read a range.
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
