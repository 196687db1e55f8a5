//! The parts `faults` and `writes` of a profile: what a run touched, in order, and what it wrote.
//!
//! Both come from one run with [`Recorder`]: userfaultfd reports a page when it is missing, and, write-protected after it was
//! read, once more when it is first written. So the order is that of REAP (FaaSnap, 2.5), and the write set is exact, whoever
//! writes: guest, kernel or monitor. The other ways know less. KVM's dirty log has the guest's writes alone, which leaves
//! the monitor's to be written down by every device; a private mapping's page that is no file's any more may have been copied for a
//! read, because KVM's asynchronous page faults always ask for a writable page; PAGEMAP_SCAN is exact but needs Linux 6.7 and a
//! run of its own.

use std::sync::Arc;

use firn_snapshot::{MemoryLayout, PAGE_SIZE, PageSet, Profile, Run, Snapshot, runs_of};

use super::{
    Content, Part, ProfileRecordError, ProfileRecorder, Recorder, Recording, Seen, Sighting,
    Witness,
};
use crate::guest_memory::GuestMemory;
use crate::trace::{Access, Touch, Toucher};

/// Records the parts `faults` and `writes`, or one of them.
#[derive(Debug)]
pub struct Touches {
    parts: Vec<Part>,
    running: Option<(Recorder, MemoryLayout)>,
}

impl Touches {
    pub(super) fn new(parts: Vec<Part>) -> Self {
        Self { parts, running: None }
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
        let content = Content::of(snapshot)?;
        let (memory, recorder) = Recorder::start(content, layout, Box::new(NoWitness))?;
        self.running = Some((recorder, layout.clone()));
        Ok(memory)
    }

    /// It records since there is memory: what the monitor touches before the resume, it touches in every thaw.
    fn begin(&mut self, _: &Snapshot, _: &Arc<GuestMemory>) -> Result<(), ProfileRecordError> {
        Ok(())
    }

    fn end(&mut self) {
        if let Some((recorder, _)) = &self.running {
            recorder.stop_recording();
        }
    }

    fn finish(self: Box<Self>, profile: &mut Profile) -> Result<(), ProfileRecordError> {
        let Some((recorder, layout)) = self.running else { return Ok(()) };
        let Recording { touches, .. } = recorder.finish()?;
        if self.parts.contains(&Part::Faults) {
            profile.faults = Some(in_order(&touches, &layout));
        }
        if self.parts.contains(&Part::Writes) {
            profile.written = Some(written(&touches, &layout));
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

fn written(touches: &[Touch], layout: &MemoryLayout) -> Vec<Run> {
    let mut set = PageSet::new(layout.pages());
    let writes = touches.iter().filter(|touch| touch.access != Access::Read);
    writes.filter_map(|touch| image_page(touch, layout)).for_each(|page| set.insert(page));
    runs_of(&set)
}
