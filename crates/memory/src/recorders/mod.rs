//! Recorders: they record which pages an invocation touches while it runs.
//!
//! [`Recorder`] records every first touch of a page and the first write to a page that was read
//! first, in order. It uses userfaultfd over anonymous memory: a page is missing until it is
//! touched, is then filled from the image, and is write-protected if it was only read. Touches by
//! the guest (through KVM) and by the monitor are recorded alike. On request it also records a
//! sample of the accesses that follow ([`Recorder::start_sampled`]).
//!
//! Like the [pager](crate::pager), a recorder fails closed: each page is checked against its digest
//! before it is mapped, and a failure is reported and ends the process of the guest
//! ([`OnFailure`]).
//!
//! This crate cannot attribute a touch to an instruction, a page-table walk or a device: a
//! [`FaultObserver`] does.
//!
//! A [`ProfileRecorder`] fills parts of a snapshot's [`Profile`](firn_snapshot::Profile) from one
//! run. [`of`] returns the recorders for a list of parts.

mod again;
mod cached;
mod groups;
mod marks;
mod profile;
mod serve;
mod small_leaves;
mod touches;

use cached::Cached;
use groups::Groups;
pub use profile::{
    PageCacheRecorder, ParsePartError, Part, ProfileRecordError, ProfileRecorder, of,
};
pub use touches::Touches;

use std::num::NonZero;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use firn_base::PAGE_SIZE;
use firn_base::num::usize_of;
use firn_snapshot::MemoryLayout;
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use thiserror::Error;
use vm_memory::{Bytes, GuestAddress};

use crate::guest_memory::{AnonymousError, GuestMemory, GuestView};
use crate::pager::{OnFailure, PageStore, PagerError};
use crate::plan::Leaf;
use crate::trace::{Again, Touch, Toucher};
use crate::uffd::{Features, RegisterMode, Uffd, UffdError};
use again::Sampling;
use serve::{PageState, Server, serve};

/// Attributes touches of guest memory to their origin. Called on the recorder's thread.
pub trait FaultObserver: Send {
    /// Attributes the first touch of a page, or the first write to it. The page is still missing or
    /// protected, and the faulting thread waits; it must not continue before
    /// [`FaultObserver::release`].
    ///
    /// `page` is a guest page; `thread` is the system-wide id of the faulting thread of this
    /// process, which is the vCPU's thread for a touch through KVM. Only pages in `touched` may be
    /// read: reading any other page would wait for the recorder.
    fn observe(&mut self, page: u64, thread: u32, touched: &TouchedPages<'_>) -> FaultOrigin;

    /// Stops the guest until [`FaultObserver::release`], if it runs, and returns its work since the
    /// previous touch or call. Pages are read as in [`FaultObserver::observe`].
    fn pause(&mut self, touched: &TouchedPages<'_>) -> u64;

    /// The faulting thread, or the guest, may continue.
    fn release(&mut self);
}

/// The origin of a touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultOrigin {
    /// What touches the page.
    pub by: Toucher,
    /// The leaf of the guest's page tables; `None` where it is unknown.
    pub leaf: Option<Leaf>,
    /// The guest's work since the previous touch.
    pub gap: u64,
}

/// The pages that were touched so far, which can be read without a fault.
#[derive(Debug)]
pub struct TouchedPages<'a> {
    view: &'a GuestView,
    aside: Option<&'a GuestView>,
    layout: &'a MemoryLayout,
    states: &'a [PageState],
}

impl TouchedPages<'_> {
    /// Reads bytes at a guest-physical address, within one page; `None` where there is no memory,
    /// or the page was not touched.
    #[must_use]
    pub fn read<const N: usize>(&self, address: u64) -> Option<[u8; N]> {
        let page = self.layout.image_offset(address)? / PAGE_SIZE;
        let end = (address % PAGE_SIZE).checked_add(N as u64)?;
        let state = self.states[usize_of(page)];
        let view = if state.is_aside() { self.aside? } else { self.view };
        (end <= PAGE_SIZE && (state.is_present() || state.is_aside())).then_some(())?;
        let mut bytes = [0; N];
        view.read_slice(&mut bytes, GuestAddress(address)).ok()?;
        Some(bytes)
    }
}

/// Why touches were not recorded.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RecordError {
    /// Guest memory could not be mapped.
    #[error(transparent)]
    Memory(#[from] AnonymousError),
    /// Its faults cannot be resolved.
    #[error(transparent)]
    Uffd(#[from] UffdError),
    /// The recorder's thread cannot be started.
    #[error("cannot start the recorder's thread")]
    Thread(#[source] std::io::Error),
    /// Waiting failed.
    #[error("cannot wait for faults of guest memory")]
    Wait(#[source] std::io::Error),
    /// A page is damaged or cannot be read, or a fault cannot be resolved.
    #[error(transparent)]
    Serve(#[from] PagerError),
    /// The marks of written pages cannot be read.
    #[error("cannot read from the page tables which pages of guest memory were written")]
    Written(#[source] std::io::Error),
}

/// The touches of one microVM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recording {
    /// The touches, in order. They satisfy [`Trace::new`](crate::trace::Trace::new).
    pub touches: Vec<Touch>,
    /// The number of touches whose leaf is unknown; it is recorded as 4 KiB.
    pub unknown_leaves: u64,
    /// The accesses that were recorded again, from [`Recorder::start_sampled`].
    pub again: Option<Again>,
}

/// Resolves the faults of one guest memory and records them. A recorder that is dropped without
/// [`finish`](Self::finish) continues to resolve faults.
pub struct Recorder {
    thread: JoinHandle<Result<Recording, PagerError>>,
    server: Arc<Mutex<Server>>,
    recording: Arc<AtomicBool>,
    stop: Arc<OwnedFd>,
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recorder").field("recording", &self.recording).finish_non_exhaustive()
    }
}

impl Recorder {
    /// Returns guest memory with these contents, and the recorder of every touch of it.
    /// `on_failure` is called when the recorder cannot continue.
    ///
    /// There must be one vCPU, and it must fault in its own thread (no asynchronous page faults of
    /// KVM). With several vCPUs the others run while one waits, which changes the order of the
    /// touches.
    ///
    /// # Errors
    /// See [`RecordError`].
    pub fn start(
        store: PageStore,
        layout: &MemoryLayout,
        observer: Box<dyn FaultObserver>,
        on_failure: OnFailure,
    ) -> Result<(GuestMemory, Self), RecordError> {
        Self::start_with(store, layout, observer, on_failure, Features::empty(), None)
    }

    /// As [`start`](Self::start), and records accesses again: after each `period` of the guest's
    /// work, in the unit of the observer's gaps, the next access to every page is a fault.
    ///
    /// # Errors
    /// See [`RecordError`]; kernels before Linux 6.8 do not support it.
    pub fn start_sampled(
        store: PageStore,
        layout: &MemoryLayout,
        observer: Box<dyn FaultObserver>,
        on_failure: OnFailure,
        period: NonZero<u64>,
    ) -> Result<(GuestMemory, Self), RecordError> {
        Self::start_with(store, layout, observer, on_failure, Features::MOVE, Some(period))
    }

    /// As [`start`](Self::start), but a write to a page that was read before is not recorded and
    /// causes no fault: the kernel marks such pages in the page tables.
    ///
    /// # Errors
    /// See [`RecordError`]; kernels before Linux 6.7 do not support it.
    fn start_first_touches(
        store: PageStore,
        layout: &MemoryLayout,
        observer: Box<dyn FaultObserver>,
        on_failure: OnFailure,
    ) -> Result<(GuestMemory, Self), RecordError> {
        let features = Features::WRITE_PROTECT_ASYNC;
        Self::start_with(store, layout, observer, on_failure, features, None)
    }

    fn start_with(
        store: PageStore,
        layout: &MemoryLayout,
        observer: Box<dyn FaultObserver>,
        on_failure: OnFailure,
        more: Features,
        period: Option<NonZero<u64>>,
    ) -> Result<(GuestMemory, Self), RecordError> {
        let memory = GuestMemory::anonymous(layout.clone())?;
        let features = Features::WRITE_PROTECT | Features::THREAD_ID | Features::REMOVE;
        let uffd = Uffd::open(features | more)?;
        memory.register(&uffd, RegisterMode::MISSING | RegisterMode::WRITE_PROTECT)?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let stop = eventfd(0, flags).map_err(|errno| RecordError::Wait(errno.into()))?;
        let (stop, recording) = (Arc::new(stop), Arc::new(AtomicBool::new(true)));
        let sampling = period.map(|period| Sampling::new(period, layout, &uffd)).transpose()?;
        let active = recording.clone();
        let server = Server::new(Arc::new(uffd), &memory, store, observer, active, sampling);
        let server = Arc::new(Mutex::new(server));
        let (serving, stopping) = (server.clone(), stop.clone());
        let thread = std::thread::Builder::new()
            .name("recorder".into())
            .spawn(move || serve(&serving, &stopping, on_failure))
            .map_err(RecordError::Thread)?;
        Ok((memory, Self { thread, server, recording, stop }))
    }

    /// The request begins with the next access of the guest.
    pub fn start_request(&self) {
        self.server.lock().start_request();
    }

    /// The first invocation has ended, and the accesses from now on are those of the second one.
    /// Each page's next access is recorded.
    ///
    /// # Errors
    /// [`RecordError::Serve`].
    pub fn start_second(&self) -> Result<(), RecordError> {
        Ok(self.server.lock().start_second()?)
    }

    /// Stops recording. Faults are still resolved.
    pub fn stop_recording(&self) {
        self.recording.store(false, Ordering::SeqCst);
    }

    /// Ends the recorder and returns its recording. Nothing may access the memory any more.
    ///
    /// # Errors
    /// The failure that ended the recorder before.
    pub fn finish(self) -> Result<Recording, RecordError> {
        // Fails only when the counter is full, which means that the stop was already requested.
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        Ok(self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?)
    }
}

#[cfg(test)]
mod tests;
