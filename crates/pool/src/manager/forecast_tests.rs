use proptest::collection::vec;
use proptest::prelude::{prop_assert, proptest};

use super::*;

#[test]
fn what_a_profile_names_is_expected_at_once_and_given_up_when_it_is_not_written() {
    let mut forecast = Forecast::default();
    forecast.seed(&[1, 5]);
    assert_eq!(forecast.expected(), [1, 5]);
    for run in 1..=5 {
        assert_eq!(forecast.expected(), [1, 5], "run {run}");
        forecast.observe(&[1]);
        forecast.seed(&[1, 5]);
    }
    assert_eq!(forecast.expected(), [1]);
}

#[test]
fn a_chunk_is_learnt_from_two_runs() {
    let mut forecast = Forecast::default();
    forecast.observe(&[7]);
    assert!(forecast.expected().is_empty(), "one run may be an exception");
    forecast.observe(&[7]);
    assert_eq!(forecast.expected(), [7]);
}

#[test]
fn a_new_profile_is_taken_over() {
    let mut forecast = Forecast::default();
    forecast.seed(&[1]);
    forecast.seed(&[2]);
    assert_eq!(forecast.expected(), [1, 2]);
    for _ in 0..5 {
        forecast.observe(&[2]);
    }
    assert_eq!(forecast.expected(), [2]);
}

proptest! {
    #[test]
    fn runs_that_write_the_same_are_foreseen_whatever_came_before(
        seed in vec(0..40_u32, 0..10),
        before in vec(vec(0..40_u32, 0..10), 0..10),
        same in vec(0..40_u32, 0..10),
    ) {
        let mut forecast = Forecast::default();
        forecast.seed(&seed);
        before.iter().for_each(|written| forecast.observe(written));
        // Twice suffices to learn, FULL times to forget.
        let mut same = same;
        same.sort_unstable();
        same.dedup();
        forecast.observe(&same);
        forecast.observe(&same);
        prop_assert!(same.iter().all(|chunk| forecast.expected().contains(chunk)));
        for _ in 0..FULL {
            forecast.observe(&same);
        }
        prop_assert!(forecast.expected() == same);
    }
}
