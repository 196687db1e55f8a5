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
use super::{
    FaultObserver, FaultOrigin, Part, ProfileRecordError, ProfileRecorder, RecordError, Recorder,
    Recording, TouchedPages,
};
use crate::guest_memory::GuestMemory;
use crate::pager::{PageStore, end_process};
use crate::trace::{Access, Touch, Toucher};
use crate::uffd::UffdError;

/// Records the parts `faults` and `writes`, or one of them.
#[derive(Debug)]
pub(crate) struct Touches {
    parts: Vec<Part>,
    running: Option<(Recorder, MemoryLayout)>,
    /// The snapshot's pages, for the search for page tables; the recorder has a store of its own.
    store: Option<PageStore>,
    /// Whether the kernel marks written pages, so that later writes are not recorded as touches.
    marks: bool,
    /// Guest memory, until the recording ends.
    memory: Option<Arc<GuestMemory>>,
    /// The marked pages at the end of the recording.
    marked: Option<io::Result<PageSet>>,
}

impl Touches {
    pub(super) fn new(parts: Vec<Part>) -> Self {
        Self { parts, running: None, store: None, marks: true, memory: None, marked: None }
    }
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

impl ProfileRecorder for Touches {
    fn parts(&self) -> Vec<Part> {
        self.parts.clone()
    }

    fn faults_in_vcpu_threads(&self) -> bool {
        true
    }

    fn memory(&mut self, snapshot: &Snapshot) -> Result<GuestMemory, ProfileRecordError> {
        let layout = &snapshot.manifest().layout;
        let recorded = Recorder::start_first_touches(
            PageStore::of(snapshot),
            layout,
            Box::new(Unattributed),
            end_process,
        );
        let (memory, recorder) = match recorded {
            Err(RecordError::Uffd(UffdError::Features { .. })) => {
                self.marks = false;
                Recorder::start(
                    PageStore::of(snapshot),
                    layout,
                    Box::new(Unattributed),
                    end_process,
                )
            }
            recorded => recorded,
        }?;
        self.running = Some((recorder, layout.clone()));
        if self.parts.contains(&Part::Faults) {
            self.store = Some(PageStore::of(snapshot));
        }
        Ok(memory)
    }

    /// Recording started with [`memory`](Self::memory): the monitor repeats its touches before the
    /// resume in every thaw.
    fn begin(&mut self, _: &Snapshot, memory: &Arc<GuestMemory>) -> Result<(), ProfileRecordError> {
        let reads_marks = self.marks && self.parts.contains(&Part::Writes);
        self.memory = reads_marks.then(|| memory.clone());
        Ok(())
    }

    fn end(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.marked = Some(marked(&memory));
        }
        if let Some((recorder, _)) = &self.running {
            recorder.stop_recording();
        }
    }

    fn finish(self: Box<Self>, profile: &mut Profile) -> Result<(), ProfileRecordError> {
        let Some((recorder, layout)) = self.running else { return Ok(()) };
        let Recording { touches, .. } = recorder.finish()?;
        if let Some(store) = self.store {
            let faults = in_order(&touches, &layout);
            let touched = PageSet::of(&faults, layout.pages());
            let small = small_leaves(&store, &layout, &touched).map_err(RecordError::from)?;
            profile.small_leaves = Some(small.to_ranges());
            profile.faults = Some(faults);
        }
        if self.parts.contains(&Part::Writes) {
            let marked = self.marked.transpose().map_err(RecordError::Written)?;
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
