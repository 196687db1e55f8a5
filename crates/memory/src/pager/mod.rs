//! The pager: fills the missing pages of registered memory when they are touched, each checked first.
//!
//! Memory that a plan has served by the pager is anonymous and registered with a userfaultfd. A thread waits for its
//! faults, reads the page that is missing from the image, compares it with its digest, and copies it in. A page that is
//! given back (`MADV_DONTNEED`) is zeros from then on. The memory may be this process's, or another's that handed its
//! userfaultfd over ([`firecracker`]).
//!
//! It fails closed. A page that is not what was frozen, an image that shrank, a call that fails: each is told and ends the
//! process that has the guest ([`OnFailure`]). So is a panic of the thread, where a panic does not end its process at once, as
//! it does in a `firn` that is built for use; one that finds no memory always aborts. Until a process has ended, missing
//! pages stay missing, and whoever touches one sleeps; where [`OnFailure`] returns they are poisoned, and whoever touches one
//! gets an error. The userfaultfd stays open as long as the memory is mapped: the kernel gives zeros for missing pages once
//! it is closed.

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

/// Memory that a pager serves, in bytes: whole pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Area {
    /// Where it begins in the process that has it.
    pub address: u64,
    /// Its length.
    pub len: u64,
    /// Where the image holds its first byte.
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

/// Why a pager cannot go on. The guest that it serves must not run any more.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PagerError {
    /// Faults cannot be read or answered.
    #[error(transparent)]
    Uffd(#[from] UffdError),
    /// A page is not what was frozen, or cannot be compared.
    #[error(transparent)]
    Page(#[from] DigestError),
    /// The image or a packed file ends before a page that it has to hold.
    #[error(
        "page {image_page} of the image is not there any more: {file} shrank while it was in use"
    )]
    Truncated {
        /// The image page.
        image_page: u64,
        /// The image, or the packed file.
        file: &'static str,
    },
    /// The image cannot be read.
    #[error("reading page {image_page} of the image")]
    Read {
        /// The image page.
        image_page: u64,
        /// What the system said.
        source: std::io::Error,
    },
    /// A packed file cannot be read.
    #[error("reading {file}")]
    Packed {
        /// The file.
        file: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// Waiting failed.
    #[error("waiting for faults of guest memory")]
    Wait(#[source] std::io::Error),
    /// A fault elsewhere.
    #[error("a fault at {address:#x}, which is not memory that the pager serves")]
    Elsewhere {
        /// The address.
        address: u64,
    },
    /// The thread panicked, and said why on standard error: a defect.
    #[error("the pager's thread panicked")]
    Panicked,
    /// The thread cannot be started.
    #[error("starting the pager's thread")]
    Thread(#[source] std::io::Error),
}

/// What is done when a pager cannot go on: it has to end the process that has the guest, as [`end_process`] does. If it
/// returns, the pager poisons what is touched and missing.
pub type OnFailure = fn(&PagerError);

/// Ends this process with exit code 1, and says why on standard error. What it leaves is what a killed process leaves.
pub fn end_process(error: &PagerError) {
    use std::io::Write;
    let mut text = format!("firn: error: the microVM was ended: {error}");
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text.push('\n');
    // There is nobody else to tell.
    let _ = std::io::stderr().write_all(text.as_bytes());
    std::process::exit(1);
}

/// What a pager has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PagerReport {
    /// Faults that were answered one by one.
    pub faults: u64,
    /// Bytes that faults had copied in, from the image.
    pub copied_bytes: u64,
    /// Pages that faults had filled with zeros: those that were given back.
    pub zero_pages: u64,
    /// Reads of packed files that went past the page cache (`O_DIRECT`).
    pub direct_reads: u64,
    /// Bytes read of packed files, past the page cache or not.
    pub packed_bytes: u64,
    /// Pages that were installed ahead of their faults.
    pub installed_pages: u64,
    /// Calls that then woke whoever waited for any of them.
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

/// What a pager's thread and its owner share.
#[derive(Debug)]
struct Shared {
    uffd: Uffd,
    /// Ascending by image page.
    areas: Vec<Area>,
    store: PageStore,
    /// Image pages that were filled: a granule need not read them again.
    filled: Mutex<PageSet>,
    /// Pages that a fault brings at most.
    granule: AtomicU64,
    counters: Counters,
    failure: OnceLock<PagerError>,
}

impl Shared {
    fn filled(&self) -> MutexGuard<'_, PageSet> {
        self.filled.lock()
    }

    /// The parts of a range of image pages that are memory, each with its address.
    fn parts(&self, pages: Range<u64>) -> impl Iterator<Item = (u64, Range<u64>)> + '_ {
        self.areas.iter().filter_map(move |area| {
            let here = area.image_pages();
            let part = pages.start.max(here.start)..pages.end.min(here.end);
            let address = area.address + part.start.saturating_sub(here.start) * PAGE_SIZE;
            (!part.is_empty()).then_some((address, part))
        })
    }
}

/// What a pager is to serve, and how.
#[derive(Debug)]
pub struct PagerJob {
    /// With which the memory was registered for missing pages.
    pub uffd: Uffd,
    /// The memory.
    pub areas: Vec<Area>,
    /// Where its pages come from.
    pub store: PageStore,
    /// Pages of the image.
    pub pages: u64,
    /// How faults are answered.
    pub policy: PagerPolicy,
    /// What is done when it cannot go on.
    pub on_failure: OnFailure,
}

/// A running pager. When it is dropped, nobody touches the memory any more: it ends.
#[derive(Debug)]
pub struct Pager {
    shared: Arc<Shared>,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Pager {
    /// Starts the thread that answers faults.
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
            // After a panic it only poisons, for which what it has counted does not matter.
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

    /// What it has done so far.
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

    /// From now on a fault brings as many pages as one can, [`PagerPolicy::MOST`]: for who is about to touch all memory.
    pub fn widen(&self) {
        self.shared.granule.store(PagerPolicy::MOST, Ordering::Relaxed);
    }

    /// Why it cannot go on, where it cannot.
    #[must_use]
    pub fn failure(&self) -> Option<&PagerError> {
        self.shared.failure.get()
    }
}

impl Drop for Pager {
    fn drop(&mut self) {
        // Fails only when its counter is full: it has been told then.
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // What it died of was told by itself.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
