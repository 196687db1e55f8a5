use firn_base::PageRange;
use proptest::collection::vec;
use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};

use super::*;

fn expected(prediction: &Prediction) -> Vec<u32> {
    let pages = prediction.expected(1);
    pages.iter().flat_map(PageRange::range).map(|page| u32::try_from(page).unwrap()).collect()
}

#[test]
fn granules_of_the_profile_are_given_up_after_five_runs_that_do_not_use_them() {
    let mut prediction = Prediction::of(&[1, 5]);
    assert_eq!(expected(&prediction), [1, 5]);
    for run in 1..=5 {
        assert_eq!(expected(&prediction), [1, 5], "run {run}");
        prediction.observe(&[1]);
    }
    assert_eq!(expected(&prediction), [1]);
}

#[test]
fn a_granule_is_learnt_from_two_runs() {
    let mut prediction = Prediction::default();
    prediction.observe(&[7]);
    assert!(expected(&prediction).is_empty(), "one run may be an exception");
    prediction.observe(&[7]);
    assert_eq!(expected(&prediction), [7]);
}

#[test]
fn runs_of_another_input_than_the_profile_replace_its_granules() {
    let mut prediction = Prediction::of(&[0, 1]);
    let mut by_run = Vec::new();
    for _ in 0..6 {
        by_run.push(expected(&prediction));
        prediction.observe(&[3, 5]);
    }
    assert_eq!(by_run[0], [0, 1]);
    assert_eq!(by_run[1], [0, 1], "one run may be an exception");
    assert_eq!(by_run[2], [0, 1, 3, 5]);
    assert_eq!(by_run[5], [3, 5]);
}

#[test]
fn only_whole_granules_of_guest_memory_count() {
    assert_eq!(within(vec![0, 1, 3, 4, u64::MAX], 512, 4 * 512 + 7), [0, 1, 3]);
    assert_eq!(within(vec![0, 9, 10], 4, 43), [0, 9]);
}

#[test]
fn expected_granules_are_runs_of_pages() {
    let runs = [PageRange { first: 8, pages: 8 }, PageRange { first: 28, pages: 4 }];
    assert_eq!(Prediction::of(&[2, 3, 7]).expected(4), runs);
}

#[test]
fn an_invalid_state_is_refused() {
    let encoded = |runs: &[ScoredRun]| postcard::to_stdvec(runs).unwrap();
    assert_eq!(Prediction::decode(&encoded(&[(3, 2, 8)])), Some(Prediction::of(&[3, 4])));
    for bad in [(0, 1, 0), (0, 1, FULL + 1), (0, MAX_GRANULES + 1, 1), (u32::MAX, 1, 1)] {
        assert_eq!(Prediction::decode(&encoded(&[bad])), None, "{bad:?}");
    }
    assert_eq!(Prediction::decode(&[]), None);
    assert_eq!(Prediction::decode(&[0, 0]), None);
}

proptest! {
    #[test]
    fn runs_that_write_the_same_are_expected_after_any_earlier_runs(
        first in vec(0..40_u32, 0..10),
        before in vec(vec(0..40_u32, 0..10), 0..10),
        same in vec(0..40_u32, 0..10),
    ) {
        let mut prediction = Prediction::of(&first);
        before.iter().for_each(|written| prediction.observe(written));
        // Two runs suffice to learn a granule, and FULL runs to forget it.
        let mut same = same;
        same.sort_unstable();
        same.dedup();
        prediction.observe(&same);
        prediction.observe(&same);
        prop_assert!(same.iter().all(|chunk| expected(&prediction).contains(chunk)));
        for _ in 0..FULL {
            prediction.observe(&same);
        }
        prop_assert!(expected(&prediction) == same);
    }

    #[test]
    fn the_state_survives_its_encoding(
        first in vec(0..40_u32, 0..20),
        runs in vec(vec(0..40_u32, 0..10), 0..10),
    ) {
        let mut prediction = Prediction::of(&first);
        runs.iter().for_each(|written| prediction.observe(written));
        prop_assert_eq!(Prediction::decode(&prediction.encode()), Some(prediction));
    }

    #[test]
    fn arbitrary_bytes_are_decoded_or_refused(bytes in vec(any::<u8>(), 0..40)) {
        let _ = Prediction::decode(&bytes);
    }
}
