//! What this process has read and faulted so far.

use std::fs;
use std::io;

use serde::Serialize;
use thiserror::Error;

/// Counters of this process, all its threads together. Take the difference of two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ProcessCounters {
    /// Bytes that storage was made to read (`read_bytes` of /proc/self/io).
    pub read_bytes: u64,
    /// Page faults that needed no storage.
    pub minor_faults: u64,
    /// Page faults that waited for storage.
    pub major_faults: u64,
}

/// Why the counters could not be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ProcessCountersError {
    /// A file of /proc could not be read.
    #[error("cannot read {path}; is /proc mounted?")]
    Read {
        /// The file.
        path: &'static str,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// A file of /proc is not as expected.
    #[error("{path} has no value {name}")]
    Missing {
        /// The file.
        path: &'static str,
        /// The name of the value.
        name: &'static str,
    },
}

const IO: &str = "/proc/self/io";
const THREAD_IO: &str = "/proc/thread-self/io";
const STAT: &str = "/proc/self/stat";

impl ProcessCounters {
    /// Reads the counters as they are now (proc(5)).
    ///
    /// # Errors
    ///
    /// [`ProcessCountersError`] when /proc does not answer.
    pub fn read() -> Result<Self, ProcessCountersError> {
        let read = |path| {
            fs::read_to_string(path).map_err(|source| ProcessCountersError::Read { path, source })
        };
        let missing = |path, name| ProcessCountersError::Missing { path, name };
        let (io, stat) = (read(IO)?, read(STAT)?);
        let read_bytes = io.lines().find_map(|line| line.strip_prefix("read_bytes: "));
        let read_bytes = read_bytes.and_then(|value| value.parse().ok());
        let [minor_faults, major_faults] = faults(&stat);
        Ok(Self {
            read_bytes: read_bytes.ok_or(missing(IO, "read_bytes"))?,
            minor_faults: minor_faults.ok_or(missing(STAT, "minflt"))?,
            major_faults: major_faults.ok_or(missing(STAT, "majflt"))?,
        })
    }
}

/// When memory is short, the kernel is to end this process, which runs a microVM, before the one that started it
/// (proc(5), `oom_score_adj`). Anybody may raise the score of a process of their own. One that has ended needs it no more.
///
/// # Errors
///
/// What the kernel said.
pub fn prefer_as_victim(process: u32) -> io::Result<()> {
    match fs::write(format!("/proc/{process}/oom_score_adj"), "1000") {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        // Between its end and being waited for.
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => {
            Ok(())
        }
        result => result,
    }
}

/// Bytes that this thread made storage read so far.
///
/// # Errors
///
/// [`ProcessCountersError`] when /proc does not answer.
pub(crate) fn thread_read_bytes() -> Result<u64, ProcessCountersError> {
    let io = fs::read_to_string(THREAD_IO)
        .map_err(|source| ProcessCountersError::Read { path: THREAD_IO, source })?;
    let value = io.lines().find_map(|line| line.strip_prefix("read_bytes: ")?.parse().ok());
    value.ok_or(ProcessCountersError::Missing { path: THREAD_IO, name: "read_bytes" })
}

/// Fields 10 and 12 of /proc/self/stat. Field 2, the name, is in parentheses and may hold anything.
fn faults(stat: &str) -> [Option<u64>; 2] {
    let behind_name = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
    let field = |n: usize| behind_name.split(' ').nth(n - 3)?.parse().ok();
    [field(10), field(12)]
}

#[cfg(test)]
#[path = "process_tests.rs"]
mod tests;
