//! Limits on the work of a device.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use serde::{Deserialize, Serialize};

/// Bytes and operations that a device may take in a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RateLimit {
    /// Bytes per second; `None` for any number.
    pub bytes: Option<u64>,
    /// Operations, such as frames, per second; `None` for any number.
    pub operations: Option<u64>,
}

/// Delays a device's work to a [`RateLimit`]. Up to a second's worth may come at once.
///
/// What has been taken is counted afterwards, so the last operation may take more than was left;
/// the next one waits for that, too.
#[derive(Debug)]
pub struct RateLimiter {
    bytes: Option<Bucket>,
    operations: Option<Bucket>,
    timer: OwnedFd,
}

/// What may be taken of one thing.
#[derive(Debug)]
struct Bucket {
    /// Per second, and at most.
    rate: u64,
    /// Negative once too much has been taken.
    left: i128,
    filled: Instant,
}

impl RateLimiter {
    /// A limiter.
    ///
    /// # Errors
    /// There is no timer descriptor.
    pub fn new(limit: RateLimit) -> io::Result<Self> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        let now = Instant::now();
        let bucket = |rate: Option<u64>| rate.map(|rate| Bucket::new(rate.max(1), now));
        Ok(Self { bytes: bucket(limit.bytes), operations: bucket(limit.operations), timer })
    }

    /// Whether something may be taken. If not, the descriptor becomes readable when it may.
    pub(crate) fn allows(&mut self) -> bool {
        let now = Instant::now();
        let wait = self.buckets().map(|bucket| bucket.fill(now)).max().unwrap_or_default();
        if wait.is_zero() {
            return true;
        }
        let time = Timespec::try_from(wait).unwrap_or_default();
        let value = Itimerspec { it_interval: Timespec::default(), it_value: time };
        // It fails only for invalid times.
        let _ = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &value);
        false
    }

    /// Counts one operation of `bytes`.
    pub(crate) fn take(&mut self, bytes: u64) {
        self.bytes.iter_mut().for_each(|bucket| bucket.left -= i128::from(bytes));
        self.operations.iter_mut().for_each(|bucket| bucket.left -= 1);
    }

    fn buckets(&mut self) -> impl Iterator<Item = &mut Bucket> {
        self.bytes.iter_mut().chain(&mut self.operations)
    }
}

impl AsFd for RateLimiter {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }
}

impl Bucket {
    fn new(rate: u64, now: Instant) -> Self {
        Self { rate, left: i128::from(rate), filled: now }
    }

    /// Adds what the time since the last call gives, and returns the time until something may be
    /// taken.
    fn fill(&mut self, now: Instant) -> Duration {
        let second = Duration::from_secs(1).as_nanos();
        let passed = now.saturating_duration_since(self.filled).as_nanos();
        let gained = passed.saturating_mul(u128::from(self.rate)) / second;
        // The rest of the time counts for the next call.
        let rest = passed.saturating_sub(gained * second / u128::from(self.rate));
        let rest = Duration::from_nanos(u64::try_from(rest).unwrap_or(0));
        self.filled = now.checked_sub(rest).unwrap_or(now);
        let gained = i128::try_from(gained).unwrap_or(i128::MAX);
        self.left = self.left.saturating_add(gained).min(i128::from(self.rate));
        if self.left > 0 {
            return Duration::ZERO;
        }
        let missing = u128::try_from(1 - self.left).unwrap_or(1);
        let wait = (missing * second).div_ceil(u128::from(self.rate));
        Duration::from_nanos(u64::try_from(wait).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
#[path = "rate_limiter_tests.rs"]
mod tests;
