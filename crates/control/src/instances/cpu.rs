//! CPU time of microVMs: each monitor has a control group, whose limit follows its function's
//! memory.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use firn_run::cgroup::{self, Cgroup, CgroupError, CgroupPlace, CgroupVersion};

/// The period of the limit, µs: AWS Lambda's.
const PERIOD: u64 = 20_000;

/// The smallest limit that the kernel accepts, µs.
const LEAST: u64 = 1000;

/// Groups of daemons have this name, and the daemon's process id.
const PREFIX: &str = "firn-serve-";

/// The group of all microVMs.
#[derive(Debug)]
pub(crate) struct Cpus {
    all: Cgroup,
    /// Memory of a function that has one CPU, MiB.
    one: u32,
    next: AtomicU64,
}

impl Cpus {
    /// Makes the group. A function of `one` MiB gets one CPU, others in proportion.
    pub(crate) fn open(one: u32) -> Result<Self, CgroupError> {
        let place = CgroupPlace::find("cpu")?;
        sweep(place.path());
        let all = place.create(&format!("{PREFIX}{}", std::process::id()))?;
        let cpus = Self { all, one, next: AtomicU64::new(0) };
        // Fails here if the system has the controller and no limits.
        let group = cpus.group()?;
        cpus.limit(&group, 128)?;
        Ok(cpus)
    }

    /// A group for a monitor, without a limit.
    pub(crate) fn group(&self) -> Result<Cgroup, CgroupError> {
        let group = self.all.create(&self.next.fetch_add(1, Ordering::Relaxed).to_string())?;
        if group.version() == CgroupVersion::V1 {
            group.write("cpu.cfs_period_us", &PERIOD.to_string())?;
        }
        Ok(group)
    }

    /// Limits the group of a function with `memory` MiB.
    pub(crate) fn limit(&self, group: &Cgroup, memory: u32) -> Result<(), CgroupError> {
        let quota = (PERIOD * u64::from(memory)).div_ceil(u64::from(self.one.max(1))).max(LEAST);
        match group.version() {
            CgroupVersion::V1 => group.write("cpu.cfs_quota_us", &quota.to_string()),
            CgroupVersion::V2 => group.write("cpu.max", &format!("{quota} {PERIOD}")),
        }
    }
}

/// Removes the groups of daemons that were killed.
fn sweep(place: &Path) {
    for entry in std::fs::read_dir(place).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let process = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.parse::<u32>().ok());
        let gone = |process: u32| {
            process == std::process::id() || !Path::new(&format!("/proc/{process}")).exists()
        };
        if process.is_some_and(gone) {
            cgroup::remove(&entry.path());
        }
    }
}

#[cfg(test)]
#[path = "cpu_tests.rs"]
mod tests;
