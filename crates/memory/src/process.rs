//! What a process has read and faulted so far.

use std::fs;
use std::io;

use serde::Serialize;
use thiserror::Error;

/// Counters of a process, all its threads together. Take the difference of two.
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
        path: String,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// A file of /proc is not as expected.
    #[error("{path} has no value {name}")]
    Missing {
        /// The file.
        path: String,
        /// The name of the value.
        name: &'static str,
    },
}

impl ProcessCounters {
    /// Reads this process's counters as they are now (proc(5)).
    ///
    /// # Errors
    ///
    /// [`ProcessCountersError`] when /proc does not answer.
    pub fn read() -> Result<Self, ProcessCountersError> {
        Self::read_in("/proc/self")
    }

    /// Reads the counters of another process of this user.
    ///
    /// # Errors
    ///
    /// [`ProcessCountersError`] when it has ended, or is not this user's.
    pub fn of(process: u32) -> Result<Self, ProcessCountersError> {
        Self::read_in(&format!("/proc/{process}"))
    }

    /// Those of this thread alone.
    pub(crate) fn of_this_thread() -> Result<Self, ProcessCountersError> {
        Self::read_in("/proc/thread-self")
    }

    fn read_in(folder: &str) -> Result<Self, ProcessCountersError> {
        let [io_path, stat_path] = ["io", "stat"].map(|file| format!("{folder}/{file}"));
        let (io, stat) = (text(&io_path)?, text(&stat_path)?);
        let missing =
            |path: &str, name| ProcessCountersError::Missing { path: path.to_owned(), name };
        let read_bytes = io.lines().find_map(|line| line.strip_prefix("read_bytes: "));
        let read_bytes = read_bytes.and_then(|value| value.parse().ok());
        let [minor_faults, major_faults] = faults(&stat);
        Ok(Self {
            read_bytes: read_bytes.ok_or_else(|| missing(&io_path, "read_bytes"))?,
            minor_faults: minor_faults.ok_or_else(|| missing(&stat_path, "minflt"))?,
            major_faults: major_faults.ok_or_else(|| missing(&stat_path, "majflt"))?,
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

fn text(path: &str) -> Result<String, ProcessCountersError> {
    let failed = |source| ProcessCountersError::Read { path: path.to_owned(), source };
    fs::read_to_string(path).map_err(failed)
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
