//! Time in ns: when a request came in, and durations.

use std::time::Duration;

/// Names the moment at which a request came in, by [`firn_memory::now_ns`] of the process that got it.
pub(crate) const REQUEST_VARIABLE: &str = "FIRN_REQUEST_NS";

/// When the request came in, if whoever started this process said so.
pub(crate) fn request() -> Option<u64> {
    std::env::var(REQUEST_VARIABLE).ok()?.parse().ok()
}

/// A duration in ns.
pub(crate) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
