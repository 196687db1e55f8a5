use std::time::Duration;

use super::{format_milliseconds, nanoseconds, now_ns};

#[test]
fn durations_saturate() {
    assert_eq!(nanoseconds(Duration::from_micros(3)), 3000);
    assert_eq!(nanoseconds(Duration::MAX), u64::MAX);
}

#[test]
fn milliseconds_are_readable() {
    assert_eq!(format_milliseconds(0), "0.0 ms");
    assert_eq!(format_milliseconds(1_250_000), "1.2 ms");
    assert_eq!(format_milliseconds(1_234_000_000), "1234 ms");
}

#[test]
fn the_monotonic_clock_does_not_go_backwards() {
    let first = now_ns();
    assert!(now_ns() >= first);
}
