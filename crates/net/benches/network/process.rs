//! What the kernel counts for another process.

use std::fs;
use std::time::Duration;

/// A process by its id.
#[derive(Clone, Copy)]
pub(crate) struct Process(pub(crate) u32);

impl Process {
    /// Processor time of all its threads, in user mode and in the kernel.
    pub(crate) fn cpu_time(self) -> Duration {
        let pid = libc::pid_t::try_from(self.0).unwrap();
        let mut clock = 0;
        // SAFETY: the result goes to a variable that lives for the call.
        assert_eq!(unsafe { libc::clock_getcpuclockid(pid, &raw mut clock) }, 0);
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the result goes to a variable that lives for the call.
        assert_eq!(unsafe { libc::clock_gettime(clock, &raw mut time) }, 0);
        let seconds = u64::try_from(time.tv_sec).unwrap();
        Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap())
    }

    /// Its proportional set size in bytes: a page of several processes counts in parts.
    pub(crate) fn pss(self) -> u64 {
        let path = format!("/proc/{}/smaps_rollup", self.0);
        let text = fs::read_to_string(path).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("Pss:")).unwrap();
        line.split_whitespace().next().unwrap().parse::<u64>().unwrap() << 10
    }
}
