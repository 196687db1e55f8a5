//! Times and durations in nanoseconds.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// A duration in nanoseconds; `u64::MAX` when it does not fit.
#[must_use]
pub fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Nanoseconds since `start`.
#[must_use]
pub fn ns_since(start: Instant) -> u64 {
    nanoseconds(start.elapsed())
}

/// CLOCK_MONOTONIC in nanoseconds. All processes of a host share this clock.
#[must_use]
pub fn now_ns() -> u64 {
    clock_ns(ClockId::Monotonic)
}

/// CPU time of this process, all threads together, in nanoseconds.
#[must_use]
pub fn cpu_ns() -> u64 {
    clock_ns(ClockId::ProcessCPUTime)
}

fn clock_ns(id: ClockId) -> u64 {
    let time = clock_gettime(id);
    let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
    seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or_default()
}

/// Nanoseconds as milliseconds, such as `12.3 ms`; from 100 ms on without a fraction.
#[must_use]
pub fn format_milliseconds(ns: u64) -> String {
    let microseconds = ns / 1000;
    let (whole, fraction) = (microseconds / 1000, microseconds % 1000);
    if whole >= 100 { format!("{whole} ms") } else { format!("{whole}.{} ms", fraction / 100) }
}

#[cfg(test)]
#[path = "time_tests.rs"]
mod tests;
