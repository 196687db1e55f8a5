use proptest::collection::btree_set;
use proptest::prelude::{any, prop_assert, proptest};

use super::*;

fn run(first: u64, pages: u64) -> PageRange {
    PageRange { first, pages }
}

#[test]
fn gaps_that_cost_less_than_a_mapping_are_copied_too() {
    let most = (MAPPING - 1) / (ENTRY + PAGE);
    let expected = [run(0, 4), run(4 + most, 4), run(100, 4), run(105 + most, 4)];
    let merged = [run(0, 8 + most), run(100, 4), run(105 + most, 4)];
    assert_eq!(runs(&expected, 512, false), merged);
}

#[test]
fn a_chunk_is_copied_as_a_whole_where_its_runs_cost_more() {
    let few: Vec<_> = (0..16).map(|number| run(512 + number * 32, 4)).collect();
    let many: Vec<_> = (0..42).map(|number| run(1024 + number * 12, 4)).collect();
    let expected = [few.as_slice(), &many].concat();
    let whole = [few.as_slice(), &[run(1024, 512)]].concat();
    assert_eq!(runs(&expected, 4096, true), whole);
    assert_eq!(runs(&expected, 4096, false), expected);
    // Guest memory ends within the chunk.
    assert_eq!(runs(&expected, 1535, true), runs(&expected, 1535, false));
}

#[test]
fn more_runs_than_mappings_are_whole_chunks() {
    let pages = 512 * 400;
    let expected: Vec<_> = (0..pages / 16).map(|number| run(number * 16, 4)).collect();
    assert_eq!(runs(&expected, pages, false), [run(0, pages)]);
}

proptest! {
    #[test]
    fn runs_hold_all_expected_pages_and_never_more_than_their_chunks(
        granules in btree_set(0..600_u64, 0..300),
        pages in 1..2400_u64,
        whole in any::<bool>(),
    ) {
        let expected: Vec<_> = granules.iter().map(|granule| run(granule * 4, 4)).collect();
        let wanted = PageSet::of(&expected, pages);
        let found = runs(&expected, pages, whole);
        let held = PageSet::of(&found, pages);
        prop_assert!(wanted.iter().all(|page| held.get(page)));
        let chunks: Vec<_> = granules.iter().map(|g| run(g * 4 / CHUNK_PAGES * CHUNK_PAGES, CHUNK_PAGES)).collect();
        let chunks = PageSet::of(&chunks, pages);
        prop_assert!(held.iter().all(|page| chunks.get(page)));
        // Ascending, apart from each other, and within guest memory.
        prop_assert!(found.windows(2).all(|pair| pair[0].range().end < pair[1].first));
        prop_assert!(found.last().is_none_or(|last| last.range().end <= pages));
        // Whole chunks are taken only where they cost less.
        let total = |runs: &[PageRange]| -> u64 {
            pack_costs(runs, pages)
        };
        prop_assert!(!whole || total(&found) <= total(&runs(&expected, pages, false)));
    }
}

/// The cost of a copy, chunk by chunk.
fn pack_costs(runs: &[PageRange], pages: u64) -> u64 {
    let set = PageSet::of(runs, pages);
    let chunk = |start: u64| {
        let parts: Vec<_> =
            set.ranges_in(start..(start + CHUNK_PAGES).min(pages)).map(PageRange::from).collect();
        if parts == [run(start, CHUNK_PAGES)] { whole_chunk() } else { cost(&parts) }
    };
    (0..pages).step_by(512).map(chunk).sum()
}
