//! Memory use of a monitor process.

/// Memory that a process, or the processes of one revision, use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Memory of one process alone, bytes.
    pub(crate) private: u64,
    /// Memory that a process shares with others, bytes.
    pub(crate) shared: u64,
}

/// The resident memory of a process, by the kernel's counters (proc_pid_status(5)).
///
/// Private is the anonymous memory, which includes written pages of private mappings, and the page
/// tables. Shared are the pages of files and of shared memory. None if the process has ended.
pub(crate) fn usage(process: u32) -> Option<Usage> {
    parse(&std::fs::read_to_string(format!("/proc/{process}/status")).ok()?)
}

fn parse(status: &str) -> Option<Usage> {
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line?.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib << 10)
    };
    Some(Usage {
        private: field("RssAnon")? + field("VmPTE")?,
        shared: field("RssFile")? + field("RssShmem")?,
    })
}

#[cfg(test)]
#[path = "usage_tests.rs"]
mod tests;
