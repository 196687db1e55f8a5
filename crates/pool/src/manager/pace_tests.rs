use std::sync::Arc;

use super::*;

#[test]
fn work_does_not_pause_without_starts() {
    let pace = Pace::new();
    let mut budget = Pace::budget();
    pace.yield_to_starts(&mut budget);
    assert_eq!(budget.0, MAX_PAUSE);
}

#[test]
fn pauses_for_starts_are_bounded() {
    let pace = Pace::new();
    let mut budget = Pace::budget();
    pace.start();
    pace.yield_to_starts(&mut budget);
    assert!(budget.0 < MAX_PAUSE, "{budget:?}");
    // The pauses end even with a continuous stream of starts.
    while !budget.0.is_zero() {
        pace.start();
        pace.yield_to_starts(&mut budget);
    }
}

#[test]
fn work_does_not_pause_while_a_caller_waits_for_it() {
    let pace = Arc::new(Pace::new());
    let mut budget = Pace::budget();
    pace.start();
    pace.without_pauses(|| pace.yield_to_starts(&mut budget));
    assert_eq!(budget.0, MAX_PAUSE);
}
