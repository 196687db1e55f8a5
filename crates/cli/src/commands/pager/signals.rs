//! Termination signals of a pager.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::backend::SignalDelivery;
use signal_hook::iterator::exfiltrator::SignalOnly;

use super::PagerCommandError;

/// Caught signals. The descriptor is readable after a signal arrived.
pub(super) struct Signals(SignalDelivery<UnixStream, SignalOnly>);

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.get_read().as_fd()
    }
}

impl Signals {
    /// Catches the signals, so that they do not end this process. Child programs get the default
    /// actions.
    pub(super) fn catch() -> io::Result<Self> {
        let (read, write) = UnixStream::pair()?;
        let signals = [SIGINT, SIGTERM, SIGHUP, SIGQUIT];
        Ok(Self(SignalDelivery::with_pipe(read, write, SignalOnly, signals)?))
    }

    /// The error for the signal that arrived.
    pub(super) fn error(&mut self) -> PagerCommandError {
        PagerCommandError::Signal(self.0.pending().next().unwrap_or_default())
    }
}
