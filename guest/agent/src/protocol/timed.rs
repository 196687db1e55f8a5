//! A stream with a deadline.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Reads and writes a stream until a deadline, so that a peer that sends single bytes cannot delay
/// the caller further. After the deadline, calls fail with [`io::ErrorKind::TimedOut`].
#[derive(Debug)]
pub struct Timed<'a> {
    stream: &'a UnixStream,
    deadline: Instant,
}

impl<'a> Timed<'a> {
    /// Applies `deadline` to `stream`.
    #[must_use]
    pub fn new(stream: &'a UnixStream, deadline: Instant) -> Self {
        Self { stream, deadline }
    }

    fn remaining(&self) -> io::Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
    }
}

/// Linux reports a socket timeout as EAGAIN.
fn name_timeout(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::WouldBlock { io::ErrorKind::TimedOut.into() } else { error }
}

impl Read for Timed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.remaining()?))?;
        self.stream.read(buffer).map_err(name_timeout)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.remaining()?))?;
        self.stream.write(buffer).map_err(name_timeout)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
