//! When a request came in, in ns of CLOCK_MONOTONIC.

use firn_base::now_ns;

/// The variable with the time at which a request came in, by [`firn_base::now_ns`].
pub(crate) const REQUEST_VARIABLE: &str = "FIRN_REQUEST_NS";

/// When the request came in: what the process that started this one has set the variable to, or the
/// present.
pub(crate) fn request() -> u64 {
    let set = std::env::var(REQUEST_VARIABLE).ok().and_then(|text| text.parse().ok());
    set.unwrap_or_else(now_ns)
}
