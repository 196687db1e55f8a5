//! CPU time of microVMs: each monitor has a control group, whose limit follows its function's
//! memory.

use std::fs::{File, TryLockError};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use firn_run::cgroup::{self, Cgroup, CgroupError, CgroupPlace, CgroupVersion};
use uuid::Uuid;

/// The period of the limit, µs: AWS Lambda's.
const PERIOD: u64 = 20_000;

/// The smallest limit that the kernel accepts, µs.
const LEAST: u64 = 1000;

/// Groups of daemons have this name and a unique id. The daemon locks its group's directory, which
/// other daemons see wherever they see the group: a process id is another one in a container.
const PREFIX: &str = "firn-serve-";

/// The group of all microVMs.
#[derive(Debug)]
pub(crate) struct Cpus {
    all: Cgroup,
    _lock: File,
    /// Memory of a function that has one CPU, MiB.
    one: u32,
    next: AtomicU64,
}

impl Cpus {
    /// Makes the group. A function of `one` MiB gets one CPU, others in proportion.
    pub(crate) fn open(one: u32) -> Result<Self, CgroupError> {
        let place = CgroupPlace::find("cpu")?;
        sweep(place.path());
        let (all, lock) = make(&place)?;
        let cpus = Self { all, _lock: lock, one, next: AtomicU64::new(0) };
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

/// Makes and locks a group.
fn make(place: &CgroupPlace) -> Result<(Cgroup, File), CgroupError> {
    loop {
        let name = format!("{PREFIX}{}", Uuid::new_v4().simple());
        let (group, path) = (place.create(&name)?, place.path().join(name));
        match lock(&path) {
            // Another daemon removes it if it was the first to lock it.
            Ok(lock) if path.exists() => return Ok((group, lock)),
            Ok(_) | Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::NotFound => {}
            Err(TryLockError::Error(source)) => return Err(CgroupError::Io { path, source }),
        }
    }
}

fn lock(group: &Path) -> Result<File, TryLockError> {
    let directory = File::open(group).map_err(TryLockError::Error)?;
    directory.try_lock()?;
    Ok(directory)
}

/// Removes the groups of daemons that were killed: those that no daemon has locked.
fn sweep(place: &Path) {
    for entry in std::fs::read_dir(place).into_iter().flatten().flatten() {
        let is_daemons = entry.file_name().to_str().is_some_and(|name| name.starts_with(PREFIX));
        // Locked until it is removed.
        if let Some(_lock) = is_daemons.then(|| lock(&entry.path()).ok()).flatten() {
            cgroup::remove(&entry.path());
        }
    }
}

#[cfg(test)]
#[path = "cpu_tests.rs"]
mod tests;
