//! When a request came in, in ns of CLOCK_MONOTONIC.

/// The variable with the time at which a request came in, by [`firn_base::now_ns`].
pub(crate) const REQUEST_VARIABLE: &str = "FIRN_REQUEST_NS";

/// When the request came in, if the process that started this one has set the variable.
pub(crate) fn request() -> Option<u64> {
    std::env::var(REQUEST_VARIABLE).ok()?.parse().ok()
}
