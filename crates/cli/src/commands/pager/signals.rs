//! The signals that end a pager.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::backend::SignalDelivery;
use signal_hook::iterator::exfiltrator::SignalOnly;

use super::PagerCommandError;

/// Signals that have come: there is something to read when one has.
pub(super) struct Signals(SignalDelivery<UnixStream, SignalOnly>);

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.get_read().as_fd()
    }
}

impl Signals {
    /// From here on these signals do not end this process; a program that it starts has them as they were.
    pub(super) fn catch() -> io::Result<Self> {
        let (read, write) = UnixStream::pair()?;
        let signals = [SIGINT, SIGTERM, SIGHUP, SIGQUIT];
        Ok(Self(SignalDelivery::with_pipe(read, write, SignalOnly, signals)?))
    }

    /// The one that has come.
    pub(super) fn error(&mut self) -> PagerCommandError {
        PagerCommandError::Signal(self.0.pending().next().unwrap_or_default())
    }
}
