use proptest::collection::vec;
use proptest::prelude::{prop_assert, prop_assert_eq, proptest};

use super::*;

fn run(first: u64, pages: u64) -> PageRange {
    PageRange { first, pages }
}

#[test]
fn whole_chunks_come_first_in_a_copy() {
    let runs = [run(4, 8), run(500, 600), run(2048, 512), run(4000, 1)];
    let page = |page: u64| page * PAGE_SIZE;
    let expected = [
        (run(4, 8), page(1024)),
        (run(500, 12), page(1032)),
        (run(512, 512), 0),
        (run(1024, 76), page(1044)),
        (run(2048, 512), page(512)),
        (run(4000, 1), page(1120)),
    ];
    assert_eq!(pack_copy(&runs), expected);
    assert_eq!(bytes_of(&runs), page(1121));
}

#[test]
fn runs_beyond_guest_memory_are_cut() {
    let runs = vec![run(900, u64::MAX), run(3, 2), run(5, 1), run(4, 1), run(2000, 1), run(7, 0)];
    assert_eq!(normal(runs, 1000), [run(3, 3), run(900, 100)]);
    assert_eq!(first_pages(&[run(3, 3), run(900, 100)], 4), [run(3, 3), run(900, 1)]);
    assert_eq!(first_pages(&[run(3, 3)], 0), []);
}

proptest! {
    #[test]
    fn runs_are_packed_once_and_without_gaps(runs in vec((0..4000_u64, 1..1500_u64), 0..20)) {
        let runs = normal(runs.into_iter().map(|(first, pages)| run(first, pages)).collect(), 4096);
        for pair in runs.windows(2) {
            prop_assert!(pair[0].range().end < pair[1].first);
        }
        let parts = pack_copy(&runs);
        let pages = |runs: &[PageRange]| runs.iter().flat_map(PageRange::range).collect::<Vec<_>>();
        prop_assert_eq!(pages(&parts.iter().map(|(part, _)| *part).collect::<Vec<_>>()), pages(&runs));
        let mut places: Vec<_> =
            parts.iter().map(|(part, place)| (*place, place + part.pages * PAGE_SIZE)).collect();
        places.sort_unstable();
        let ends = places.iter().map(|(_, end)| *end);
        let starts = places.iter().map(|(start, _)| *start).chain([bytes_of(&runs)]);
        prop_assert!(std::iter::once(0).chain(ends).eq(starts));
        for (part, place) in parts {
            let whole = part.range().end / CHUNK_PAGES > part.first.div_ceil(CHUNK_PAGES);
            prop_assert_eq!(whole, is_whole(&part));
            prop_assert!(!whole || place.is_multiple_of(COPY_CHUNK));
        }
    }
}
