//! The waits before work is tried again for which there was no capacity: AWS Lambda's values for
//! events.

use std::time::{Duration, Instant};

const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

/// How long work is tried again.
pub(super) const MAX_AGE: Duration = Duration::from_secs(6 * 3600);

/// The waits of one piece of work, each twice as long as the one before.
#[derive(Debug)]
pub(super) struct Backoff {
    begin: Instant,
    pause: Duration,
    max_age: Duration,
}

impl Backoff {
    /// For work that was accepted at `begin`.
    pub(super) fn since(begin: Instant) -> Self {
        Self { begin, pause: FIRST_PAUSE, max_age: MAX_AGE }
    }

    /// Tries the work again only until it has this age.
    pub(super) fn limit(&mut self, max_age: Duration) {
        self.max_age = max_age;
    }

    /// The next wait; `None` if it would be over too late.
    pub(super) fn next(&mut self) -> Option<Duration> {
        let pause = self.pause;
        self.pause = (pause * 2).min(LONGEST_PAUSE);
        self.allows(pause)
    }

    /// `pause`, unless it would be over too late.
    pub(super) fn allows(&self, pause: Duration) -> Option<Duration> {
        (self.begin.elapsed() + pause <= self.max_age).then_some(pause)
    }
}

#[cfg(test)]
#[path = "backoff_tests.rs"]
mod tests;
