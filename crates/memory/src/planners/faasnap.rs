//! `faasnap`: zero pages are anonymous, and the loading set is in a file of its own that a loader
//! reads while the guest runs.
//!
//! FaaSnap (4.2 to 4.8). The working set is the set of pages that were in memory when runs were
//! sampled, in groups by the first sample of a page. The *loading set* is the working set without
//! zero pages (4.6). Regions with a gap of fewer than `merge` pages are merged, including the gap;
//! a region's group is the lowest group of its pages; sorted by group and address, the regions are
//! packed into one file (4.7). Guest memory is mapped in three layers, each over the one before
//! (4.8): all memory anonymous, then the regions that are not zero from the image, then the loading
//! set from its file. A loader reads the file in sequence from the request on (4.2), once for all
//! microVMs of a snapshot.
//!
//! Each of the three steps can be left out, as in the paper's figure 9 (6.5). Without the loading
//! set the loader reads the whole working set from the image: by groups where zero regions are
//! anonymous, otherwise in the order of addresses. Without regions one layer of the image takes the
//! place of the first two.

use std::ops::Range;

use firn_base::{GuestRange, PAGE_SIZE, PageRange};
use firn_snapshot::{CopyTable, ImageRegion, MemoryLayout, Packed, PackedFile, PackedRun, PageSet};

use super::packing::{Packing, recipe};
use super::{PlanInput, Planner, PlannerError, check_mappings};
use crate::plan::{
    Advice, Integrity, Layer, Leaf, LoadFile, Plan, Segment, Sharing, Source, Step, When, Work,
};

/// The planner `faasnap`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaaSnap {
    /// Regions of the loading set with a gap of fewer pages than this are merged; 0 merges none
    /// (`merge=32`). It is part of the loading set.
    pub merge: u64,
    /// Whether a loader reads while the guest runs (`paging=on`): concurrent paging, 4.2.
    pub paging: bool,
    /// Whether zero regions are anonymous, and the loader reads by groups (`regions=on`):
    /// per-region mapping, 4.3 to 4.5.
    pub regions: bool,
    /// Whether the working set without its zero pages is a file of its own (`loading_set=on`): 4.6
    /// and 4.7.
    pub loading_set: bool,
}

impl Default for FaaSnap {
    /// The whole system.
    fn default() -> Self {
        Self { merge: Self::MERGE, paging: true, regions: true, loading_set: true }
    }
}

impl FaaSnap {
    /// The paper's merge distance (4.6), in pages.
    pub const MERGE: u64 = 32;
    /// The largest merge distance, in pages.
    pub(crate) const MAX_MERGE: u64 = 1 << 20;

    /// The recipe of the loading-set file.
    fn recipe(self, groups: &[Vec<PageRange>]) -> u64 {
        recipe(&("faasnap", self.merge, groups))
    }

    fn groups<'a>(&self, input: &PlanInput<'a>) -> Result<&'a [Vec<PageRange>], PlannerError> {
        let groups = input.profile.and_then(|profile| profile.groups.as_deref());
        groups.ok_or_else(|| PlannerError::NoProfile {
            planner: self.name(),
            part: "working-set groups",
            option: "groups",
        })
    }

    /// The loading-set file of the snapshot; `None` where the planner uses none.
    fn packed<'a>(
        &self,
        input: &PlanInput<'a>,
        groups: &[Vec<PageRange>],
    ) -> Result<Option<&'a Packed>, PlannerError> {
        if !self.loading_set {
            return Ok(None);
        }
        let (planner, file) = (self.name(), PackedFile::LoadingSet.name());
        let packed = input.snapshot.map(|snapshot| snapshot.packed(PackedFile::LoadingSet));
        match packed.transpose().map(Option::flatten) {
            Ok(Some(packed)) if packed.recipe() != self.recipe(groups) => {
                Err(PlannerError::OtherPackedFile { planner, file })
            }
            Ok(Some(packed)) => Ok(Some(packed)),
            Ok(None) => Err(PlannerError::NoPackedFile { planner, file }),
            Err(error) => Err(PlannerError::PackedFile { planner, reason: error.to_string() }),
        }
    }

    /// The loader's steps.
    fn schedule(self, groups: &[Vec<PageRange>], packed: Option<&Packed>, pages: u64) -> Vec<Step> {
        match packed {
            _ if !self.paging => Vec::new(),
            Some(packed) => load(packed),
            None if self.regions => {
                let sorted = groups.iter().flat_map(|group| {
                    let mut runs = group.clone();
                    runs.sort_unstable_by_key(|run| run.first);
                    runs
                });
                sorted.map(|run| Step::load_image(&run.range())).collect()
            }
            None => {
                let all = PageSet::of(groups.iter().flatten(), pages);
                all.ranges().map(|run| Step::load_image(&run)).collect()
            }
        }
    }
}

impl Planner for FaaSnap {
    fn name(&self) -> String {
        let mut name = if self.loading_set {
            format!("faasnap:merge={}", self.merge)
        } else {
            "faasnap:loading_set=off".to_owned()
        };
        for (key, on) in [("paging", self.paging), ("regions", self.regions)] {
            if !on {
                name.push_str(&format!(",{key}=off"));
            }
        }
        name
    }

    fn uses_profile(&self) -> bool {
        true
    }

    fn packing(&self, input: &PlanInput<'_>) -> Result<Option<Packing>, PlannerError> {
        if !self.loading_set {
            return Ok(None);
        }
        let groups = self.groups(input)?;
        let LoadingSet { runs, before_merging } =
            loading_set(groups, input.zero_map, input.layout, self.merge);
        Ok(Some(Packing {
            file: PackedFile::LoadingSet,
            runs,
            runs_before_merging: before_merging,
            recipe: self.recipe(groups),
        }))
    }

    fn plan(&self, input: &PlanInput<'_>) -> Result<Plan, PlannerError> {
        let planner = self.name();
        if input.image.extent.is_some() {
            return Err(PlannerError::NoFile { planner });
        }
        let groups = self.groups(input)?;
        let packed = self.packed(input, groups)?;
        let mut loaded: Vec<PackedRun> = packed.map_or(Vec::new(), |packed| packed.runs().to_vec());
        loaded.sort_unstable_by_key(|packed| packed.run.first);
        let mut plan = Plan {
            planner,
            layout: input.layout.clone(),
            segments: Vec::new(),
            layers: Vec::new(),
            schedule: self.schedule(groups, packed, input.zero_map.pages()),
            copies: CopyTable::default(),
            populated: Vec::new(),
            pager: None,
        };
        let zeros = self.regions.then_some(input.zero_map);
        for region in input.layout.regions() {
            map_region(&mut plan, &region, &loaded, zeros);
        }
        let of_image = Integrity::of_file(input.image.protected);
        let of_packed = Integrity::of_file(packed.is_some_and(Packed::is_protected));
        for segment in &mut plan.segments {
            segment.integrity = match segment.source {
                Source::Image { .. } => of_image,
                Source::Packed { .. } => of_packed,
                _ => Integrity::CheckedOnFill,
            };
        }
        // Layers in the order of their sources: anonymous memory, the image, the loading set.
        plan.layers.sort_by_key(|layer| match layer.source {
            Source::Zero => 0,
            Source::Packed { .. } => 2,
            _ => 1,
        });
        check_mappings(&plan, input.host)?;
        Ok(plan)
    }
}

/// The step in which the loader reads the file in sequence.
fn load(packed: &Packed) -> Vec<Step> {
    let Range { start: offset, end } = packed.data();
    let work = Work::Load { file: LoadFile::Packed, offset, len: end - offset };
    if end == offset { Vec::new() } else { vec![Step { when: When::AtRequest, work }] }
}

/// The segments and layers of one region of guest memory. `zeros` are the pages that are anonymous
/// where they are in no file of their own; without them all pages are the image's.
fn map_region(
    plan: &mut Plan,
    region: &ImageRegion,
    loaded: &[PackedRun],
    zeros: Option<&PageSet>,
) {
    let image = region.image_range();
    let pages = image.start / PAGE_SIZE..image.end / PAGE_SIZE;
    let guest = |pages: &Range<u64>| GuestRange {
        start: region.guest_addr + pages.start * PAGE_SIZE - region.image_offset,
        len: (pages.end - pages.start) * PAGE_SIZE,
    };
    let layer =
        |guest, source| Layer { guest, source, sharing: sharing(source), advice: Advice::Normal };
    let image_layer = |stored: &Range<u64>| {
        layer(guest(stored), Source::Image { offset: stored.start * PAGE_SIZE })
    };
    match zeros {
        Some(zeros) => {
            plan.layers.push(layer(guest(&pages), Source::Zero));
            plan.layers.extend(zeros.gaps_in(pages.clone()).map(|stored| image_layer(&stored)));
        }
        None => plan.layers.push(image_layer(&pages)),
    }
    let mut at = pages.start;
    let first = loaded.partition_point(|packed| packed.run.range().end <= pages.start);
    for packed in loaded[first..].iter().take_while(|packed| packed.run.first < pages.end) {
        let run = packed.run.first.max(at)..packed.run.range().end.min(pages.end);
        let source = Source::Packed {
            offset: packed.offset + (run.start - packed.run.first) * PAGE_SIZE,
            image: run.start * PAGE_SIZE,
        };
        plan.segments.extend(unloaded(at..run.start, zeros, guest));
        plan.segments.push(segment(guest(&run), source));
        plan.layers.push(layer(guest(&run), source));
        at = run.end;
    }
    plan.segments.extend(unloaded(at..pages.end, zeros, guest));
}

/// The segments of pages outside the loading set: anonymous for zeros, otherwise from the image.
fn unloaded(
    pages: Range<u64>,
    zeros: Option<&PageSet>,
    guest: impl Fn(&Range<u64>) -> GuestRange,
) -> Vec<Segment> {
    let parts = match zeros {
        Some(zeros) => zeros.split(pages).collect(),
        None if pages.is_empty() => Vec::new(),
        None => vec![(pages, false)],
    };
    let source = |first: u64, zero| match zero {
        true => Source::Zero,
        false => Source::Image { offset: first * PAGE_SIZE },
    };
    parts
        .into_iter()
        .map(|(pages, zero)| segment(guest(&pages), source(pages.start, zero)))
        .collect()
}

fn sharing(source: Source) -> Sharing {
    if source == Source::Zero { Sharing::Exclusive } else { Sharing::PrivateCow }
}

fn segment(guest: GuestRange, source: Source) -> Segment {
    // The planner sets the integrity of what comes from files.
    let integrity = Integrity::CheckedOnFill;
    Segment { guest, source, sharing: sharing(source), leaf: Leaf::Size4K, integrity }
}

/// The regions of a loading set, sorted by group and address.
struct LoadingSet {
    runs: Vec<PageRange>,
    /// The number of regions before merging.
    before_merging: u64,
}

/// The working set without its zero pages, in regions that are merged where their gap is smaller
/// than `merge` pages.
fn loading_set(
    groups: &[Vec<PageRange>],
    zero_map: &PageSet,
    layout: &MemoryLayout,
    merge: u64,
) -> LoadingSet {
    let working_set = PageSet::of(groups.iter().flatten(), zero_map.pages());
    // The group of each run, by the first page of the run.
    let mut group_of: Vec<(u64, usize)> = Vec::new();
    for (group, runs) in groups.iter().enumerate() {
        group_of.extend(runs.iter().map(|run| (run.first, group)));
    }
    group_of.sort_unstable();
    let mut before_merging = 0;
    let mut regions: Vec<(usize, Range<u64>)> = Vec::new();
    for region in layout.regions() {
        // A region of the loading set lies within one region of guest memory.
        let mut merging = false;
        for touched in working_set.ranges_in(region.image_pages()) {
            for pages in zero_map.gaps_in(touched) {
                let group = lowest_group(&group_of, groups, &pages);
                let last = regions.last_mut().filter(|_| merging);
                let gap = last.as_ref().map(|(_, last)| pages.start - last.end);
                before_merging += u64::from(gap != Some(0));
                match last.filter(|_| gap.is_some_and(|gap| gap == 0 || gap < merge)) {
                    Some((lowest, last)) => {
                        *lowest = group.min(*lowest);
                        last.end = pages.end;
                    }
                    None => regions.push((group, pages)),
                }
                merging = true;
            }
        }
    }
    regions.sort_by_key(|(group, pages)| (*group, pages.start));
    LoadingSet {
        runs: regions.into_iter().map(|(_, pages)| pages.into()).collect(),
        before_merging,
    }
}

/// The lowest group of pages that are all in some group.
fn lowest_group(group_of: &[(u64, usize)], groups: &[Vec<PageRange>], pages: &Range<u64>) -> usize {
    let first = group_of.partition_point(|(first, _)| *first <= pages.start).saturating_sub(1);
    let of_pages = group_of[first..].iter().take_while(|(first, _)| *first < pages.end);
    of_pages.map(|(_, group)| *group).min().unwrap_or(groups.len())
}

#[cfg(test)]
#[path = "faasnap_tests.rs"]
mod tests;
