use std::sync::Arc;

use super::*;

#[test]
fn without_starts_the_work_does_not_wait() {
    let pace = Pace::new();
    let mut patience = Pace::patience();
    pace.give_way(&mut patience);
    assert_eq!(patience.0, PATIENCE);
}

#[test]
fn work_waits_for_starts_but_not_for_ever() {
    let pace = Pace::new();
    let mut patience = Pace::patience();
    pace.start();
    pace.give_way(&mut patience);
    assert!(patience.0 < PATIENCE, "{patience:?}");
    // However many come, it goes on in the end.
    while !patience.0.is_zero() {
        pace.start();
        pace.give_way(&mut patience);
    }
}

#[test]
fn work_that_is_waited_for_gives_way_to_nobody() {
    let pace = Arc::new(Pace::new());
    let mut patience = Pace::patience();
    pace.start();
    pace.hurry(|| pace.give_way(&mut patience));
    assert_eq!(patience.0, PATIENCE);
}
