use super::*;

#[test]
fn ranges_are_contiguous_and_sorted_by_their_earliest_page() {
    let mut entered = vec![None; 32];
    let mut enter = |page: usize, at_ns, pages| entered[page] = Some(Entered { at_ns, pages });
    enter(1, 5_000, 1);
    enter(2, 1_000, 1);
    enter(3, 9_000, 1);
    enter(10, 2_000, 1);
    // Four pages at once, and eight of which only two are the file's.
    enter(20, 3_000, 4);
    enter(30, 500, 8);
    let range = |first, pages, at_ns| CachedRun { run: Run { first, pages }, at_ns };
    let expected = [range(30, 2, 0), range(1, 3, 200), range(10, 1, 1_200), range(20, 4, 2_200)];
    assert_eq!(ranges(&entered, 800), expected);
    assert_eq!(ranges(&[], 0), []);
}
