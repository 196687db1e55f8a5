//! CPU time of microVMs: the limit of a monitor's control group follows its function's memory.

use firn_run::cgroup::{Cgroup, CgroupError, CgroupVersion};
use firn_run::monitor::Monitor;

/// The period of the limit, µs: AWS Lambda's.
const PERIOD: u64 = 20_000;

/// The smallest limit that the kernel accepts, µs.
const LEAST: u64 = 1000;

/// How CPU time follows memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cpus {
    /// Memory of a function that has one CPU, MiB; others get CPU time in proportion.
    pub(crate) one: u32,
}

impl Cpus {
    /// Limits the monitor of a function with `memory` MiB.
    pub(crate) fn limit(self, monitor: &Monitor, memory: u32) -> Result<(), CgroupError> {
        let group = monitor.limits().and_then(|limits| limits.group("cpu"));
        self.limit_group(group.ok_or(CgroupError::NoController("cpu"))?, memory)
    }

    fn limit_group(self, group: &Cgroup, memory: u32) -> Result<(), CgroupError> {
        let quota = (PERIOD * u64::from(memory)).div_ceil(u64::from(self.one.max(1))).max(LEAST);
        match group.version() {
            CgroupVersion::V1 => {
                group.write("cpu.cfs_period_us", &PERIOD.to_string())?;
                group.write("cpu.cfs_quota_us", &quota.to_string())
            }
            CgroupVersion::V2 => group.write("cpu.max", &format!("{quota} {PERIOD}")),
        }
    }
}

#[cfg(test)]
#[path = "cpu_tests.rs"]
mod tests;
