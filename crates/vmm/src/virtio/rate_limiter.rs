//! Limits on the work of a device.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::timer::Timer;

/// Bytes and operations that a device may take in a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RateLimit {
    /// Bytes; `None` for any number.
    pub bytes: Option<TokenBucket>,
    /// Operations, such as frames or requests to a disk; `None` for any number.
    pub operations: Option<TokenBucket>,
}

/// How much of one thing may be taken, in its unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenBucket {
    /// The most that may come at once, again and again. 0 counts as 1.
    pub size: u64,
    /// What may be taken beyond it, once.
    pub burst: u64,
    /// The time in which an empty bucket is full again. Less than a nanosecond counts as one.
    pub refill: Duration,
}

impl TokenBucket {
    /// So much per second, and a second's worth at once.
    #[must_use]
    pub const fn per_second(rate: u64) -> Self {
        Self { size: rate, burst: 0, refill: Duration::from_secs(1) }
    }
}

/// Delays a device's work to a [`RateLimit`].
///
/// What has been taken is counted afterwards, so the last operation may take more than was left;
/// the next one waits for that, too.
#[derive(Debug)]
pub struct RateLimiter {
    bytes: Option<Bucket>,
    operations: Option<Bucket>,
    timer: Timer,
    counters: LimiterCounters,
}

/// What a [`RateLimiter`] has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LimiterCounters {
    /// How often it has delayed work.
    pub delays: u64,
    /// How often delayed work was looked at again.
    pub refills: u64,
}

impl LimiterCounters {
    /// Those of a limiter, if there is one.
    pub(crate) fn of(limiter: Option<&RateLimiter>) -> Self {
        limiter.map(|limiter| limiter.counters).unwrap_or_default()
    }
}

/// What may be taken of one thing.
#[derive(Debug)]
struct Bucket {
    /// At most, without the burst.
    size: u64,
    /// ns in which `size` is gained.
    refill: u128,
    burst: u64,
    /// Without the burst. Negative once too much has been taken.
    left: i128,
    filled: Instant,
}

impl RateLimiter {
    /// A limiter.
    ///
    /// # Errors
    /// There is no timer descriptor.
    pub fn new(limit: RateLimit) -> io::Result<Self> {
        let timer = Timer::new()?;
        let [bytes, operations] = full(limit);
        Ok(Self { bytes, operations, timer, counters: LimiterCounters::default() })
    }

    /// Changes the limit. What was taken before is forgotten.
    pub(crate) fn set(&mut self, limit: RateLimit) {
        [self.bytes, self.operations] = full(limit);
        // Work that waits for the earlier limit is looked at again.
        self.timer.set_once(Duration::from_nanos(1));
    }

    /// Whether something may be taken that waits. If not, the descriptor becomes readable when it
    /// may.
    pub(crate) fn allows(&mut self) -> bool {
        let now = Instant::now();
        let wait = self.buckets().map(|bucket| bucket.fill(now)).max().unwrap_or_default();
        if !wait.is_zero() {
            self.timer.set_once(wait);
            self.counters.delays += 1;
        }
        wait.is_zero()
    }

    /// Counts one operation of `bytes`.
    pub(crate) fn take(&mut self, bytes: u64) {
        self.bytes.iter_mut().for_each(|bucket| bucket.take(bytes));
        self.operations.iter_mut().for_each(|bucket| bucket.take(1));
    }

    /// Empties the descriptor, after an event of it.
    pub(crate) fn acknowledge(&mut self) {
        self.timer.acknowledge();
        self.counters.refills += 1;
    }

    fn buckets(&mut self) -> impl Iterator<Item = &mut Bucket> {
        self.bytes.iter_mut().chain(&mut self.operations)
    }
}

/// The buckets of a limit, of bytes and of operations.
fn full(limit: RateLimit) -> [Option<Bucket>; 2] {
    let now = Instant::now();
    [limit.bytes, limit.operations].map(|bucket| Some(Bucket::new(bucket?, now)))
}

impl AsFd for RateLimiter {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }
}

impl Bucket {
    fn new(bucket: TokenBucket, now: Instant) -> Self {
        let TokenBucket { size, burst, refill } = bucket;
        let (size, refill) = (size.max(1), refill.as_nanos().max(1));
        Self { size, refill, burst, left: i128::from(size), filled: now }
    }

    /// Takes from the burst first, which is not gained again.
    fn take(&mut self, amount: u64) {
        let of_burst = amount.min(self.burst);
        self.burst -= of_burst;
        self.left -= i128::from(amount - of_burst);
    }

    /// Adds what the time since the last call gives, and returns the time until something may be
    /// taken.
    fn fill(&mut self, now: Instant) -> Duration {
        let size = u128::from(self.size);
        let passed = now.saturating_duration_since(self.filled).as_nanos();
        let gained = passed.saturating_mul(size) / self.refill;
        // The rest of the time counts for the next call.
        let rest = passed.saturating_sub(gained.saturating_mul(self.refill) / size);
        let rest = Duration::from_nanos(u64::try_from(rest).unwrap_or(0));
        self.filled = now.checked_sub(rest).unwrap_or(now);
        let gained = i128::try_from(gained).unwrap_or(i128::MAX);
        self.left = self.left.saturating_add(gained).min(i128::from(self.size));
        if self.left > 0 || self.burst > 0 {
            return Duration::ZERO;
        }
        let missing = u128::try_from(1 - self.left).unwrap_or(1);
        let wait = missing.saturating_mul(self.refill).div_ceil(size);
        Duration::from_nanos(u64::try_from(wait).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
#[path = "rate_limiter_tests.rs"]
mod tests;
