use firn_base::PageRange;

use super::*;

#[test]
fn ranges_are_contiguous_and_sorted_by_their_earliest_page() {
    let mut entered = vec![None; 32];
    let mut enter = |page: usize, at_ns, pages| entered[page] = Some(Entered { at_ns, pages });
    enter(1, 5_000, 1);
    enter(2, 1_000, 1);
    enter(3, 9_000, 1);
    enter(10, 2_000, 1);
    // A folio of four pages, and one of eight of which only two are in the file.
    enter(20, 3_000, 4);
    enter(30, 500, 8);
    let range = |first, pages, at_ns| CachedRun { run: PageRange { first, pages }, at_ns };
    let expected = [range(30, 2, 0), range(1, 3, 200), range(10, 1, 1_200), range(20, 4, 2_200)];
    assert_eq!(ranges(&entered, 800), expected);
    assert_eq!(ranges(&[], 0), []);
}

#[test]
fn pages_that_entered_before_the_guest_ran_keep_their_order() {
    let mut entered = vec![None; 32];
    let mut enter = |page: usize, at_ns| entered[page] = Some(Entered { at_ns, pages: 1 });
    enter(3, 1_003);
    enter(9, 1_001);
    enter(12, 1_002);
    // At the same time.
    enter(25, 1_000);
    enter(20, 1_000);
    let ranges = ranges(&entered, 1_002);
    let order: Vec<_> = ranges.iter().map(|range| (range.run.first, range.at_ns)).collect();
    assert_eq!(order, [(20, 0), (25, 0), (9, 0), (12, 0), (3, 1)]);
}
