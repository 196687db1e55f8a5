use std::time::Duration;

use super::super::testing::{Guest, NEEDS_RESET, STATUS};
use super::super::{BalloonState, RateLimit, RestoreDeviceError, TokenBucket};
use super::*;

#[test]
fn buffers_are_filled_with_random_bytes() {
    let mut guest = Guest::started(Rng::new(None));
    let first = guest.request(0, &[], &[64]);
    let second = guest.request(0, &[], &[40, 24]);
    assert_eq!((first.len(), second.len()), (64, 64));
    assert_ne!(first, second);
    // Sixteen consecutive zeros do not occur by chance.
    assert!(second.chunks(16).all(|part| part != [0; 16]));
}

#[test]
fn one_request_gets_at_most_a_page() {
    let mut guest = Guest::started(Rng::new(None));
    assert_eq!(guest.request(0, &[], &[8192, 8192]).len(), 4096);
    assert_eq!(guest.request(0, &[b"not for reading"], &[]).len(), 0);
    assert_eq!(guest.get(STATUS) & NEEDS_RESET, 0);
}

#[test]
fn a_request_that_is_pending_at_a_freeze_gets_other_bytes_in_each_clone() {
    let mut guest = Guest::started(Rng::new(None));
    guest.add(0, &[], &[32]);
    let state = guest.save();
    let mut answers = Vec::new();
    for _ in 0..2 {
        let mut clone = guest.restored(Rng::new(None), &state);
        answers.push(clone.used(0).unwrap().data);
    }
    assert_ne!(answers[0], answers[1]);
}

#[test]
fn the_state_of_another_device_is_refused() {
    let other = DeviceState::Balloon(BalloonState::default());
    let result = Rng::new(None).restore(&other, true);
    assert!(matches!(result, Err(RestoreDeviceError::OtherDevice { id: 4 })));
}

#[test]
fn a_limited_device_answers_the_rest_later() {
    let bytes = TokenBucket { size: 64, burst: 0, refill: Duration::from_millis(20) };
    let limit = RateLimit { bytes: Some(bytes), operations: None };
    let mut guest = Guest::started(Rng::new(Some(RateLimiter::new(limit).unwrap())));
    for _ in 0..3 {
        guest.add(0, &[], &[64]);
    }
    guest.kick(0);
    let mut answered = 0;
    while answered < 3 {
        guest.run();
        answered += std::iter::from_fn(|| guest.used(0)).count();
    }
    let counters = guest.transport().device().counters();
    assert_eq!((counters.bytes, counters.failures), (3 * 64, 0));
    assert!(counters.limiter.delays >= 2, "{counters:?}");
    assert!(guest.used(0).is_none());
}
