use super::median;

#[test]
fn the_median_of_an_even_number_is_the_upper_one() {
    assert_eq!(median([].into_iter()), 0);
    assert_eq!(median([5].into_iter()), 5);
    assert_eq!(median([9, 1, 5].into_iter()), 5);
    assert_eq!(median([9, 1, 5, 7].into_iter()), 7);
}
