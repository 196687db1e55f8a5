//! Sizes between the guest's `u64` and this process's `usize`, and times as numbers.

use std::time::Instant;

use rustix::time::{ClockId, clock_gettime};

const _: () = assert!(usize::BITS == 64, "firn maps guest memory whole and needs 64-bit addresses");

/// A size or address as `usize`, which is 64 bits wide here.
#[expect(clippy::cast_possible_truncation, reason = "usize has 64 bits: asserted above")]
pub(crate) const fn usize_of(value: u64) -> usize {
    value as usize
}

/// Nanoseconds since `begun`.
pub(crate) fn ns_since(begun: Instant) -> u64 {
    u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Nanoseconds of CLOCK_MONOTONIC, which all processes of a host share.
#[must_use]
pub fn now_ns() -> u64 {
    clock_ns(ClockId::Monotonic)
}

/// Nanoseconds that this process has computed, on all its threads.
#[must_use]
pub fn cpu_ns() -> u64 {
    clock_ns(ClockId::ProcessCPUTime)
}

fn clock_ns(id: ClockId) -> u64 {
    let time = clock_gettime(id);
    let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
    seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or_default()
}
