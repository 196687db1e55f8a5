//! The control groups of the function's processes, with which the agent stops all of them, or all
//! threads but one.
//!
//! Source: the kernel's Documentation/admin-guide/cgroup-v2.rst, "Threads" and "cgroup.freeze".

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Interval between two looks at the state of the group.
const PAUSE: Duration = Duration::from_millis(1);

/// Two threaded groups in one of the kernel's control groups of version 2: `others` has every
/// thread of the function's processes, `main` a thread that is not stopped with them.
#[derive(Debug, Clone)]
pub struct Freezer {
    folder: PathBuf,
}

impl Freezer {
    /// Makes the groups below `folder`, which does not exist yet.
    ///
    /// # Errors
    /// The file system at `folder` is not cgroup2, or refuses.
    pub fn new(folder: &Path) -> io::Result<Self> {
        let freezer = Self { folder: folder.to_owned() };
        fs::create_dir(folder)?;
        for group in ["others", "main"] {
            fs::create_dir(folder.join(group))?;
            freezer.write(&format!("{group}/cgroup.type"), "threaded")?;
        }
        Ok(freezer)
    }

    /// A file: the process that writes 0 to it becomes one of the function's.
    pub(super) fn entrance(&self) -> io::Result<File> {
        OpenOptions::new().write(true).open(self.folder.join("others/cgroup.procs"))
    }

    /// Excepts a thread from stopping.
    pub(super) fn except(&self, thread: u32) -> io::Result<()> {
        self.write("main/cgroup.threads", &thread.to_string())
    }

    /// Lets a thread be stopped again.
    pub(super) fn include(&self, thread: u32) -> io::Result<()> {
        self.write("others/cgroup.threads", &thread.to_string())
    }

    /// Stops all threads but an excepted one. Returns whether all had stopped at the deadline.
    pub(super) fn stop(&self, deadline: Instant) -> io::Result<bool> {
        self.write("others/cgroup.freeze", "1")?;
        loop {
            let events = fs::read_to_string(self.folder.join("others/cgroup.events"))?;
            if events.lines().any(|line| line == "frozen 1") {
                return Ok(true);
            }
            if Instant::now() >= deadline {
                return Ok(false);
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Lets all threads run.
    pub(super) fn resume(&self) -> io::Result<()> {
        self.write("others/cgroup.freeze", "0")
    }

    /// Kills all processes, also stopped ones.
    pub(super) fn kill(&self) -> io::Result<()> {
        self.write("cgroup.kill", "1")?;
        self.resume()
    }

    /// The function's processes.
    pub(super) fn processes(&self) -> io::Result<Vec<u32>> {
        let text = fs::read_to_string(self.folder.join("cgroup.procs"))?;
        text.lines().map(|line| line.parse().map_err(io::Error::other)).collect()
    }

    fn write(&self, file: &str, text: &str) -> io::Result<()> {
        fs::write(self.folder.join(file), text)
    }
}

#[cfg(test)]
#[path = "freezer_tests.rs"]
mod tests;
