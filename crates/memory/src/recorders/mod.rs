//! Recorders: what an invocation touches, found out while it runs.
//!
//! [`Recorder`] sees every first touch of a page and the first write to a page that was first read, in order, by
//! userfaultfd over anonymous memory: a page is missing until it is touched, is filled from the image then, and is
//! write-protected if it was only read. It sees the guest's touches (through KVM) and the monitor's alike.
//!
//! As the [pager](crate::pager) it fails closed: each page is compared with its digest before it enters, and what cannot be
//! served is told and ends the process that has the guest ([`OnLoss`]).
//!
//! Who touches, and through which leaf of the guest's page tables, this crate cannot know: a [`Witness`] says.
//!
//! A [`ProfileRecorder`] fills parts of a snapshot's [`Profile`](firn_snapshot::Profile) from one run. [`of`] makes the
//! recorders for a list of parts.

mod bpf;
mod cached;
mod groups;
mod kernel_types;
mod marks;
mod profile;
mod serve;
mod small_leaves;
mod touches;

pub use bpf::BpfError;
pub use cached::Cached;
pub use groups::Groups;
pub use profile::{ParsePartError, Part, ProfileRecordError, ProfileRecorder, of, planned};
pub use touches::Touches;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use firn_base::PAGE_SIZE;
use firn_base::num::usize_of;
use firn_snapshot::MemoryLayout;
use rustix::event::{EventfdFlags, eventfd};
use thiserror::Error;
use vm_memory::{Bytes, GuestAddress};

use crate::guest_memory::{AnonymousError, GuestMemory, GuestView};
use crate::pager::{OnLoss, PageStore, PagerError};
use crate::plan::Leaf;
use crate::trace::{Touch, Toucher};
use crate::uffd::{Features, Uffd, UffdError, Watch};
use serve::{PageState, Server};

/// Says who touches guest memory, and how. Called on the recorder's thread.
pub trait Witness: Send {
    /// Looks at who touches a page for the first time (or writes it for the first time). The page is not there yet,
    /// and the toucher waits for it; it is not to go on before [`Witness::release`].
    ///
    /// `page` is a guest page, `thread` the thread of this process that touches it, by its system-wide id; a touch
    /// through KVM comes from the vCPU's thread. Only pages in `seen` may be read: any other would wait for the recorder.
    fn look(&mut self, page: u64, thread: u32, seen: &Seen<'_>) -> Sighting;

    /// The page is there now: lets the toucher go on.
    fn release(&mut self);
}

/// What a witness saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sighting {
    /// Who touches.
    pub by: Toucher,
    /// Through which leaf of the guest's page tables; `None` where that is not known.
    pub leaf: Option<Leaf>,
    /// What the guest worked since the touch before.
    pub gap: u64,
}

/// The pages that were touched so far: they can be read without waiting.
#[derive(Debug)]
pub struct Seen<'a> {
    view: &'a GuestView,
    layout: &'a MemoryLayout,
    states: &'a [PageState],
}

impl Seen<'_> {
    /// Reads bytes at a guest-physical address, within one page; `None` where no page is, or it was not touched.
    #[must_use]
    pub fn read<const N: usize>(&self, address: u64) -> Option<[u8; N]> {
        let page = self.layout.image_offset(address)? / PAGE_SIZE;
        let end = (address % PAGE_SIZE).checked_add(N as u64)?;
        (end <= PAGE_SIZE && self.states[usize_of(page)].is_present()).then_some(())?;
        let mut bytes = [0; N];
        self.view.read_slice(&mut bytes, GuestAddress(address)).ok()?;
        Some(bytes)
    }
}

/// Why touches were not recorded.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RecordError {
    /// Guest memory could not be had.
    #[error(transparent)]
    Memory(#[from] AnonymousError),
    /// Its faults cannot be served.
    #[error(transparent)]
    Uffd(#[from] UffdError),
    /// The recorder's thread cannot be started.
    #[error("starting the recorder's thread")]
    Thread(#[source] std::io::Error),
    /// Waiting failed.
    #[error("waiting for touches of guest memory")]
    Wait(#[source] std::io::Error),
    /// A page is not what was frozen or cannot be read, or faults cannot be answered.
    #[error(transparent)]
    Serve(#[from] PagerError),
    /// The page tables cannot be asked what was written.
    #[error("finding out which pages of guest memory were written")]
    Written(#[source] std::io::Error),
}

/// The touches of one microVM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recording {
    /// In order. They satisfy [`Trace::new`](crate::trace::Trace::new).
    pub touches: Vec<Touch>,
    /// How many of them have a leaf that is not known; they count as 4 KiB.
    pub unknown_leaves: u64,
}

/// Serves the faults of one guest memory, and writes them down. One that is dropped and not finished serves on.
#[derive(Debug)]
pub struct Recorder {
    thread: JoinHandle<Result<Recording, PagerError>>,
    recording: Arc<AtomicBool>,
    stop: Arc<OwnedFd>,
}

impl Recorder {
    /// Guest memory with these contents, and the recorder of every touch of it. `on_loss` is what is done when it cannot go on.
    ///
    /// The vCPUs must fault in their own threads (no asynchronous page faults of KVM), and there may be only one:
    /// with more, others run on while a toucher waits, and the order of touches is another one.
    ///
    /// # Errors
    /// See [`RecordError`].
    pub fn start(
        store: PageStore,
        layout: &MemoryLayout,
        witness: Box<dyn Witness>,
        on_loss: OnLoss,
    ) -> Result<(GuestMemory, Self), RecordError> {
        Self::with(store, layout, witness, on_loss, Features::empty())
    }

    /// As [`start`](Self::start), but a write to a page that was read before is none of the touches, and nobody waits for it: what was
    /// written so is asked of the page tables.
    ///
    /// # Errors
    /// See [`RecordError`]: among them a kernel before Linux 6.7.
    fn of_first_touches(
        store: PageStore,
        layout: &MemoryLayout,
        witness: Box<dyn Witness>,
        on_loss: OnLoss,
    ) -> Result<(GuestMemory, Self), RecordError> {
        Self::with(store, layout, witness, on_loss, Features::WRITE_PROTECT_ASYNC)
    }

    fn with(
        store: PageStore,
        layout: &MemoryLayout,
        witness: Box<dyn Witness>,
        on_loss: OnLoss,
        more: Features,
    ) -> Result<(GuestMemory, Self), RecordError> {
        let memory = GuestMemory::anonymous(layout.clone())?;
        let features = Features::WRITE_PROTECT | Features::THREAD_ID | Features::REMOVE;
        let uffd = Uffd::open(features | more)?;
        memory.register(&uffd, Watch::MISSING | Watch::WRITE_PROTECT)?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let stop = eventfd(0, flags).map_err(|errno| RecordError::Wait(errno.into()))?;
        let (stop, recording) = (Arc::new(stop), Arc::new(AtomicBool::new(true)));
        let mut server =
            Server::new(uffd, &memory, store, witness, stop.clone(), recording.clone());
        let run = move || {
            server.serve().inspect_err(|error| {
                on_loss(error);
                server.poison();
            })
        };
        let thread = std::thread::Builder::new()
            .name("recorder".into())
            .spawn(run)
            .map_err(RecordError::Thread)?;
        Ok((memory, Self { thread, recording, stop }))
    }

    /// Writes no further touch down. Memory is served on.
    pub fn stop_recording(&self) {
        self.recording.store(false, Ordering::SeqCst);
    }

    /// Ends it, once nobody touches the memory any more, and returns what it wrote down.
    ///
    /// # Errors
    /// What ended it before.
    pub fn finish(self) -> Result<Recording, RecordError> {
        // Fails only when its counter is full: it has been told then.
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        Ok(self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?)
    }
}

#[cfg(test)]
mod tests;
