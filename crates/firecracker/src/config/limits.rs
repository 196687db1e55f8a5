//! Limits on the work of devices.

use serde::{Deserialize, Serialize};

/// A token bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TokenBucket {
    /// The most tokens.
    pub(crate) size: u64,
    /// Further tokens at the start, which are not refilled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) one_time_burst: Option<u64>,
    /// The time in which the bucket refills, ms.
    pub(crate) refill_time: u64,
}

/// The limits of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RateLimiter {
    /// Bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bandwidth: Option<TokenBucket>,
    /// Operations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ops: Option<TokenBucket>,
}
