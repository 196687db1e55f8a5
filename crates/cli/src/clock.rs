//! Time in ns: the monotonic clock, which all processes of a host share, and durations.

use std::time::Duration;

pub(crate) use firn_memory::now_ns as now;

/// Names the moment at which a request came in, by [`now`] of the process that got it.
pub(crate) const REQUEST_VARIABLE: &str = "FIRN_REQUEST_NS";

/// When the request came in, if whoever started this process said so.
pub(crate) fn request() -> Option<u64> {
    std::env::var(REQUEST_VARIABLE).ok()?.parse().ok()
}

/// A duration in ns.
pub(crate) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
