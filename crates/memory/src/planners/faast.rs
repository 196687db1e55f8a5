//! `faast`: as REAP, with anonymous memory for the guest's free pages.
//!
//! Faast (SnapBPF 2.1) "relies on the allocator metadata of the VM kernel to identify pages that
//! are not actively used in the snapshot and routes faults for these pages to anonymous memory":
//! the guest overwrites them before it reads them, so their contents in the image are never read.
//! The set is the profile's part `free`, found by a walk of the guest's own allocator in the
//! snapshot. Free pages are not in the working-set file. They are anonymous memory outside the
//! pager: the kernel resolves a fault on one.

use firn_base::{GuestRange, PAGE_SIZE, PageRange};
use firn_snapshot::{PackedFile, PageSet};

use super::packing::{Packing, recipe};
use super::reap::{faults, merged, plan};
use super::{PlanInput, Planner, PlannerError};
use crate::pager::PagerPolicy;
use crate::plan::{Advice, Layer, Plan, Segment, Source};

/// The planner `faast`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Faast {
    /// How faults outside the working set are served (`granule=`, a power of two up to 512; 1 by
    /// default).
    pub(crate) policy: PagerPolicy,
}

impl Faast {
    fn free<'a>(&self, input: &PlanInput<'a>) -> Result<&'a [PageRange], PlannerError> {
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

    /// The plan of [`Reap`](super::Reap), with anonymous memory for each run of free pages.
    fn plan(&self, input: &PlanInput<'_>) -> Result<Plan, PlannerError> {
        let free = self.free(input)?;
        let mut plan = plan(input, self, self.policy)?;
        let free = PageSet::of(free, input.layout.pages());
        let regions = input.layout.regions().zip(std::mem::take(&mut plan.segments));
        for (region, whole) in regions {
            for (pages, free) in free.split(region.image_pages()) {
                let offset = pages.start * PAGE_SIZE;
                let start = region.guest_addr + (offset - region.image_offset);
                let len = (pages.end - pages.start) * PAGE_SIZE;
                let guest = GuestRange { start, len };
                let source = if free { Source::Zero } else { Source::Pager { offset } };
                plan.segments.push(Segment { guest, source, ..whole });
                if free {
                    let (sharing, advice) = (whole.sharing, Advice::Normal);
                    plan.layers.push(Layer { guest, source, sharing, advice });
                }
            }
        }
        Ok(plan)
    }

    /// The pages of the faults without free pages, in their order.
    fn packing(&self, input: &PlanInput<'_>) -> Result<Option<Packing>, PlannerError> {
        let (faults, free) = (faults(input, &self.name())?, self.free(input)?);
        let free_pages = PageSet::of(free, input.layout.pages());
        let used = faults.iter().flat_map(|run| {
            free_pages.gaps_in(run.range()).map(PageRange::from).collect::<Vec<_>>()
        });
        Ok(Some(Packing {
            file: PackedFile::UsedWorkingSet,
            runs: merged(used),
            runs_before_merging: faults.len() as u64,
            recipe: recipe(&("faast", faults, free)),
        }))
    }
}
