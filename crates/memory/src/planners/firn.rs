//! `firn`: what is read is shared, what is written was copied before the start.
//!
//! Beyond PASS. `pass` writes without a fault because its VM has a whole replica; `pass_shared` shares one extent and pays for each page
//! that is written, and for each leaf that a copy splits. This planner shares the extent at the medium's largest leaf
//! and takes for the chunks that are expected to be written, and for those alone, a copy of 2 MiB leaves that the pool's
//! manager made ahead. What is expected comes from the profile and from earlier runs: the manager learns it.
//!
//! Without a copy (none was ready, or the arena is full) the kernel copies what is written, page by page, as under
//! `pass_shared`; but expected chunks that are all zero are anonymous memory then, which comes in pages of 2 MiB.

use std::collections::BTreeMap;

use firn_base::PAGE_SIZE;
use firn_snapshot::{CHUNK_PAGES, Copies, CopyRule, ImageRegion, PageSet, Profile, Run};

use super::pass::segments;
use super::pass_shared::sharing;
use super::{ExtentFacts, PlanInput, Planner, PlannerError, Store};
use crate::plan::{
    Advice, GuestRange, Integrity, Layer, Leaf, Plan, Segment, Sharing, Source, Step, When, Work,
};

/// The planner `firn`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Firn {
    /// Which chunks are copied ahead: those of which a run writes so many pages (`copy=1` to 512), and those of which it only reads,
    /// and so many through small leaves (`read=1` to 512, or `read=0` for none).
    pub rule: CopyRule,
}

impl Firn {
    /// The default, by measurement (docs/concepts/firn-planner.md): a page that is written splits its whole leaf.
    pub const RULE: CopyRule = CopyRule { written: 1, read: 32 };
}

impl Planner for Firn {
    fn name(&self) -> String {
        format!("firn:copy={},read={}", self.rule.written, self.rule.read)
    }

    fn store(&self) -> Store {
        Store::Extent
    }

    fn copies(&self) -> Option<CopyRule> {
        Some(self.rule)
    }

    fn plan(&self, input: &PlanInput<'_>) -> Result<Plan, PlannerError> {
        plan(self.name(), input, input.copies)
    }
}

/// The chunks of which a profile says that at least `from` pages are written, as image pages.
pub fn written_chunks(profile: &Profile, from: u64) -> Vec<Run> {
    let counts = pages_by_chunk(profile.written.as_deref().unwrap_or_default());
    chunks(counts.into_iter().filter(|(_, pages)| *pages >= from).map(|(chunk, _)| chunk))
}

/// The chunks of which a profile says that at least `from` pages are touched that the guest maps by leaves of 4 KiB, and none is
/// written, as image pages. With 0 there are none, nor of a profile that does not know the guest's leaves.
///
/// They are worth a copy where KVM has software page tables: it makes ready the entries around a fault (Linux `paging_tmpl.h`,
/// `FNAME(prefetch_gpte)`) in memory alone that this process may write, and sealed bytes are mapped for reading. Each page of
/// the guest's small leaves costs a fault there. With nested paging a shared leaf of 2 MiB takes one.
pub fn read_chunks(profile: &Profile, from: u64) -> Vec<Run> {
    let written = pages_by_chunk(profile.written.as_deref().unwrap_or_default());
    let small = pages_by_chunk(profile.small_leaves.as_deref().unwrap_or_default());
    let dense = small
        .into_iter()
        .filter(|(chunk, pages)| from > 0 && *pages >= from && !written.contains_key(chunk));
    chunks(dense.map(|(chunk, _)| chunk))
}

/// How many pages of each chunk there are in runs that do not overlap.
fn pages_by_chunk(runs: &[Run]) -> BTreeMap<u64, u64> {
    let mut counts = BTreeMap::new();
    for run in runs {
        let range = run.range();
        let mut page = range.start;
        while page < range.end {
            let chunk = page / CHUNK_PAGES;
            let end = ((chunk + 1) * CHUNK_PAGES).min(range.end);
            *counts.entry(chunk).or_default() += end - page;
            page = end;
        }
    }
    counts
}

fn chunks(numbers: impl Iterator<Item = u64>) -> Vec<Run> {
    numbers.map(|chunk| Run { first: chunk * CHUNK_PAGES, pages: CHUNK_PAGES }).collect()
}

/// A part of guest memory that does not come from the extent.
#[derive(Clone, Copy, Debug)]
struct Own {
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
        let own = copies.map(|copies| own_parts(region, extent, copies, input.zero_map));
        add_region(&mut plan, region, extent, sharing, &own.unwrap_or_default());
    }
    Ok(plan)
}

/// What of a region is its VM's own, ascending: what the copy holds, and the expected chunks of zeros that it does not.
fn own_parts(
    region: ImageRegion,
    extent: ExtentFacts,
    copies: &Copies,
    zero_map: &PageSet,
) -> Vec<Own> {
    // A chunk of the image that is no chunk of guest memory, or of the medium, has no leaf.
    let bases = [region.guest_addr, region.image_offset, extent.offset];
    if bases.iter().any(|base| !base.is_multiple_of(Leaf::Size2M.bytes())) {
        return Vec::new();
    }
    let within = |run: Run| {
        let start = (run.first * PAGE_SIZE).max(region.image_offset);
        let end = (run.range().end.saturating_mul(PAGE_SIZE)).min(region.image_offset + region.len);
        // A chunk that the region has in part stays the extent's.
        let end = end - end % Leaf::Size2M.bytes();
        (start < end).then_some(start..end)
    };
    let guest = |start: u64, len| GuestRange {
        start: region.guest_addr + (start - region.image_offset),
        len,
    };
    let mut own: Vec<Own> = Vec::new();
    for (run, place) in copies.table.parts() {
        let Some(range) = within(run) else { continue };
        let offset = place + (range.start - run.first * PAGE_SIZE);
        let guest = guest(range.start, range.end - range.start);
        own.push(Own { guest, source: Source::Copy { offset } });
    }
    for range in copies.expected.iter().copied().filter_map(within) {
        for start in range.step_by(firn_base::num::usize_of(Leaf::Size2M.bytes())) {
            let first = start / PAGE_SIZE;
            let zero = |pages| zero_map.spans(pages).all(|span| span.set);
            if copies.table.place(start).is_none() && zero(first..first + CHUNK_PAGES) {
                let guest = guest(start, Leaf::Size2M.bytes());
                match own.last_mut() {
                    Some(last)
                        if last.source == Source::Zero && last.guest.end() == guest.start =>
                    {
                        last.guest.len += guest.len;
                    }
                    _ => own.push(Own { guest, source: Source::Zero }),
                }
            }
        }
    }
    own.sort_by_key(|own| own.guest.start);
    own
}

/// Maps a region from the extent, and its VM's own parts over it; indexes all but what is anonymous, which has nothing to
/// index.
fn add_region(
    plan: &mut Plan,
    region: ImageRegion,
    extent: ExtentFacts,
    sharing: Sharing,
    own: &[Own],
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
    for Own { guest, source } in own.iter().copied() {
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
