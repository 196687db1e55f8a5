//! The parts `faults` and `writes` of a profile: the pages that a run touched, in order, and the
//! pages that it wrote. `faults` includes which touched pages the guest maps by [small
//! leaves](super::small_leaves).
//!
//! Both come from one run with [`Recorder`]. userfaultfd reports a page when it is missing, which
//! is the order of REAP (FaaSnap, 2.5). A page that is read first is write-protected. The kernel
//! marks the first write to it in the page tables, for the guest, the kernel and the monitor alike,
//! and PAGEMAP_SCAN reads the marks at the end. Kernels before Linux 6.7 have neither: there each
//! such write is a fault of its own.

use std::io;
use std::sync::Arc;

use firn_base::{PAGE_SIZE, PageRange};
use firn_snapshot::{MemoryLayout, PageSet, Profile, Snapshot};

use super::marks::marked;
use super::small_leaves::small_leaves;
use super::{FaultObserver, FaultOrigin, Part, RecordError, Recorder, Recording, TouchedPages};
use crate::guest_memory::GuestMemory;
use crate::pager::{PageStore, end_process};
use crate::trace::{Access, Touch, Toucher};
use crate::uffd::UffdError;

/// Records the parts `faults` and `writes`, or one of them, in the process of the guest.
///
/// Guest memory is what [`start`](Self::start) returns. [`begin`](Self::begin) comes right before
/// the vCPUs run, [`end`](Self::end) after the response. Every fault must occur in the vCPU's own
/// thread: KVM's asynchronous page faults always request write access and would be recorded as
/// writes.
#[derive(Debug)]
pub struct Touches {
    parts: Vec<Part>,
    recorder: Recorder,
    layout: MemoryLayout,
    /// The snapshot's pages, for the search for page tables; the recorder has a store of its own.
    store: Option<PageStore>,
    /// Whether the kernel marks written pages, so that later writes are not recorded as touches.
    marks: bool,
    /// Guest memory, until the recording ends.
    memory: Option<Arc<GuestMemory>>,
    /// The marked pages at the end of the recording.
    marked: Option<io::Result<PageSet>>,
}

/// A profile does not contain the origin of a touch.
struct Unattributed;

impl FaultObserver for Unattributed {
    fn observe(&mut self, _: u64, _: u32, _: &TouchedPages<'_>) -> FaultOrigin {
        FaultOrigin { by: Toucher::Instruction, leaf: None, gap: 0 }
    }

    fn pause(&mut self, _: &TouchedPages<'_>) -> u64 {
        0
    }

    fn release(&mut self) {}
}

impl Touches {
    /// Returns guest memory with the contents of a snapshot, and the recorder of these of its
    /// parts: others are ignored.
    ///
    /// # Errors
    /// [`RecordError`].
    pub fn start(
        snapshot: &Snapshot,
        parts: Vec<Part>,
    ) -> Result<(GuestMemory, Self), RecordError> {
        let layout = &snapshot.manifest().layout;
        let store = || PageStore::of(snapshot);
        let observer = Box::new(Unattributed);
        let recorded = Recorder::start_first_touches(store(), layout, observer, end_process);
        let marks = !matches!(recorded, Err(RecordError::Uffd(UffdError::Features { .. })));
        let (memory, recorder) = if marks {
            recorded?
        } else {
            Recorder::start(store(), layout, Box::new(Unattributed), end_process)?
        };
        let store = parts.contains(&Part::Faults).then(store);
        let layout = layout.clone();
        let touches = Self { parts, recorder, layout, store, marks, memory: None, marked: None };
        Ok((memory, touches))
    }

    /// Called right before the vCPUs run. Recording started with [`start`](Self::start): the
    /// monitor repeats its touches before the resume in every thaw.
    pub fn begin(&mut self, memory: &Arc<GuestMemory>) {
        let reads_marks = self.marks && self.parts.contains(&Part::Writes);
        self.memory = reads_marks.then(|| memory.clone());
    }

    /// Ends the recorded part of the run: later touches are not part of the profile. It may be
    /// called while a vCPU waits. A failure is kept and returned by [`finish`](Self::finish).
    pub fn end(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.marked = Some(marked(&memory));
        }
        self.recorder.stop_recording();
    }

    /// Fills its parts of the profile. Nothing may access guest memory any more.
    ///
    /// # Errors
    /// [`RecordError`]; no part is filled.
    pub fn finish(self, profile: &mut Profile) -> Result<(), RecordError> {
        let Self { parts, recorder, layout, store, marked, .. } = self;
        let Recording { touches, .. } = recorder.finish()?;
        let marked = marked.transpose().map_err(RecordError::Written)?;
        if let Some(store) = store {
            let faults = in_order(&touches, &layout);
            let touched = PageSet::of(&faults, layout.pages());
            let small = small_leaves(&store, &layout, &touched)?;
            profile.small_leaves = Some(small.to_ranges());
            profile.faults = Some(faults);
        }
        if parts.contains(&Part::Writes) {
            profile.written = Some(written(&touches, marked, &layout));
        }
        Ok(())
    }
}

fn image_page(touch: &Touch, layout: &MemoryLayout) -> Option<u64> {
    layout.image_offset(touch.page * PAGE_SIZE).map(|offset| offset / PAGE_SIZE)
}

/// The first touches, in order. Adjacent pages that were touched in succession form one run.
fn in_order(touches: &[Touch], layout: &MemoryLayout) -> Vec<PageRange> {
    let mut runs: Vec<PageRange> = Vec::new();
    let first = touches.iter().filter(|touch| touch.access != Access::LaterWrite);
    for page in first.filter_map(|touch| image_page(touch, layout)) {
        match runs.last_mut() {
            Some(last) if last.range().end == page => last.pages += 1,
            _ => runs.push(PageRange { first: page, pages: 1 }),
        }
    }
    runs
}

/// The pages that were touched by a write, and the marked pages. The former include pages that were
/// discarded since.
fn written(touches: &[Touch], marked: Option<PageSet>, layout: &MemoryLayout) -> Vec<PageRange> {
    let mut set = marked.unwrap_or_else(|| PageSet::new(layout.pages()));
    let writes = touches.iter().filter(|touch| touch.access != Access::Read);
    writes.filter_map(|touch| image_page(touch, layout)).for_each(|page| set.insert(page));
    set.to_ranges()
}
