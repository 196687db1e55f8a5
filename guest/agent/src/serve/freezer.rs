//! The control groups of the function's processes, with which the agent stops all of them, or all
//! threads but one.
//!
//! Source: the kernel's Documentation/admin-guide/cgroup-v2.rst, "Threads" and "cgroup.freeze".
//!
//! A thawed clone only lets the threads run: to move a thread between groups, the kernel waits for
//! all processors (`synchronize_rcu`), for some 10 ms. So the main thread of a clone's runtime,
//! which runs through the freeze, stays excepted until the next one. And the files that a clone
//! uses are open already, because the way to a path is dozens of pages, which each clone would have
//! to get.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
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
    /// Whether `others` may be stopped.
    stopped: Arc<AtomicBool>,
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
        Ok(Self { folder: folder.to_owned(), freeze, processes, stopped: Arc::default() })
    }

    /// A file: the process that writes 0 to it becomes one of the function's.
    pub(super) fn entrance(&self) -> io::Result<File> {
        OpenOptions::new().write(true).open(self.folder.join("others/cgroup.procs"))
    }

    /// Excepts a thread from stopping.
    pub(super) fn except(&self, thread: u32) -> io::Result<()> {
        self.write("main/cgroup.threads", &thread.to_string())
    }

    /// Moves all threads but this one to those that stop: one that was excepted earlier, and what
    /// it and this one have started since. Returns whether there were any.
    fn gather(&self, excepted: Option<u32>) -> io::Result<bool> {
        let threads = self.threads("main")?;
        let excepted = excepted.map(|thread| thread.to_string());
        let mut any = false;
        for thread in threads.lines().filter(|thread| Some(*thread) != excepted.as_deref()) {
            any = true;
            match self.write("others/cgroup.threads", thread) {
                // It has ended.
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                moved => moved?,
            }
        }
        Ok(any)
    }

    /// Stops all threads but this one, if it was excepted. Returns whether all had stopped at the
    /// deadline. Where there are no others, nothing stays stopped: a clone has less to do.
    pub(super) fn stop(&self, excepted: Option<u32>, deadline: Instant) -> io::Result<bool> {
        self.stopped.store(true, Ordering::SeqCst);
        self.freeze.write_all_at(b"1", 0)?;
        loop {
            // Until it has stopped, a thread that is gathered can start another one beside it.
            let gathered = self.gather(excepted)?;
            let events = fs::read_to_string(self.folder.join("others/cgroup.events"))?;
            if !gathered && events.lines().any(|line| line == "frozen 1") {
                if self.threads("others")?.is_empty() {
                    self.resume()?;
                }
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
        if self.stopped.load(Ordering::SeqCst) {
            self.freeze.write_all_at(b"0", 0)?;
            self.stopped.store(false, Ordering::SeqCst);
        }
        Ok(())
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

    /// The threads in a group, a line for each.
    fn threads(&self, group: &str) -> io::Result<String> {
        fs::read_to_string(self.folder.join(group).join("cgroup.threads"))
    }

    fn write(&self, file: &str, text: &str) -> io::Result<()> {
        fs::write(self.folder.join(file), text)
    }
}

#[cfg(test)]
#[path = "freezer_tests.rs"]
mod tests;
