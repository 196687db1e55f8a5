//! `firn`: chunks that a run reads are shared; chunks that it writes are copied before the start.
//!
//! It extends PASS. `pass` writes without a fault because its VM has a whole replica; `pass_shared`
//! shares one extent and has a fault for each page that is written, and for each leaf that a copy
//! splits. This planner shares the extent at the medium's largest leaf and maps a copy, made before
//! the start in leaves of 2 MiB, over the chunks that are expected to be written
//! ([`copy_ahead`](crate::copy_ahead)).
//!
//! Without a copy (none was ready, or the arena is full) the kernel copies written pages one by
//! one, as with `pass_shared`. Expected chunks that are all zero are then anonymous memory in pages
//! of 2 MiB.

use firn_base::{GuestRange, PAGE_SIZE, PageRange};
use firn_snapshot::{CHUNK_PAGES, Copies, ImageRegion, PageSet};

use super::pass::segments;
use super::pass_shared::sharing;
use super::{ExtentFacts, PlanInput, Planner, PlannerError, Store};
use crate::copy_ahead::Rule;
use crate::plan::{
    Advice, Integrity, Layer, Leaf, Plan, Segment, Sharing, Source, Step, When, Work,
};

/// The planner `firn`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Firn {
    /// Which chunks are copied ahead, by their written pages (`copy=1` to 512), and by the pages
    /// that a run reads through small leaves (`read=1` to 512, or `read=0` for none).
    pub(crate) rule: Rule,
}

impl Planner for Firn {
    fn name(&self) -> String {
        format!("firn:copy={},read={}", self.rule.written, self.rule.read)
    }

    fn store(&self) -> Store {
        Store::Extent
    }

    fn copy_rule(&self) -> Option<Rule> {
        Some(self.rule)
    }

    fn plan(&self, input: &PlanInput<'_>) -> Result<Plan, PlannerError> {
        plan(self.name(), input, input.copies)
    }
}

/// A part of guest memory that is not mapped from the extent.
#[derive(Clone, Copy, Debug)]
struct PrivatePart {
    guest: GuestRange,
    source: Source,
}

pub(crate) fn plan(
    planner: String,
    input: &PlanInput<'_>,
    copies: Option<&Copies>,
) -> Result<Plan, PlannerError> {
    let Some(extent) = input.image.extent else {
        return Err(PlannerError::NoExtent { planner });
    };
    let sharing = sharing(&planner, input, extent)?;
    let mut plan = Plan {
        planner,
        layout: input.layout.clone(),
        copies: copies.map(|copies| copies.table.clone()).unwrap_or_default(),
        segments: Vec::new(),
        layers: Vec::new(),
        schedule: Vec::new(),
        pager: None,
    };
    for region in input.layout.regions() {
        let own = copies.map(|copies| private_parts(region, extent, copies, input.zero_map));
        add_region(&mut plan, region, extent, sharing, &own.unwrap_or_default());
    }
    Ok(plan)
}

/// The parts of a region that only this VM maps, ascending: those in the copy, and expected chunks
/// of zeros outside it.
fn private_parts(
    region: ImageRegion,
    extent: ExtentFacts,
    copies: &Copies,
    zero_map: &PageSet,
) -> Vec<PrivatePart> {
    // Chunks of the image, guest memory and the medium must coincide.
    let bases = [region.guest_addr, region.image_offset, extent.offset];
    if bases.iter().any(|base| !base.is_multiple_of(Leaf::Size2M.bytes())) {
        return Vec::new();
    }
    let within = |run: PageRange| {
        let start = (run.first * PAGE_SIZE).max(region.image_offset);
        let end = (run.range().end.saturating_mul(PAGE_SIZE)).min(region.image_offset + region.len);
        // A chunk that is only partly in the region stays mapped from the extent.
        let end = end - end % Leaf::Size2M.bytes();
        (start < end).then_some(start..end)
    };
    let guest = |start: u64, len| GuestRange {
        start: region.guest_addr + (start - region.image_offset),
        len,
    };
    let mut own: Vec<PrivatePart> = Vec::new();
    for (run, place) in copies.table.parts() {
        let Some(range) = within(run) else { continue };
        let offset = place + (range.start - run.first * PAGE_SIZE);
        let guest = guest(range.start, range.end - range.start);
        own.push(PrivatePart { guest, source: Source::Copy { offset } });
    }
    for range in copies.expected.iter().copied().filter_map(within) {
        for start in range.step_by(firn_base::num::usize_of(Leaf::Size2M.bytes())) {
            let first = start / PAGE_SIZE;
            let zero = |pages| zero_map.gaps_in(pages).next().is_none();
            if copies.table.place(start).is_none() && zero(first..first + CHUNK_PAGES) {
                let guest = guest(start, Leaf::Size2M.bytes());
                match own.last_mut() {
                    Some(last)
                        if last.source == Source::Zero && last.guest.end() == guest.start =>
                    {
                        last.guest.len += guest.len;
                    }
                    _ => own.push(PrivatePart { guest, source: Source::Zero }),
                }
            }
        }
    }
    own.sort_by_key(|own| own.guest.start);
    own
}

/// Maps a region from the extent and the private parts over it, and indexes all but anonymous
/// memory, which has no pages yet.
fn add_region(
    plan: &mut Plan,
    region: ImageRegion,
    extent: ExtentFacts,
    sharing: Sharing,
    own: &[PrivatePart],
) {
    let start = region.guest_addr;
    let integrity = if extent.checked { Integrity::CheckedAtSeal } else { Integrity::Unchecked };
    let guest = GuestRange { start, len: region.len };
    let source = Source::Extent { offset: extent.offset + region.image_offset };
    plan.layers.push(Layer { guest, source, sharing, advice: Advice::Normal });
    let mut at = start;
    let mut indexed = start;
    let index = |from: u64, to: u64| {
        let guest = GuestRange { start: from, len: to - from };
        (to > from).then_some(Step { when: When::BeforeResume, work: Work::Index { guest } })
    };
    let shared = |from: u64, to: u64| {
        let image_offset = region.image_offset + (from - start);
        let part = ImageRegion { guest_addr: from, image_offset, len: to - from };
        (to > from).then(|| segments(part, extent, sharing)).into_iter().flatten()
    };
    for PrivatePart { guest, source } in own.iter().copied() {
        plan.segments.extend(shared(at, guest.start));
        let (leaf, sharing) = (Leaf::Size2M, Sharing::Exclusive);
        let (integrity, advice) = match source {
            Source::Zero => (Integrity::CheckedOnFill, Advice::Huge),
            _ => (integrity, Advice::Normal),
        };
        plan.segments.push(Segment { guest, source, sharing, leaf, integrity });
        plan.layers.push(Layer { guest, source, sharing, advice });
        if source == Source::Zero {
            plan.schedule.extend(index(indexed, guest.start));
            indexed = guest.end();
        }
        at = guest.end();
    }
    let end = start + region.len;
    plan.segments.extend(shared(at, end));
    plan.schedule.extend(index(indexed, end));
}

#[cfg(test)]
#[path = "firn_tests.rs"]
mod tests;
