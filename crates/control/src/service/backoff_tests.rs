use super::*;

#[test]
fn waits_double_up_to_five_minutes() {
    let mut backoff = Backoff::since(Instant::now());
    let waits: Vec<u64> =
        std::iter::from_fn(|| backoff.next()).map(|wait| wait.as_secs()).take(11).collect();
    assert_eq!(waits, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]);
}

#[test]
fn nothing_is_tried_again_after_six_hours() {
    let mut backoff = Backoff::since(Instant::now() - (MAX_AGE - Duration::from_secs(60)));
    assert!(std::iter::from_fn(|| backoff.next()).count() < 7);
    assert_eq!(backoff.allows(Duration::from_secs(90)), None);
    assert!(backoff.allows(Duration::from_secs(1)).is_some());
}
