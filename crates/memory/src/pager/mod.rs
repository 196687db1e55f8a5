//! The pager: fills missing pages of registered memory on a page fault, after checking each page.
//!
//! Memory that the pager serves is anonymous and registered with a userfaultfd. A thread waits for
//! its faults, reads the missing page from the image, checks it against its digest, and copies it
//! in. A page that is discarded (`MADV_DONTNEED`) reads as zeros from then on. The memory may
//! belong to this process, or to another process that passed its userfaultfd ([`firecracker`]).
//!
//! The pager fails closed. A damaged page, an image that shrank, or a failed system call is
//! reported and ends the process of the guest ([`OnFailure`]). A panic of the thread is handled in
//! the same way, in builds in which a panic does not abort the process. Until the process has
//! ended, missing pages stay missing and a thread that accesses one sleeps. Where [`OnFailure`]
//! returns, missing pages are poisoned and an access returns an error. The userfaultfd stays open
//! as long as the memory is mapped, because the kernel returns zeros for missing pages once it is
//! closed.

pub mod firecracker;
mod install;
mod policy;
mod serve;
mod store;

pub use policy::PagerPolicy;
pub(crate) use serve::{poison, wait};
pub use store::PageStore;

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use firn_base::PAGE_SIZE;
use firn_snapshot::{DigestError, PageSet};
use parking_lot::{Mutex, MutexGuard};
use rustix::event::{EventfdFlags, eventfd};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::uffd::{Uffd, UffdError};
use serve::Server;

/// Memory that a pager serves: whole pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Area {
    /// Its first address in the process that owns it.
    pub address: u64,
    /// Its length in bytes.
    pub len: u64,
    /// The offset of its first byte in the image, in bytes.
    pub image_offset: u64,
}

impl Area {
    fn addresses(&self) -> Range<u64> {
        self.address..self.address + self.len
    }

    fn image_pages(&self) -> Range<u64> {
        self.image_offset / PAGE_SIZE..(self.image_offset + self.len) / PAGE_SIZE
    }
}

/// Why a pager cannot continue. The guest that it serves must not run any more.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PagerError {
    /// Faults cannot be read or resolved.
    #[error(transparent)]
    Uffd(#[from] UffdError),
    /// A page is damaged, or cannot be checked.
    #[error(transparent)]
    Page(#[from] DigestError),
    /// The image or a packed file ends before a page that it must hold.
    #[error("page {image_page} of the image is missing: {file} shrank while it was in use")]
    Truncated {
        /// The image page.
        image_page: u64,
        /// The image, or the packed file.
        file: &'static str,
    },
    /// The image cannot be read.
    #[error("cannot read page {image_page} of the image")]
    Read {
        /// The image page.
        image_page: u64,
        /// The error of the read.
        source: std::io::Error,
    },
    /// A packed file cannot be read.
    #[error("cannot read {file}")]
    Packed {
        /// The file.
        file: String,
        /// The error of the read.
        source: std::io::Error,
    },
    /// Waiting for faults failed.
    #[error("cannot wait for faults of guest memory")]
    Wait(#[source] std::io::Error),
    /// A fault outside the served memory.
    #[error("page fault at {address:#x}, outside the memory that the pager serves")]
    OutsideMemory {
        /// The address.
        address: u64,
    },
    /// The thread panicked, with a message on standard error: a defect.
    #[error("the pager's thread panicked")]
    Panicked,
    /// The thread cannot be started.
    #[error("cannot start the pager's thread")]
    Thread(#[source] std::io::Error),
}

/// Called when a pager cannot continue: it must end the process of the guest, as [`end_process`]
/// does. If it returns, the pager poisons missing pages that are accessed.
pub type OnFailure = fn(&PagerError);

/// Ends this process with exit code 1 and an error on standard error. As with a kill, nothing is
/// cleaned up.
pub fn end_process(error: &PagerError) {
    use std::io::Write;
    let mut text = format!("firn: error: the microVM was ended: {error}");
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text.push('\n');
    // A failure cannot be reported anywhere else.
    let _ = std::io::stderr().write_all(text.as_bytes());
    std::process::exit(1);
}

/// The work of a pager so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PagerReport {
    /// Faults that were resolved one by one.
    pub faults: u64,
    /// Bytes that were copied from the image for faults.
    pub copied_bytes: u64,
    /// Discarded pages that were filled with zeros for faults.
    pub zero_pages: u64,
    /// Reads of packed files that bypassed the page cache (`O_DIRECT`).
    pub direct_reads: u64,
    /// Bytes read from packed files, with or without the page cache.
    pub packed_bytes: u64,
    /// Pages that were installed before their faults.
    pub installed_pages: u64,
    /// Calls that woke the threads that waited for any of them.
    pub install_wakes: u64,
}

#[derive(Debug, Default)]
struct Counters {
    faults: AtomicU64,
    copied_bytes: AtomicU64,
    zero_pages: AtomicU64,
    direct_reads: AtomicU64,
    packed_bytes: AtomicU64,
    installed_pages: AtomicU64,
    install_wakes: AtomicU64,
}

fn add(counter: &AtomicU64, number: u64) {
    counter.fetch_add(number, Ordering::Relaxed);
}

/// The state that a pager's thread and its owner share.
#[derive(Debug)]
struct Shared {
    uffd: Uffd,
    /// Ascending by image page.
    areas: Vec<Area>,
    store: PageStore,
    /// Image pages that were filled: a granule does not read them again.
    filled: Mutex<PageSet>,
    /// The largest number of pages that a fault fills.
    granule: AtomicU64,
    counters: Counters,
    failure: OnceLock<PagerError>,
}

impl Shared {
    fn filled(&self) -> MutexGuard<'_, PageSet> {
        self.filled.lock()
    }

    /// The parts of a range of image pages that are served memory, each with its address.
    fn parts(&self, pages: Range<u64>) -> impl Iterator<Item = (u64, Range<u64>)> + '_ {
        self.areas.iter().filter_map(move |area| {
            let here = area.image_pages();
            let part = pages.start.max(here.start)..pages.end.min(here.end);
            let address = area.address + part.start.saturating_sub(here.start) * PAGE_SIZE;
            (!part.is_empty()).then_some((address, part))
        })
    }
}

/// The memory and the policy of a pager.
#[derive(Debug)]
pub struct PagerJob {
    /// The userfaultfd with which the memory was registered for missing pages.
    pub uffd: Uffd,
    /// The memory.
    pub areas: Vec<Area>,
    /// The source of its pages.
    pub store: PageStore,
    /// The number of pages of the image.
    pub pages: u64,
    /// How faults are resolved.
    pub policy: PagerPolicy,
    /// Called when the pager cannot continue.
    pub on_failure: OnFailure,
}

/// A running pager. It ends when it is dropped; nothing may access the memory then.
#[derive(Debug)]
pub struct Pager {
    shared: Arc<Shared>,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Pager {
    /// Starts the thread that resolves faults.
    ///
    /// # Errors
    /// [`PagerError::Wait`], [`PagerError::Thread`].
    pub fn start(job: PagerJob) -> Result<Self, PagerError> {
        let PagerJob { uffd, mut areas, store, pages, policy, on_failure } = job;
        areas.sort_by_key(|area| area.image_offset);
        let shared = Arc::new(Shared {
            uffd,
            areas,
            store,
            filled: Mutex::new(PageSet::new(pages)),
            granule: AtomicU64::new(policy.granule()),
            counters: Counters::default(),
            failure: OnceLock::new(),
        });
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let stop = Arc::new(eventfd(0, flags).map_err(|errno| PagerError::Wait(errno.into()))?);
        let mut server = Server::new(shared.clone(), PageSet::new(pages), stop.clone());
        let run = move || {
            // After a panic the server only poisons, which does not use its counters.
            let served = catch_unwind(AssertUnwindSafe(|| server.serve()));
            if let Err(error) = served.unwrap_or(Err(PagerError::Panicked)) {
                on_failure(server.shared().failure.get_or_init(|| error));
                server.poison();
            }
        };
        let thread = std::thread::Builder::new()
            .name("pager".into())
            .spawn(run)
            .map_err(PagerError::Thread)?;
        Ok(Self { shared, stop, thread: Some(thread) })
    }

    /// The work so far.
    #[must_use]
    pub fn report(&self) -> PagerReport {
        let counters = &self.shared.counters;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        PagerReport {
            faults: read(&counters.faults),
            copied_bytes: read(&counters.copied_bytes),
            zero_pages: read(&counters.zero_pages),
            direct_reads: read(&counters.direct_reads),
            packed_bytes: read(&counters.packed_bytes),
            installed_pages: read(&counters.installed_pages),
            install_wakes: read(&counters.install_wakes),
        }
    }

    /// Sets the granule to the largest, 512 pages, before all memory is accessed.
    pub fn widen(&self) {
        self.shared.granule.store(PagerPolicy::MAX_GRANULE, Ordering::Relaxed);
    }

    /// Why the pager cannot continue, if it failed.
    #[must_use]
    pub fn failure(&self) -> Option<&PagerError> {
        self.shared.failure.get()
    }
}

impl Drop for Pager {
    fn drop(&mut self) {
        // Fails only when the counter is full, which means that the stop was already requested.
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // The thread reported its failure itself.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
