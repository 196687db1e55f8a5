//! Host names in rules: the broker forwards a guest's DNS queries, and pins the addresses that they
//! have as answers.
//!
//! A monitor gets a socket to this forwarder, not one to a resolver. The forwarder sends a query on
//! with an id and a port of its own, checks that the answer belongs to it, pins the addresses of
//! each name that a rule has, and only then passes the answer on. A name that the guest did not
//! ask for here, for example before it was frozen, is resolved when a decision depends on it.

mod end;
mod exchange;
mod forwarder;
mod message;
mod name;
mod pins;
#[cfg(test)]
pub(super) mod testing;

use std::time::Duration;

pub(super) use forwarder::Forwarder;
pub use name::NameError;
pub(super) use name::NamePattern;
pub(super) use pins::Pins;

/// How long a resolver may take before the next one is asked.
const PATIENCE: Duration = Duration::from_millis(1500);
/// How long a query may take, with all resolvers.
const QUERY_LIMIT: Duration = Duration::from_secs(5);
/// The least time between two resolutions of a name by the broker itself.
const RESOLVE_PAUSE: Duration = Duration::from_secs(5);

/// How long an address is pinned: for its record's time to live, within these limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinTimes {
    /// The least. A client may take that long from the answer to its last attempt to connect.
    pub least: Duration,
    /// The most.
    pub most: Duration,
}

impl Default for PinTimes {
    /// A minute and a day.
    fn default() -> Self {
        Self { least: Duration::from_secs(60), most: Duration::from_secs(24 * 3600) }
    }
}
