//! The parts `faults` and `writes` of a profile: what a run touched, in order, and what it wrote. With the first comes which of it the
//! guest maps by [small leaves](super::small_leaves).
//!
//! Both come from one run with [`Recorder`]. userfaultfd reports a page when it is missing: that is the order of REAP (FaaSnap,
//! 2.5). A page that is read first is write-protected; the kernel marks the first write to it in the page tables, whoever writes,
//! guest, kernel or monitor, and PAGEMAP_SCAN finds the marks in the end. Before Linux 6.7, which has neither, each such write
//! is a fault of its own.

use std::io;
use std::sync::Arc;

use firn_base::PAGE_SIZE;
use firn_snapshot::{MemoryLayout, PageSet, Profile, Run, Snapshot, pages_of, runs_of};

use super::marks::marked;
use super::small_leaves::small_leaves;
use super::{
    Part, ProfileRecordError, ProfileRecorder, RecordError, Recorder, Recording, Seen, Sighting,
    Witness,
};
use crate::guest_memory::GuestMemory;
use crate::pager::{PageStore, end_process};
use crate::trace::{Access, Touch, Toucher};
use crate::uffd::UffdError;

/// Records the parts `faults` and `writes`, or one of them.
#[derive(Debug)]
pub struct Touches {
    parts: Vec<Part>,
    running: Option<(Recorder, MemoryLayout)>,
    /// The snapshot, once more, where the guest's tables are to be looked for: the recorder has its own.
    store: Option<PageStore>,
    /// Whether the kernel marks what is written, so that no touch says it.
    marks: bool,
    /// Until the recording ends.
    memory: Option<Arc<GuestMemory>>,
    /// The marks when it ended.
    marked: Option<io::Result<PageSet>>,
}

impl Touches {
    pub(super) fn new(parts: Vec<Part>) -> Self {
        Self { parts, running: None, store: None, marks: true, memory: None, marked: None }
    }
}

/// A profile does not say who touched.
struct NoWitness;

impl Witness for NoWitness {
    fn look(&mut self, _: u64, _: u32, _: &Seen<'_>) -> Sighting {
        Sighting { by: Toucher::Instruction, leaf: None, gap: 0 }
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
        let recorded = Recorder::of_first_touches(
            PageStore::of(snapshot),
            layout,
            Box::new(NoWitness),
            end_process,
        );
        let (memory, recorder) = match recorded {
            Err(RecordError::Uffd(UffdError::Features { .. })) => {
                self.marks = false;
                Recorder::start(PageStore::of(snapshot), layout, Box::new(NoWitness), end_process)
            }
            recorded => recorded,
        }?;
        self.running = Some((recorder, layout.clone()));
        if self.parts.contains(&Part::Faults) {
            self.store = Some(PageStore::of(snapshot));
        }
        Ok(memory)
    }

    /// It records since there is memory: what the monitor touches before the resume, it touches in every thaw.
    fn begin(&mut self, _: &Snapshot, memory: &Arc<GuestMemory>) -> Result<(), ProfileRecordError> {
        let asked = self.marks && self.parts.contains(&Part::Writes);
        self.memory = asked.then(|| memory.clone());
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
            let touched = pages_of(&faults, layout.pages());
            let small = small_leaves(&store, &layout, &touched).map_err(RecordError::from)?;
            profile.small_leaves = Some(runs_of(&small));
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

/// First touches. Neighbours are one run where they were touched one after the other.
fn in_order(touches: &[Touch], layout: &MemoryLayout) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    let first = touches.iter().filter(|touch| touch.access != Access::LaterWrite);
    for page in first.filter_map(|touch| image_page(touch, layout)) {
        match runs.last_mut() {
            Some(last) if last.range().end == page => last.pages += 1,
            _ => runs.push(Run { first: page, pages: 1 }),
        }
    }
    runs
}

/// What was touched by a write, and what was marked. The first has pages, too, that were given back since.
fn written(touches: &[Touch], marked: Option<PageSet>, layout: &MemoryLayout) -> Vec<Run> {
    let mut set = marked.unwrap_or_else(|| PageSet::new(layout.pages()));
    let writes = touches.iter().filter(|touch| touch.access != Access::Read);
    writes.filter_map(|touch| image_page(touch, layout)).for_each(|page| set.insert(page));
    runs_of(&set)
}
