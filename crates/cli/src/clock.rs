//! Time in ns: the monotonic clock, which all processes of a host share, and durations.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Names the moment at which a request came in, by [`now`] of the process that got it.
pub(crate) const REQUEST_VARIABLE: &str = "FIRN_REQUEST_NS";

/// ns of CLOCK_MONOTONIC.
pub(crate) fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
    seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or_default()
}

/// When the request came in, if whoever started this process said so.
pub(crate) fn request() -> Option<u64> {
    std::env::var(REQUEST_VARIABLE).ok()?.parse().ok()
}

/// A duration in ns.
pub(crate) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
