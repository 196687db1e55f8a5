use std::sync::Arc;

use super::*;

#[test]
fn work_does_not_pause_without_starts() {
    let pace = Pace::new();
    let mut pauses = pace.pauses();
    pauses.yield_to_starts();
    assert_eq!(pauses.left, MAX_PAUSE);
}

#[test]
fn pauses_for_starts_are_bounded() {
    let pace = Pace::new();
    let mut pauses = pace.pauses();
    pace.start();
    pauses.yield_to_starts();
    assert!(pauses.left < MAX_PAUSE, "{pauses:?}");
    // The pauses end even with a continuous stream of starts.
    while !pauses.left.is_zero() {
        pace.start();
        pauses.yield_to_starts();
    }
}

#[test]
fn work_does_not_pause_while_a_caller_waits_for_it() {
    let pace = Arc::new(Pace::new());
    let mut pauses = pace.pauses();
    pace.start();
    pace.without_pauses(|| pauses.yield_to_starts());
    assert_eq!(pauses.left, MAX_PAUSE);
}
