//! `firn`: pages that a run reads are shared; pages that it writes are copied before the start.
//!
//! It extends PASS. `pass` writes without a fault because its VM has a whole replica; `pass_shared`
//! shares one extent and has a fault for each page that is written, and for each leaf that a copy
//! splits. This planner shares the extent at the medium's largest leaf and maps a copy, made before
//! the start, over the pages that are expected to be written ([`copy_ahead`](crate::copy_ahead)):
//! over whole chunks in leaves of 2 MiB, over runs of pages in leaves of 4 KiB. A chunk with such
//! runs is otherwise mapped from the extent, so the kernel copies pages that were not expected.
//! Where it cannot, because the medium has no private mappings, the rest of such a chunk is memory
//! of this VM that a pager fills from the extent, 64 KiB at a time.
//!
//! Without a copy the kernel copies the profile's pages that are still expected before the guest
//! runs, where the medium has private mappings and the arena has room, and all others when they are
//! written, as with `pass_shared`. Expected chunks that are all zero are then anonymous memory in
//! pages of 2 MiB.

use std::ops::Range;

use firn_base::num::usize_of;
use firn_base::{GuestRange, PAGE_SIZE, PageRange, RangeSet};
use firn_snapshot::{CHUNK_PAGES, Copies, ImageRegion, PageSet};

use super::pass::segments;
use super::pass_shared::sharing;
use super::{ExtentFacts, PlanInput, Planner, PlannerError, Store, check_mappings};
use crate::copy_ahead::{Rule, expected_pages, lacks_copy};
use crate::pager::PagerPolicy;
use crate::plan::{
    Advice, Integrity, Layer, Leaf, Plan, Segment, Sharing, Source, Step, When, Work,
};

/// The planner `firn`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Firn {
    /// Which pages are copied ahead, by the written pages of a granule (`copy=1` to 512), by the
    /// pages of a chunk that a run reads through small leaves (`read=1` to 512, or `read=0` for
    /// none), in which granule, and whether runs change it (`learn=on`).
    pub(crate) rule: Rule,
}

impl Planner for Firn {
    fn name(&self) -> String {
        let Rule { written, read, granule, learn } = self.rule;
        let learn = if learn { "on" } else { "off" };
        format!("firn:copy={written},read={read},granule={},learn={learn}", granule.name())
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
    leaf: Leaf,
}

/// The chunk that contains an address: its first byte.
fn chunk_start(address: u64) -> u64 {
    address - address % CHUNK
}

const CHUNK: u64 = Leaf::Size2M.bytes();
/// Pages that a fault of the pager fills: 64 KiB.
const PAGER_GRANULE: u64 = 16;

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
        populated: Vec::new(),
        segments: Vec::new(),
        layers: Vec::new(),
        schedule: Vec::new(),
        pager: None,
    };
    let only_copy = copies.is_some_and(has_what_is_read);
    let without_copy = copies.filter(|copies| extent.private && lacks_copy(copies));
    let expected = without_copy.map_or_else(Vec::new, |copies| {
        expected_pages(copies, input.profile, input.layout.pages())
    });
    for region in input.layout.regions() {
        let own = copies.map(|copies| private_parts(region, extent, copies, input.zero_map));
        let own = own.unwrap_or_default();
        let guest = GuestRange::from(region.guest_range());
        let populated = populated_in(region, &expected, &own);
        let apart = apart(&own, &populated, guest);
        let paged = apart.iter().filter(|apart| apart.content == Content::Copy && !extent.private);
        let paged: Vec<GuestRange> = paged.map(|apart| apart.guest).collect();
        let own = with_pager(own, &paged, region);
        add_region(&mut plan, region, extent, sharing, (&own, &paged));
        add_index(&mut plan, guest, &apart, only_copy);
        plan.populated.extend(populated);
    }
    if plan.segments.iter().any(|segment| matches!(segment.source, Source::Pager { .. })) {
        if !input.host.userfaultfd {
            return Err(PlannerError::NoUserfaultfd { planner: plan.planner });
        }
        plan.pager = PagerPolicy::with_granule(PAGER_GRANULE).map(|policy| policy.to_string());
    }
    check_mappings(&plan, input.host)?;
    Ok(plan)
}

/// A part of a region that is not indexed as a whole: zeros, or neighbouring chunks of which only
/// runs are copied.
#[derive(Clone, Copy, Debug)]
struct Apart {
    guest: GuestRange,
    content: Content,
}

/// What is indexed in such a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    /// Nothing: it is anonymous memory, which has no pages yet.
    Zeros,
    /// Runs of the copy.
    Copy,
    /// Runs that are populated, without a copy.
    Populated,
}

/// Those parts, ascending.
fn apart(own: &[PrivatePart], populated: &[GuestRange], region: GuestRange) -> Vec<Apart> {
    let own = own.iter().filter_map(|part| match part.source {
        Source::Zero => Some((part.guest, Content::Zeros)),
        _ => (part.leaf != Leaf::Size2M).then_some((part.guest, Content::Copy)),
    });
    let mut parts: Vec<_> = own.collect();
    parts.extend(populated.iter().map(|guest| (*guest, Content::Populated)));
    parts.sort_by_key(|(guest, _)| guest.start);
    let mut apart: Vec<Apart> = Vec::new();
    for (guest, content) in parts {
        let start = chunk_start(guest.start).max(region.start);
        let end = guest.end().next_multiple_of(CHUNK).min(region.end());
        match apart.last_mut() {
            Some(last) if last.content == content && start <= last.guest.end() => {
                last.guest.len = end.max(last.guest.end()) - last.guest.start;
            }
            _ => apart.push(Apart { guest: GuestRange { start, len: end - start }, content }),
        }
    }
    apart
}

/// The parts of a region to populate: runs of image pages, without chunks of zeros.
fn populated_in(region: ImageRegion, runs: &[PageRange], own: &[PrivatePart]) -> Vec<GuestRange> {
    let zeros = own.iter().filter(|part| part.source == Source::Zero);
    let zeros: RangeSet = zeros.map(|part| part.guest.start..part.guest.end()).collect();
    let within = runs.iter().map(|run| within(region, *run)).filter(|range| !range.is_empty());
    let parts = within.flat_map(|range| {
        let guest = guest_of(region, range.start, range.end - range.start);
        zeros.split(guest.start..guest.end())
    });
    parts.filter(|(_, is_zero)| !is_zero).map(|(part, _)| part.into()).collect()
}

/// The bytes of the image that are in a run and in a region; empty if there are none.
fn within(region: ImageRegion, run: PageRange) -> Range<u64> {
    let image = region.image_range();
    let start = (run.first * PAGE_SIZE).max(image.start);
    start..run.range().end.saturating_mul(PAGE_SIZE).min(image.end)
}

/// Where bytes of the image, which are in a region, are in guest memory.
fn guest_of(region: ImageRegion, image_offset: u64, len: u64) -> GuestRange {
    GuestRange { start: region.guest_addr + (image_offset - region.image_offset), len }
}

/// The private parts with those between them in these chunks, which a pager serves.
fn with_pager(
    own: Vec<PrivatePart>,
    paged: &[GuestRange],
    region: ImageRegion,
) -> Vec<PrivatePart> {
    let between = |from: u64, to: u64| {
        let (source, leaf) = (pager_source(region, from), Leaf::Size4K);
        let guest = GuestRange { start: from, len: to.saturating_sub(from) };
        (from < to).then_some(PrivatePart { guest, source, leaf })
    };
    let mut all = Vec::with_capacity(2 * own.len());
    let mut own = own.into_iter().peekable();
    for chunks in paged {
        all.extend(std::iter::from_fn(|| own.next_if(|part| part.guest.start < chunks.start)));
        let mut at = chunks.start;
        while let Some(part) = own.next_if(|part| part.guest.start < chunks.end()) {
            all.extend(between(at, part.guest.start));
            at = part.guest.end();
            all.push(part);
        }
        all.extend(between(at, chunks.end()));
    }
    all.extend(own);
    all
}

/// The pager's pages from an address of a region on.
fn pager_source(region: ImageRegion, guest: u64) -> Source {
    Source::Pager { offset: region.image_offset + (guest - region.guest_addr) }
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
    if bases.iter().any(|base| !base.is_multiple_of(CHUNK)) {
        return Vec::new();
    }
    let mut own: Vec<PrivatePart> = Vec::new();
    for (run, place) in copies.table.parts() {
        let mut range = within(region, run);
        let offset = place + (range.start.saturating_sub(run.first * PAGE_SIZE));
        let is_whole = [run.first, run.pages].iter().all(|pages| pages.is_multiple_of(CHUNK_PAGES));
        let leaf = if is_whole && offset.is_multiple_of(CHUNK) {
            // A chunk that is only partly in the region stays mapped from the extent.
            range.end = chunk_start(range.end);
            Leaf::Size2M
        } else {
            Leaf::Size4K
        };
        if range.start < range.end {
            let guest = guest_of(region, range.start, range.end - range.start);
            own.push(PrivatePart { guest, source: Source::Copy { offset }, leaf });
        }
    }
    for range in copies.expected.iter().map(|run| within(region, *run)) {
        let chunks = range.start.next_multiple_of(CHUNK)..chunk_start(range.end);
        for start in chunks.step_by(usize_of(CHUNK)) {
            let first = start / PAGE_SIZE;
            let zero = |pages| zero_map.gaps_in(pages).next().is_none();
            if copies.table.place(start).is_none() && zero(first..first + CHUNK_PAGES) {
                let guest = guest_of(region, start, CHUNK);
                match own.last_mut() {
                    Some(last)
                        if last.source == Source::Zero && last.guest.end() == guest.start =>
                    {
                        last.guest.len += guest.len;
                    }
                    _ => own.push(PrivatePart { guest, source: Source::Zero, leaf: Leaf::Size2M }),
                }
            }
        }
    }
    own.sort_by_key(|own| own.guest.start);
    own
}

/// Maps a region from the extent, and over it chunks that a pager serves and the private parts.
fn add_region(
    plan: &mut Plan,
    region: ImageRegion,
    extent: ExtentFacts,
    sharing: Sharing,
    (own, paged): (&[PrivatePart], &[GuestRange]),
) {
    let start = region.guest_addr;
    let integrity = if extent.checked { Integrity::CheckedAtSeal } else { Integrity::Unchecked };
    let guest = GuestRange { start, len: region.len };
    let source = Source::Extent { offset: extent.offset + region.image_offset };
    plan.layers.push(Layer { guest, source, sharing, advice: Advice::Normal });
    plan.layers.extend(paged.iter().map(|guest| Layer {
        guest: *guest,
        source: pager_source(region, guest.start),
        sharing: Sharing::Exclusive,
        advice: Advice::Normal,
    }));
    let mut at = start;
    let shared = |from: u64, to: u64| {
        // Chunks that are cut are mapped in small leaves, and those between them are not.
        let cut = from.next_multiple_of(CHUNK).min(to);
        let rest = chunk_start(to).max(cut);
        let parts = [(from, cut), (cut, rest), (rest, to)].into_iter();
        parts.filter(|(from, to)| from < to).flat_map(move |(from, to)| {
            let image_offset = region.image_offset + (from - start);
            let part = ImageRegion { guest_addr: from, image_offset, len: to - from };
            segments(part, extent, sharing)
        })
    };
    for PrivatePart { guest, source, leaf } in own.iter().copied() {
        plan.segments.extend(shared(at, guest.start));
        let sharing = Sharing::Exclusive;
        let (integrity, layer) = match source {
            Source::Zero => (Integrity::CheckedOnFill, Some(Advice::Huge)),
            // Its layer is that of its chunks.
            Source::Pager { .. } => (Integrity::CheckedOnFill, None),
            _ => (integrity, Some(Advice::Normal)),
        };
        plan.segments.push(Segment { guest, source, sharing, leaf, integrity });
        plan.layers.extend(layer.map(|advice| Layer { guest, source, sharing, advice }));
        at = guest.end();
    }
    plan.segments.extend(shared(at, start + region.len));
}

/// Whether a copy has most of what a run is expected to read, too. Only the copy is indexed then: a
/// chunk that is touched all the same costs its page fault what indexing it costs, and the others
/// cost nothing.
fn has_what_is_read(copies: &Copies) -> bool {
    !copies.table.is_empty() && Rule::of_key(&copies.key).is_some_and(|rule| rule.read > 0)
}

/// Indexes a region, except for anonymous memory, which has no pages yet. Of chunks with runs of a
/// copy, or with runs to populate, it indexes these runs alone: their other pages are not expected
/// to be touched, and have an entry each. With `only_copy` it indexes nothing but the copy.
fn add_index(plan: &mut Plan, region: GuestRange, apart: &[Apart], only_copy: bool) {
    let step = |work| Step { when: When::BeforeResume, work };
    if only_copy {
        plan.schedule.push(step(Work::IndexCopy { guest: region }));
        return;
    }
    let index = |from: u64, to: u64| {
        let guest = GuestRange { start: from, len: to - from };
        (to > from).then(|| step(Work::Index { guest }))
    };
    let mut at = region.start;
    for Apart { guest, content } in apart.iter().copied() {
        plan.schedule.extend(index(at, guest.start));
        plan.schedule.extend(match content {
            Content::Zeros => None,
            Content::Copy => Some(step(Work::IndexCopy { guest })),
            Content::Populated => Some(step(Work::Populate { guest })),
        });
        at = guest.end();
    }
    plan.schedule.extend(index(at, region.end()));
}

#[cfg(test)]
#[path = "firn_tests.rs"]
mod tests;
