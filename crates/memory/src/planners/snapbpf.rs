//! `snapbpf`: the image is mapped privately without read-ahead, and the pages of earlier runs are
//! prefetched from the image itself.
//!
//! SnapBPF (3.1): the pages that entered the page cache in an earlier run were captured as offsets,
//! grouped into contiguous ranges and sorted by first access. At a start these ranges are read into
//! the page cache in that order. There is no second file, and the page cache shares every page
//! between the microVMs of a snapshot. The paper's BPF program issues the reads through a kernel
//! function of its own. So it does with `prefetch=kernel`, which needs a module; otherwise the
//! loader issues them with `POSIX_FADV_WILLNEED`, range by range.
//!
//! SnapBPF (3.2) marks pages when the guest allocates them, with a changed guest and a changed KVM,
//! so that they are never read from the snapshot. Here pages that the guest's allocator had
//! reported free at the freeze are anonymous; page contents are not examined.
//! docs/concepts/snapbpf.md lists the differences.
//!
//! Each of the two can be left out, as in the paper's figure 4. Without the prefetch the kernel's
//! read-ahead is on, as in the figure's baseline.

use std::ops::Range;

use firn_base::{GuestRange, ImageRange, PAGE_SIZE};
use firn_snapshot::{CachedRun, CopyTable, ImageRegion, PageSet, Profile};

use super::{PlanInput, Planner, PlannerError, check_mappings};
use crate::plan::{
    Advice, Integrity, Layer, Leaf, Plan, Segment, Sharing, Source, Step, When, Work,
};

/// The planner `snapbpf`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SnapBpf {
    /// How the pages of earlier runs are prefetched.
    pub(crate) prefetch: Prefetch,
    /// Whether the pages that were reported free are anonymous (`marking=on`).
    pub(crate) marking: bool,
}

/// The prefetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Prefetch {
    /// By a thread of the monitor (`prefetch=on`).
    Loader,
    /// By a BPF program (`prefetch=kernel`).
    Kernel,
    /// Not at all: the kernel alone reads ahead (`prefetch=off`).
    Off,
}

impl Default for SnapBpf {
    /// The whole system, on a stock kernel.
    fn default() -> Self {
        Self { prefetch: Prefetch::Loader, marking: true }
    }
}

impl SnapBpf {
    /// The runs to prefetch, in order.
    fn runs<'a>(&self, profile: Option<&'a Profile>) -> Result<&'a [CachedRun], PlannerError> {
        if self.prefetch == Prefetch::Off {
            return Ok(&[]);
        }
        let cached = profile.and_then(|profile| profile.cached.as_deref());
        cached.ok_or_else(|| PlannerError::NoProfile {
            planner: self.name(),
            part: "what entered the page cache",
            option: "cache",
        })
    }

    /// The steps that read ranges of pages, in order. The first page of all triggers the program.
    fn schedule(&self, ranges: Vec<Range<u64>>) -> Vec<Step> {
        if self.prefetch != Prefetch::Kernel {
            return ranges.iter().map(Step::load_image).collect();
        }
        let trigger = ranges.first().map(|first| Step::load_image(&(first.start..first.start + 1)));
        let prefetch = ranges.into_iter().map(|pages| {
            let len = (pages.end - pages.start) * PAGE_SIZE;
            let work =
                Work::Prefetch { image: ImageRange { offset: pages.start * PAGE_SIZE, len } };
            Step { when: When::AtRequest, work }
        });
        trigger.into_iter().chain(prefetch).collect()
    }
}

impl Planner for SnapBpf {
    fn name(&self) -> String {
        let prefetch = match self.prefetch {
            Prefetch::Loader => None,
            Prefetch::Kernel => Some("prefetch=kernel"),
            Prefetch::Off => Some("prefetch=off"),
        };
        let options = prefetch.into_iter().chain((!self.marking).then_some("marking=off"));
        let options: Vec<&str> = options.collect();
        if options.is_empty() {
            "snapbpf".to_owned()
        } else {
            format!("snapbpf:{}", options.join(","))
        }
    }

    fn has_program(&self) -> bool {
        self.prefetch == Prefetch::Kernel
    }

    fn uses_profile(&self) -> bool {
        true
    }

    fn plan(&self, input: &PlanInput<'_>) -> Result<Plan, PlannerError> {
        let planner = self.name();
        if input.image.extent.is_some() {
            return Err(PlannerError::NoFile { planner });
        }
        let cached = self.runs(input.profile)?;
        let reported = input.profile.filter(|_| self.marking).and_then(|p| p.reported.as_deref());
        let free = free_pages(reported.unwrap_or_default(), input.zero_map);
        let load = cached.iter().flat_map(|cached| free.gaps_in(cached.run.range())).collect();
        let mut plan = Plan {
            planner,
            layout: input.layout.clone(),
            segments: Vec::new(),
            layers: Vec::new(),
            schedule: self.schedule(load),
            pager: None,
            copies: CopyTable::default(),
            populated: Vec::new(),
        };
        let read_ahead = self.prefetch == Prefetch::Off;
        let advice = if read_ahead { Advice::Normal } else { Advice::Random };
        let of_image = Integrity::of_file(input.image.protected);
        for region in input.layout.regions() {
            map_region(&mut plan, &region, &free, advice, of_image);
        }
        check_mappings(&plan, input.host)?;
        Ok(plan)
    }
}

/// The pages that were reported free and are zero: a page that is not zero was written since.
fn free_pages(reported: &[firn_base::PageRange], zero_map: &PageSet) -> PageSet {
    let reported = PageSet::of(reported, zero_map.pages());
    let mut free = PageSet::new(zero_map.pages());
    for pages in reported.ranges() {
        zero_map.ranges_in(pages).for_each(|zeros| free.insert_range(zeros));
    }
    free
}

/// Maps the region with one layer of the image, and a layer of anonymous memory over each run of
/// free pages.
fn map_region(
    plan: &mut Plan,
    region: &ImageRegion,
    free: &PageSet,
    advice: Advice,
    of_image: Integrity,
) {
    let guest = |pages: &Range<u64>| GuestRange {
        start: region.guest_addr + pages.start * PAGE_SIZE - region.image_offset,
        len: (pages.end - pages.start) * PAGE_SIZE,
    };
    let source = |page: u64| Source::Image { offset: page * PAGE_SIZE };
    plan.layers.push(Layer {
        guest: GuestRange::from(region.guest_range()),
        source: source(region.image_pages().start),
        sharing: Sharing::PrivateCow,
        advice,
    });
    for (pages, free) in free.split(region.image_pages()) {
        let guest = guest(&pages);
        let (source, sharing, integrity) = if free {
            (Source::Zero, Sharing::Exclusive, Integrity::CheckedOnFill)
        } else {
            (source(pages.start), Sharing::PrivateCow, of_image)
        };
        plan.segments.push(Segment { guest, source, sharing, leaf: Leaf::Size4K, integrity });
        if free {
            plan.layers.push(Layer { guest, source, sharing, advice: Advice::Normal });
        }
    }
}

#[cfg(test)]
#[path = "snapbpf_tests.rs"]
mod tests;
