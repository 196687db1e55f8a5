use std::ops::Range;

use proptest::prelude::{prop_assert, prop_assert_eq, proptest};

use super::{best_fit, gaps};

fn fit(used: &[Range<u64>], need: u64, align: u64) -> Result<u64, u64> {
    best_fit(used.iter().cloned(), &(1..31), need, align)
}

#[test]
fn smallest_sufficient_gap_is_used() {
    let used = [3..5, 8..20];
    assert_eq!(gaps(used.iter().cloned(), &(1..31)).collect::<Vec<_>>(), [1..3, 5..8, 20..31]);
    assert_eq!(fit(&used, 2, 1), Ok(1));
    assert_eq!(fit(&used, 3, 1), Ok(5));
    assert_eq!(fit(&used, 4, 1), Ok(20));
    assert_eq!(fit(&used, 2, 4), Ok(20));
    assert_eq!(fit(&used, 7, 8), Ok(24));
}

#[test]
fn missing_granules_are_reported() {
    let used = [3..5, 8..20];
    assert_eq!(fit(&used, 13, 1), Err(2));
    assert_eq!(fit(&used, 9, 8), Err(2));
    assert_eq!(fit(&[Range { start: 1, end: 31 }], 2, 1), Err(2));
    assert_eq!(fit(&used, 1, 64), Err(1));
}

proptest! {
    /// Compares with a model that examines every granule.
    #[test]
    fn a_place_is_found_if_one_exists(
        taken in proptest::collection::vec(proptest::bool::weighted(0.3), 40),
        need in 1_u64..8,
        align in 0_u32..4,
    ) {
        let align = 1_u64 << align;
        let data = 2..40_u64;
        let free = |granule: u64| data.contains(&granule) && !taken[usize::try_from(granule).unwrap()];
        let used = (2..40).filter(|granule| !free(*granule)).map(|granule| granule..granule + 1);
        let room = |begin: u64| (begin..40).take_while(|granule| free(*granule)).count() as u64;
        let places: Vec<u64> = (2..40).filter(|begin| begin % align == 0).collect();
        match best_fit(used, &data, need, align) {
            Ok(begin) => {
                prop_assert_eq!(begin % align, 0);
                prop_assert!(room(begin) >= need);
            }
            Err(missing) => {
                let largest = places.iter().map(|begin| room(*begin)).max().unwrap_or(0);
                prop_assert!(largest < need);
                prop_assert_eq!(missing, need - largest);
            }
        }
    }
}
