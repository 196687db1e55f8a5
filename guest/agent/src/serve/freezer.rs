//! The control groups of the function's processes, with which the agent stops all of them, or all
//! threads but one.
//!
//! Source: the kernel's Documentation/admin-guide/cgroup-v2.rst, "Threads" and "cgroup.freeze".
//!
//! A thawed clone only lets the threads run: to move a thread between groups, the kernel waits for
//! all processors (`synchronize_rcu`), for some 10 ms. And it uses files that are open already,
//! because the way to a path is dozens of pages, which each clone would have to get.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval between two looks at the state of the group.
const PAUSE: Duration = Duration::from_millis(1);

/// Two threaded groups in one of the kernel's control groups of version 2: `others` has every
/// thread of the function's processes, `main` a thread that is not stopped with them.
#[derive(Debug, Clone)]
pub struct Freezer {
    folder: PathBuf,
    freeze: Arc<File>,
    processes: Arc<File>,
}

impl Freezer {
    /// Makes the groups below `folder`, which does not exist yet.
    ///
    /// # Errors
    /// The file system at `folder` is not cgroup2, or refuses.
    pub fn new(folder: &Path) -> io::Result<Self> {
        fs::create_dir(folder)?;
        for group in ["others", "main"] {
            fs::create_dir(folder.join(group))?;
            fs::write(folder.join(group).join("cgroup.type"), "threaded")?;
        }
        let freeze = OpenOptions::new().write(true).open(folder.join("others/cgroup.freeze"))?;
        let processes = File::open(folder.join("cgroup.procs"))?;
        let (freeze, processes) = (Arc::new(freeze), Arc::new(processes));
        Ok(Self { folder: folder.to_owned(), freeze, processes })
    }

    /// A file: the process that writes 0 to it becomes one of the function's.
    pub(super) fn entrance(&self) -> io::Result<File> {
        OpenOptions::new().write(true).open(self.folder.join("others/cgroup.procs"))
    }

    /// Excepts this thread from stopping, and no other: one that was excepted earlier, and what it
    /// has started since, are stopped.
    pub(super) fn except(&self, thread: u32) -> io::Result<()> {
        let excepted = fs::read_to_string(self.folder.join("main/cgroup.threads"))?;
        if excepted.trim_end() == thread.to_string() {
            return Ok(());
        }
        if !excepted.is_empty() {
            for process in self.processes()? {
                match self.write("others/cgroup.procs", &process.to_string()) {
                    // It has ended.
                    Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                    moved => moved?,
                }
            }
        }
        self.write("main/cgroup.threads", &thread.to_string())
    }

    /// Stops all threads but an excepted one. Returns whether all had stopped at the deadline.
    pub(super) fn stop(&self, deadline: Instant) -> io::Result<bool> {
        self.freeze.write_all_at(b"1", 0)?;
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
        self.freeze.write_all_at(b"0", 0)
    }

    /// Kills all processes, also stopped ones.
    pub(super) fn kill(&self) -> io::Result<()> {
        self.write("cgroup.kill", "1")?;
        self.resume()
    }

    /// The function's processes.
    pub(super) fn processes(&self) -> io::Result<Vec<u32>> {
        let (mut text, mut bytes) = (Vec::new(), [0; 1024]);
        loop {
            let count = self.processes.read_at(&mut bytes, text.len() as u64)?;
            if count == 0 {
                break;
            }
            text.extend(&bytes[..count]);
        }
        let text = str::from_utf8(&text).map_err(io::Error::other)?;
        text.lines().map(|line| line.parse().map_err(io::Error::other)).collect()
    }

    fn write(&self, file: &str, text: &str) -> io::Result<()> {
        fs::write(self.folder.join(file), text)
    }
}

#[cfg(test)]
#[path = "freezer_tests.rs"]
mod tests;
