//! Thrashing: memory is so short that the kernel reads the pages of programs from the disk again
//! and again, which can take minutes before it kills a process.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::serve::vmstat::Vmstat;

/// How often the kernel's counters are read while a process runs and gives no sign of life.
pub(super) const PERIOD: Duration = Duration::from_secs(1);

/// Has the kernel kill a process that makes the machine thrash.
///
/// With `min_ttl_ms` the kernel does not reclaim what was used within that time, and kills a
/// process if it lacks memory without it (Documentation/admin-guide/mm/multigen_lru.rst, "Thrashing
/// prevention"). But if files have less than 16 MiB in memory (`lruvec_is_sizable` of
/// mm/vmscan.c), it kills one at once, also if memory is short only for a moment, as while the
/// balloon's driver reports up to 128 MiB of it (mm/page_reporting.c). So this is set only while
/// the machine thrashes. The agent itself needs no reclaimed page: its program is in the initramfs,
/// and there is no swap.
#[derive(Debug)]
pub(super) struct Thrashing {
    counters: PathBuf,
    min_ttl_ms: PathBuf,
    last: Option<(Instant, u64)>,
    ends: bool,
}

impl Thrashing {
    /// By `/proc/vmstat` and `/sys/kernel/mm/lru_gen/min_ttl_ms`. A kernel may lack the latter.
    pub(super) fn new(counters: PathBuf, min_ttl_ms: PathBuf) -> Self {
        Self { counters, min_ttl_ms, last: None, ends: false }
    }

    /// Looks at what happened since the last call, after each [`PERIOD`] in which the process gave
    /// no sign of life. The machine thrashes if the kernel read again a quarter as much of files as
    /// it has in memory.
    pub(super) fn look(&mut self) {
        let counters = Vmstat::read(&self.counters);
        let (now, read_again) = (Instant::now(), counters.count("workingset_refault_file"));
        let files = counters.count("nr_active_file") + counters.count("nr_inactive_file");
        let last = self.last.replace((now, read_again));
        // A count from before another request or the freeze is too old.
        let recent = last.filter(|(at, _)| now.duration_since(*at) < 2 * PERIOD);
        let thrashes =
            recent.is_some_and(|(_, before)| read_again.saturating_sub(before) > files / 4);
        self.set(thrashes);
    }

    /// The process gave a sign of life.
    pub(super) fn calm(&mut self) {
        self.set(false);
    }

    fn set(&mut self, ends: bool) {
        if self.ends != ends {
            // If memory is short for this, too, the next call tries it again.
            let set = fs::write(&self.min_ttl_ms, if ends { "1000" } else { "0" });
            self.ends = if set.is_ok() { ends } else { self.ends };
        }
    }
}

impl Drop for Thrashing {
    fn drop(&mut self) {
        self.calm();
    }
}

#[cfg(test)]
#[path = "thrashing_tests.rs"]
mod tests;
