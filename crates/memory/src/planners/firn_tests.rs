use firn_base::PageRange;
use firn_snapshot::{CopyTable, MemoryLayout, MemoryRegion, NoCopy, Profile};
use proptest::collection::{btree_set, vec};
use proptest::prelude::{prop_assert, prop_assert_eq, proptest};
use proptest::sample::select;

use super::*;
use crate::HostFacts;
use crate::copy_ahead::Granule;
use crate::plan::PlanError;
use crate::planners::{ImageFacts, parse};

const MIB: u64 = 1 << 20;
const CHUNK: u64 = 2 * MIB;
const EXTENT: ExtentFacts = ExtentFacts {
    offset: 64 * MIB,
    leaf: Leaf::Size2M,
    private: true,
    replica: false,
    checked: true,
};

fn chunk(first: u64) -> PageRange {
    PageRange { first: first * CHUNK_PAGES, pages: CHUNK_PAGES }
}

fn copies(expected: &[u64], copied: &[u64]) -> Copies {
    let table = CopyTable::new(copied.iter().copied().map(chunk));
    let expected = expected.iter().copied().map(chunk).collect();
    Copies { expected, table, ..Copies::default() }
}

fn plan_of(
    layout: &MemoryLayout,
    extent: ExtentFacts,
    zero: &[u64],
    copies: Option<&Copies>,
) -> Result<Plan, PlannerError> {
    plan_by(layout, extent, zero, copies, None)
}

fn plan_by(
    layout: &MemoryLayout,
    extent: ExtentFacts,
    zero: &[u64],
    copies: Option<&Copies>,
    profile: Option<&Profile>,
) -> Result<Plan, PlannerError> {
    let mut zero_map = PageSet::new(layout.pages());
    for zero in zero.iter().copied().map(chunk) {
        zero_map.insert_range(zero.first..zero.range().end.min(layout.pages()));
    }
    let input = PlanInput {
        layout,
        image: ImageFacts::in_pool(layout.total_bytes(), extent),
        zero_map: &zero_map,
        profile,
        snapshot: None,
        copies: None,
        host: &HostFacts::read().unwrap(),
    };
    plan("firn".into(), &input, copies)
}

fn source_at(plan: &Plan, guest: u64) -> (Source, Sharing) {
    let covers = |s: &&Segment| (s.guest.start..s.guest.end()).contains(&guest);
    let segment = plan.segments.iter().find(covers).unwrap();
    (segment.source.advanced(guest - segment.guest.start), segment.sharing)
}

#[test]
fn without_expected_chunks_the_plan_is_that_of_pass_shared() {
    let layout = MemoryLayout::for_size(5 << 30).unwrap();
    let plan = plan_of(&layout, EXTENT, &[], None).unwrap();
    let input = PlanInput {
        layout: &layout,
        image: ImageFacts::in_pool(layout.total_bytes(), EXTENT),
        zero_map: &PageSet::new(layout.pages()),
        profile: None,
        snapshot: None,
        copies: None,
        host: &HostFacts::read().unwrap(),
    };
    let shared = parse("pass_shared").unwrap().plan(&input).unwrap();
    assert_eq!(Plan { planner: shared.planner.clone(), ..plan }, shared);
    assert_eq!(
        plan_of(&layout, EXTENT, &[], Some(&copies(&[], &[]))).unwrap().layers,
        shared.layers
    );
}

#[test]
fn copied_chunks_come_from_the_copy_and_all_others_from_the_extent() {
    let layout = MemoryLayout::for_size(16 * MIB).unwrap();
    let plan = plan_of(&layout, EXTENT, &[3, 5], Some(&copies(&[1, 2, 5], &[1, 2]))).unwrap();
    assert_eq!(plan.validate(), Ok(()));
    let is = |chunk: u64| source_at(&plan, chunk * CHUNK + 4096);
    assert_eq!(is(0), (Source::Extent { offset: 64 * MIB + 4096 }, Sharing::PrivateCow));
    assert_eq!(is(2), (Source::Copy { offset: CHUNK + 4096 }, Sharing::Exclusive));
    // Zeros that are not expected to be written are read from the extent.
    assert_eq!(is(3).0, Source::Extent { offset: 64 * MIB + 3 * CHUNK + 4096 });
    assert_eq!(is(5), (Source::Zero, Sharing::Exclusive));
    let huge = plan.layers.iter().filter(|layer| layer.advice == Advice::Huge);
    assert_eq!(huge.map(|layer| layer.guest.len).sum::<u64>(), CHUNK);
    // Anonymous memory is not indexed.
    let indexed = plan.schedule.iter().map(|step| match step.work {
        Work::Index { guest } => guest,
        ref other => panic!("{other:?}"),
    });
    let expected = [(0, 5 * CHUNK), (6 * CHUNK, 2 * CHUNK)];
    assert_eq!(indexed.map(|g| (g.start, g.len)).collect::<Vec<_>>(), expected);
}

#[test]
fn only_a_copy_that_has_what_is_read_is_indexed() {
    let layout = MemoryLayout::for_size(16 * MIB).unwrap();
    let indexed = |copied: &[u64], key: &str| {
        let copies = Copies { key: key.to_owned(), ..copies(&[1, 2], copied) };
        let plan = plan_of(&layout, EXTENT, &[], Some(&copies)).unwrap();
        assert_eq!(plan.validate(), Ok(()));
        plan.schedule.into_iter().map(|step| step.work).collect::<Vec<_>>()
    };
    let guest = GuestRange { start: 0, len: 16 * MIB };
    assert_eq!(indexed(&[1, 2], "written=1,read=32"), [Work::IndexCopy { guest }]);
    assert_eq!(indexed(&[1, 2], "written=1,read=0"), [Work::Index { guest }]);
    assert_eq!(indexed(&[], "written=1,read=32"), [Work::Index { guest }], "no copy was ready");
}

#[test]
fn a_wrong_offset_in_the_copy_is_refused() {
    let layout = MemoryLayout::for_size(16 * MIB).unwrap();
    let good = plan_of(&layout, EXTENT, &[], Some(&copies(&[1, 4], &[1, 4]))).unwrap();
    let copied = |plan: &mut Plan, from: Source, to: Source| {
        let segments = plan.segments.iter_mut().map(|s| &mut s.source);
        let sources = segments.chain(plan.layers.iter_mut().map(|l| &mut l.source));
        sources.filter(|source| **source == from).for_each(|source| *source = to);
    };
    let mut wrong = good.clone();
    copied(&mut wrong, Source::Copy { offset: CHUNK }, Source::Copy { offset: 0 });
    let refused = wrong.validate().unwrap_err();
    assert!(
        matches!(refused, PlanError::WrongCopyOffset { offset: 0, expected: CHUNK, .. }),
        "{refused}"
    );
    // A copy that holds less than the plan requires.
    let mut short = good.clone();
    short.copies = CopyTable::new([chunk(1)]);
    assert!(matches!(short.validate().unwrap_err(), PlanError::NotCopied { .. }));
    let mut part = good;
    part.copies = CopyTable::new([chunk(1), PageRange { first: 4 * CHUNK_PAGES, pages: 511 }]);
    assert!(matches!(part.validate().unwrap_err(), PlanError::NotCopied { .. }));
}

#[test]
fn a_medium_without_private_mappings_is_shared_by_chunks_beside_the_copy() {
    let device = ExtentFacts { private: false, ..EXTENT };
    let layout = MemoryLayout::for_size(16 * MIB).unwrap();
    let plan = plan_of(&layout, device, &[], Some(&copies(&[1], &[1]))).unwrap();
    assert_eq!(plan.validate(), Ok(()));
    assert_eq!(source_at(&plan, 0).1, Sharing::Shared);
    assert_eq!(source_at(&plan, CHUNK), (Source::Copy { offset: 0 }, Sharing::Exclusive));
}

#[test]
fn a_snapshot_in_a_directory_is_refused() {
    let refused = parse("firn:copy=4,read=0,granule=64k,learn=on").unwrap();
    assert_eq!(refused.name(), "firn:copy=4,read=0,granule=64k,learn=on");
    assert_eq!(
        refused.copy_rule(),
        Some(Rule { written: 4, read: 0, granule: Granule::Size64K, learn: true })
    );
    let layout = MemoryLayout::for_size(CHUNK).unwrap();
    let input = PlanInput {
        layout: &layout,
        image: ImageFacts { len: CHUNK, stored: CHUNK, ..ImageFacts::default() },
        zero_map: &PageSet::new(512),
        profile: None,
        snapshot: None,
        copies: None,
        host: &HostFacts::read().unwrap(),
    };
    assert!(matches!(refused.plan(&input), Err(PlannerError::NoExtent { .. })));
}

/// Copies of runs of pages.
fn copies_of(runs: &[(u64, u64)]) -> Copies {
    let runs = runs.iter().map(|(first, pages)| PageRange { first: *first, pages: *pages });
    let expected: Vec<_> = runs.collect();
    Copies { table: CopyTable::new(expected.iter().copied()), expected, ..Copies::default() }
}

#[test]
fn runs_of_pages_lie_over_the_extent_and_are_indexed_alone_in_their_chunks() {
    let layout = MemoryLayout::for_size(16 * MIB).unwrap();
    let copies = copies_of(&[(520, 4), (1000, 100), (2048, 512), (3000, 8)]);
    let plan = plan_of(&layout, EXTENT, &[], Some(&copies)).unwrap();
    assert_eq!(plan.validate(), Ok(()));
    let page = |page: u64| page * 4096;
    let is = |at: u64| source_at(&plan, page(at)).0;
    assert_eq!(is(520), Source::Copy { offset: page(512) }, "whole chunks are first in a copy");
    assert_eq!(is(1099), Source::Copy { offset: page(516 + 99) });
    assert_eq!(is(2050), Source::Copy { offset: page(2) });
    assert_eq!(is(524), Source::Extent { offset: EXTENT.offset + page(524) });
    let leaf_of = |at: u64| {
        let covers = |s: &&Segment| (s.guest.start..s.guest.end()).contains(&page(at));
        plan.segments.iter().find(covers).unwrap().leaf
    };
    let leaves = [0, 512, 520, 1100, 1536, 2048, 2560, 3000, 3071, 3072].map(leaf_of);
    let (small, large) = (Leaf::Size4K, Leaf::Size2M);
    assert_eq!(leaves, [large, small, small, small, large, large, small, small, small, large]);
    let work: Vec<_> = plan.schedule.iter().map(|step| step.work).collect();
    let guest = |from: u64, to: u64| GuestRange { start: from * CHUNK, len: (to - from) * CHUNK };
    let expected = [
        Work::Index { guest: guest(0, 1) },
        Work::IndexCopy { guest: guest(1, 3) },
        Work::Index { guest: guest(3, 5) },
        Work::IndexCopy { guest: guest(5, 6) },
        Work::Index { guest: guest(6, 8) },
    ];
    assert_eq!(work, expected);
    // A segment that reads the run beside its own is refused.
    let mut wrong = plan.clone();
    let from = Source::Copy { offset: page(516) };
    for segment in wrong.segments.iter_mut().filter(|s| s.source == from) {
        segment.source = Source::Copy { offset: page(512) };
    }
    assert!(matches!(wrong.validate().unwrap_err(), PlanError::WrongCopyOffset { .. }));
}

#[test]
fn without_a_copy_the_expected_pages_are_populated() {
    let layout = MemoryLayout::for_size(16 * MIB).unwrap();
    let without_copy = |key: &str, copies: Copies| Copies {
        key: key.to_owned(),
        table: CopyTable::default(),
        absent: Some(NoCopy::BeingMade),
        ..copies
    };
    let populated = |plan: &Plan| {
        assert_eq!(plan.validate(), Ok(()));
        let pages = plan.populated.iter().map(|guest| (guest.start / 4096, guest.len / 4096));
        pages.collect::<Vec<_>>()
    };
    let guest = |from: u64, to: u64| GuestRange { start: from * CHUNK, len: (to - from) * CHUNK };
    let index = |from, to| Work::Index { guest: guest(from, to) };
    let populate = |from, to| Work::Populate { guest: guest(from, to) };
    let work = |plan: &Plan| plan.schedule.iter().map(|step| step.work).collect::<Vec<_>>();

    let runs = [(520, 4), (1000, 100), (3000, 8)];
    let fine = without_copy("written=1,read=32,granule=16k", copies_of(&runs));
    let plan = plan_of(&layout, EXTENT, &[], Some(&fine)).unwrap();
    assert_eq!(populated(&plan), runs);
    let steps = [index(0, 1), populate(1, 3), index(3, 5), populate(5, 6), index(6, 8)];
    assert_eq!(work(&plan), steps);
    assert_eq!(plan.layers.len(), 1, "all is mapped from the extent");

    // Of whole chunks the profile has the pages: 5 is all zero, and 7 is not expected any more.
    let page = |first| PageRange { first, pages: 2 };
    let written = Some([520, 1023, 2600, 3600].map(page).to_vec());
    let profile = Profile { written, ..Profile::default() };
    let whole = without_copy("written=1,read=32", copies(&[1, 2, 5], &[]));
    let plan = plan_by(&layout, EXTENT, &[5], Some(&whole), Some(&profile)).unwrap();
    assert_eq!(populated(&plan), [(520, 2), (1023, 2)]);
    assert_eq!(work(&plan), [index(0, 1), populate(1, 3), index(3, 5), index(6, 8)]);
    let plan = plan_of(&layout, EXTENT, &[5], Some(&whole)).unwrap();
    assert_eq!(populated(&plan), []);
    // A run of the profile in two chunks is cut where one of them is not expected.
    for (chunks, expected) in [([1], [(520, 2), (1023, 1)].to_vec()), ([2], [(1024, 1)].to_vec())] {
        let part = without_copy("written=16,read=32", copies(&chunks, &[]));
        let plan = plan_by(&layout, EXTENT, &[], Some(&part), Some(&profile)).unwrap();
        assert_eq!(populated(&plan), expected);
    }
    // So are runs of pages that were widened, to granules or to whole chunks. Without a profile,
    // runs below a chunk are populated.
    let wide = copies_of(&[(500, 24), (1024, 520)]);
    let wide = without_copy("written=1,read=32,granule=auto", wide);
    let plan = plan_by(&layout, EXTENT, &[], Some(&wide), Some(&profile)).unwrap();
    assert_eq!(populated(&plan), [(520, 2), (1024, 1)]);
    let plan = plan_of(&layout, EXTENT, &[], Some(&wide)).unwrap();
    assert_eq!(populated(&plan), [(500, 24)]);
    let full = Copies { absent: Some(NoCopy::ArenaFull), ..wide };
    let plan = plan_by(&layout, EXTENT, &[], Some(&full), Some(&profile)).unwrap();
    assert_eq!(populated(&plan), []);

    let device = ExtentFacts { private: false, ..EXTENT };
    let plan = plan_by(&layout, device, &[], Some(&whole), Some(&profile)).unwrap();
    assert_eq!(populated(&plan), []);
}

#[test]
fn without_private_mappings_a_pager_serves_what_is_between_runs_of_pages() {
    let device = ExtentFacts { private: false, ..EXTENT };
    let layout = MemoryLayout::for_size(16 * MIB).unwrap();
    let copies = copies_of(&[(520, 4), (1000, 100), (2048, 512), (3000, 8)]);
    let plan = plan_of(&layout, device, &[], Some(&copies)).unwrap();
    assert_eq!(plan.validate(), Ok(()));
    assert_eq!(plan.pager.as_deref(), Some("granule=16"));
    let page = |page: u64| page * 4096;
    let is = |at: u64| source_at(&plan, page(at));
    for at in [512, 519, 524, 999, 1100, 1535, 2560, 3008, 3071] {
        assert_eq!(is(at), (Source::Pager { offset: page(at) }, Sharing::Exclusive), "{at}");
    }
    for at in [0, 511, 1536, 2047, 3072] {
        let extent = Source::Extent { offset: EXTENT.offset + page(at) };
        assert_eq!(is(at), (extent, Sharing::Shared), "{at}");
    }
    assert_eq!(is(520).0, Source::Copy { offset: page(512) });
    // One mapping for the chunks that are cut, and one for each run.
    assert_eq!(plan.layers.len(), 1 + 2 + 4);
    let indexed = plan.schedule.iter().filter_map(|step| match step.work {
        Work::Index { guest } => Some((guest.start, guest.end())),
        _ => None,
    });
    let chunks = [(0, 1), (3, 5), (6, 8)].map(|(from, to)| (from * CHUNK, to * CHUNK));
    assert_eq!(indexed.collect::<Vec<_>>(), chunks);
    let whole = plan_of(&layout, device, &[], Some(&copies_of(&[(2048, 512)]))).unwrap();
    assert_eq!(whole.pager, None);
    // The extent is not visible anywhere.
    let everywhere = copies_of(&[0, 1, 2, 3, 4, 5, 6, 7].map(|chunk| (chunk * 512 + 9, 3)));
    let plan = plan_of(&layout, device, &[], Some(&everywhere)).unwrap();
    assert_eq!((plan.validate(), plan.extent_sharing()), (Ok(()), Some(Sharing::Shared)));
}

proptest! {
    #[test]
    fn plans_of_random_write_sets_are_valid_and_read_every_page_from_its_own_offset(
        sizes in select(vec![vec![16], vec![7, 9], vec![5, 3, 1]]),
        crooked in select(vec![0_u64, 4096]),
        expected in btree_set(0..20_u64, 0..20),
        copied in btree_set(0..16_u64, 0..16),
        zero in btree_set(0..16_u64, 0..16),
        private in select(vec![true, false]),
    ) {
        let mut start = 4 * MIB;
        let regions = sizes.iter().map(|chunks| {
            let region = MemoryRegion { guest_addr: start, len: chunks * CHUNK + crooked };
            start += 64 * MIB;
            region
        });
        let layout = MemoryLayout::new(regions.collect()).unwrap();
        let whole = layout.total_bytes() / CHUNK;
        let [expected, zero] = [expected, zero].map(|set| set.into_iter().collect::<Vec<_>>());
        let copied: Vec<_> = copied.into_iter().filter(|chunk| *chunk < whole).collect();
        let copies = copies(&expected, &copied);
        let extent = ExtentFacts { private, ..EXTENT };
        let Ok(plan) = plan_of(&layout, extent, &zero, Some(&copies)) else {
            // Only on a medium without private mappings, for a guest that is not whole chunks.
            prop_assert!(!private && crooked > 0);
            return Ok(());
        };
        prop_assert_eq!(plan.validate(), Ok(()));
        for region in layout.regions() {
            for at in (0..region.len).step_by(4096) {
                let image = region.image_offset + at;
                match source_at(&plan, region.guest_addr + at) {
                    (Source::Copy { offset }, Sharing::Exclusive) => {
                        prop_assert_eq!(copies.table.place(image), Some(offset));
                    }
                    (Source::Zero, Sharing::Exclusive) => {
                        prop_assert!(zero.contains(&(image / CHUNK)) && expected.contains(&(image / CHUNK)));
                    }
                    (Source::Extent { offset }, _) => prop_assert_eq!(offset, EXTENT.offset + image),
                    other => prop_assert!(false, "{:?}", other),
                }
            }
        }
    }

    #[test]
    fn plans_of_random_runs_are_valid_and_read_every_page_from_its_own_offset(
        sizes in select(vec![vec![16], vec![7, 9], vec![5, 3, 1]]),
        crooked in select(vec![0_u64, 4096]),
        runs in vec((0..8192_u64, 1..1200_u64), 0..20),
        copied in 0..20_usize,
        private in select(vec![true, false]),
    ) {
        let mut start = 4 * MIB;
        let regions = sizes.iter().map(|chunks| {
            let region = MemoryRegion { guest_addr: start, len: chunks * CHUNK + crooked };
            start += 64 * MIB;
            region
        });
        let layout = MemoryLayout::new(regions.collect()).unwrap();
        let mut set = PageSet::new(layout.pages());
        for (first, pages) in runs.iter().filter(|(first, _)| *first < layout.pages()) {
            set.insert_range(*first..(first + pages).min(layout.pages()));
        }
        let expected = set.to_ranges();
        let table = CopyTable::new(expected.iter().copied().take(copied));
        let key = "written=1,read=0,granule=4k".to_owned();
        // Whole chunks among them are populated by the profile.
        let profile = Profile { written: Some(expected.clone()), ..Profile::default() };
        let absent = table.is_empty().then_some(NoCopy::BeingMade);
        let copies = Copies { key, expected, table, absent, ..Copies::default() };
        let extent = ExtentFacts { private, ..EXTENT };
        let Ok(plan) = plan_by(&layout, extent, &[], Some(&copies), Some(&profile)) else {
            // Only on a medium without private mappings, for a guest that is not whole chunks.
            prop_assert!(!private && crooked > 0);
            return Ok(());
        };
        prop_assert_eq!(plan.validate(), Ok(()));
        let populated: u64 = plan.populated.iter().map(|guest| guest.len / 4096).sum();
        let is_populated = private && copies.table.is_empty();
        prop_assert_eq!(populated, if is_populated { set.count() } else { 0 });
        let is_in_cut_chunk = |image: u64| {
            let chunk = image / CHUNK * 512..(image / CHUNK + 1) * 512;
            chunk.into_iter().any(|page| copies.table.place(page * 4096).is_some())
        };
        for region in layout.regions() {
            for at in (0..region.len).step_by(4096) {
                let image = region.image_offset + at;
                match source_at(&plan, region.guest_addr + at) {
                    (Source::Copy { offset }, Sharing::Exclusive) => {
                        prop_assert_eq!(copies.table.place(image), Some(offset));
                    }
                    (Source::Pager { offset }, Sharing::Exclusive) => {
                        prop_assert!(!private && is_in_cut_chunk(image));
                        prop_assert_eq!(offset, image);
                    }
                    (Source::Extent { offset }, Sharing::Shared) => {
                        prop_assert!(!private && !is_in_cut_chunk(image));
                        prop_assert_eq!(offset, EXTENT.offset + image);
                    }
                    (Source::Extent { offset }, Sharing::PrivateCow) => {
                        prop_assert_eq!(offset, EXTENT.offset + image);
                        let is_aligned = region.image_offset.is_multiple_of(CHUNK);
                        let chunk = PageRange::from(image / CHUNK * 512..(image / CHUNK + 1) * 512);
                        let is_whole = chunk.range().all(|page| copies.table.place(page * 4096).is_some());
                        // Whole chunks at the end of a region and unaligned regions are not copied.
                        prop_assert!(!is_aligned || is_whole || copies.table.place(image).is_none());
                    }
                    other => prop_assert!(false, "{:?}", other),
                }
            }
        }
    }
}
