//! A timer of the event loop.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

/// A descriptor that becomes readable when a time has passed (timerfd_create(2)).
#[derive(Debug)]
pub(super) struct Timer(OwnedFd);

impl Timer {
    /// A timer that is not set.
    pub(super) fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        Ok(Self(timerfd_create(TimerfdClockId::Monotonic, flags)?))
    }

    /// Sets it to the time `after` from now. Zero turns it off.
    pub(super) fn set_once(&self, after: Duration) {
        self.set(after, Duration::ZERO);
    }

    /// Sets it to every `period` from now on. Zero turns it off.
    pub(super) fn set_periodic(&self, period: Duration) {
        self.set(period, period);
    }

    fn set(&self, after: Duration, period: Duration) {
        let [it_value, it_interval] =
            [after, period].map(|time| Timespec::try_from(time).unwrap_or_default());
        let value = Itimerspec { it_interval, it_value };
        // It fails only for invalid times.
        let _ = timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &value);
    }

    /// Empties the descriptor, after an event of it.
    pub(super) fn acknowledge(&self) {
        // There may be nothing in it.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Timer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
