//! `faast`: as REAP, and the guest's free memory is zeros.
//!
//! Faast (SnapBPF 2.1) "relies on the allocator metadata of the VM kernel to identify pages that are not actively used in
//! the snapshot and routes faults for these pages to anonymous memory": the guest overwrites them before it reads them, so
//! what the image holds of them is never read. The set is the profile's part `free`, found by a walk of the guest's own
//! allocator in the snapshot. Free pages are in no working-set file, and a fault on one is answered with a page of zeros
//! (`UFFDIO_ZEROPAGE`).

use firn_snapshot::{PAGE_SIZE, PackedFile, Run, pages_of};

use super::packing::{Packing, recipe};
use super::reap::{faults, merged, plan};
use super::{PlanInput, Planner, PlannerError};
use crate::pager::PagerPolicy;
use crate::plan::{GuestRange, Plan, Segment, Source};

/// The planner `faast`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Faast {
    /// How faults outside of the working set are served (`granule=1|4|16|64|512`, 1 by default).
    pub policy: PagerPolicy,
}

impl Faast {
    fn free<'a>(&self, input: &PlanInput<'a>) -> Result<&'a [Run], PlannerError> {
        let free = input.profile.and_then(|profile| profile.free.as_deref());
        free.ok_or_else(|| PlannerError::NoProfile {
            planner: self.name(),
            part: "the guest's free pages",
            option: "free",
        })
    }
}

impl Planner for Faast {
    fn name(&self) -> String {
        format!("faast:granule={}", self.policy.granule())
    }

    fn uses_profile(&self) -> bool {
        true
    }

    /// As [`Reap`](super::Reap)'s, with a segment of zeros for each run of free pages.
    fn plan(&self, input: &PlanInput<'_>) -> Result<Plan, PlannerError> {
        let free = self.free(input)?;
        let mut plan = plan(input, self, self.policy)?;
        let free = pages_of(free, input.layout.pages());
        plan.segments = input
            .layout
            .regions()
            .zip(plan.segments)
            .flat_map(|(region, whole)| {
                let segment = |span: firn_snapshot::Span| {
                    let offset = span.pages.start * PAGE_SIZE;
                    let start = region.guest_addr + (offset - region.image_offset);
                    let len = (span.pages.end - span.pages.start) * PAGE_SIZE;
                    let source =
                        if span.set { Source::PagerZero } else { Source::Pager { offset } };
                    Segment { guest: GuestRange { start, len }, source, ..whole }
                };
                free.spans(region.image_pages()).map(segment).collect::<Vec<_>>()
            })
            .collect();
        Ok(plan)
    }
    /// The pages of the faults that were not free, in their order.
    fn packing(&self, input: &PlanInput<'_>) -> Result<Option<Packing>, PlannerError> {
        let (faults, free) = (faults(input, &self.name())?, self.free(input)?);
        let free_pages = pages_of(free, input.layout.pages());
        let used = faults.iter().flat_map(|run| {
            let spans = free_pages.spans(run.range()).filter(|span| !span.set);
            spans.map(|span| Run::from(span.pages)).collect::<Vec<_>>()
        });
        Ok(Some(Packing {
            file: PackedFile::UsedWorkingSet,
            runs: merged(used),
            runs_before_merging: faults.len() as u64,
            recipe: recipe(&("faast", faults, free)),
        }))
    }
}
