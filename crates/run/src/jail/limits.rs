//! The control groups of monitors: what a monitor can take of its host.
//!
//! A supervisor has one group in each hierarchy, and each of its monitors a group in that. In a
//! host with version 2 of the interface there is one hierarchy, with version 1 one for each
//! controller (Linux Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst). The groups limit
//! memory, processes and devices. The others are there for the operator: they weigh, place and
//! freeze a microVM.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use firn_base::{error_chain, processors};
use firn_vmm::MAX_VCPUS;
use uuid::Uuid;

use super::device_filter;
use crate::cgroup::{self, Cgroup, CgroupError, CgroupPlace, CgroupVersion, Controller};

/// The controllers that limit CPU time.
pub(super) const CPU: &[Controller] = &[Controller { v1: "cpu", v2: Some("cpu") }];

/// The controllers of the wall. In version 2 every group can be frozen, and devices are limited by
/// a BPF program.
pub(super) const ALL: &[Controller] = &[
    Controller { v1: "memory", v2: Some("memory") },
    Controller { v1: "cpu", v2: Some("cpu") },
    Controller { v1: "cpuset", v2: Some("cpuset") },
    Controller { v1: "pids", v2: Some("pids") },
    Controller { v1: "devices", v2: None },
    Controller { v1: "freezer", v2: None },
    Controller { v1: "blkio", v2: Some("io") },
];

/// Groups of supervisors have this name and a unique id. The supervisor locks its group's
/// directory, which others see wherever they see the group: a process id is another one in a
/// container.
const PREFIX: &str = "firn-monitors-";

/// Threads of a monitor besides those that grow with the host: vCPUs, devices, pager, loader,
/// control connections.
const THREADS: usize = 60 + MAX_VCPUS as usize;

/// Memory of a monitor besides its guest's, bytes: its program, its heap, page tables of both
/// kinds, and what it buffers.
const OWN_MEMORY: u64 = 64 << 20;

/// The weight of a thread that is in no group of its own, in `cpu.shares`, and the largest weight.
const THREAD_SHARES: usize = 1024;
const MOST_SHARES: usize = 1 << 18;

/// How long the end of a group's last thread is waited for: some of it follows the end that other
/// processes see.
const LAST_THREAD: Duration = Duration::from_millis(100);
const PAUSE: Duration = Duration::from_millis(1);

/// The limit of a monitor's memory, bytes. `disk` is what the guest can write to its disk, if that
/// is in memory.
///
/// It is a bound for what a guest can make its monitor take, and far above what a microVM uses: all
/// of the guest's memory can be private to it, and a freeze into a directory in memory takes that
/// and the disk once more. What is cached of files is charged too, but the kernel reclaims that
/// before it ends a process.
pub(crate) fn memory_limit(memory: u64, disk: u64) -> u64 {
    memory.saturating_add(disk).saturating_mul(2).saturating_add(OWN_MEMORY)
}

/// The groups of a supervisor.
#[derive(Debug)]
pub(crate) struct Limits {
    groups: Vec<Owned>,
    /// Why it is no whole wall.
    missing: Option<String>,
    next: AtomicU64,
}

#[derive(Debug)]
struct Owned {
    group: Cgroup,
    /// The directory, locked.
    lock: File,
}

impl Limits {
    /// Makes groups of these controllers, as far as this host has them and lets this process.
    pub(super) fn make(controllers: &[Controller]) -> Result<Self, CgroupError> {
        let (places, missing) = CgroupPlace::find_all(controllers)?;
        let mut missing: Vec<_> = missing.iter().map(|error| error_chain(error)).collect();
        let devices = controllers.iter().any(|controller| controller.v1 == "devices");
        let mut groups = Vec::new();
        for place in places {
            sweep(place.path());
            let made =
                make(&place).and_then(|made| prepare(&made, place.path(), devices).map(|()| made));
            match made {
                Ok(made) => groups.push(made),
                Err(error) => missing.push(error_chain(&error)),
            }
        }
        Ok(Self { groups, missing: missing.into_iter().next(), next: AtomicU64::new(0) })
    }

    /// No groups, with the reason if there should be some.
    pub(super) fn none(missing: Option<String>) -> Self {
        Self { groups: Vec::new(), missing, next: AtomicU64::new(0) }
    }

    /// Whether there are groups.
    pub(super) fn is_some(&self) -> bool {
        !self.groups.is_empty()
    }

    /// Whether there is a group of this controller.
    pub(super) fn has(&self, controller: &str) -> bool {
        self.groups.iter().any(|owned| owned.group.has(controller))
    }

    /// Why they are no whole wall.
    pub(super) fn missing(&self) -> Option<&str> {
        self.missing.as_deref()
    }

    /// Makes a group for a monitor, without a limit of its memory.
    pub(super) fn group(self: &Arc<Self>) -> Result<Limited, CgroupError> {
        let name = self.next.fetch_add(1, Ordering::Relaxed).to_string();
        let groups = self.groups.iter().map(|owned| owned.group.create(&name));
        let groups = groups.collect::<Result<_, _>>()?;
        let limited = Limited { groups, thread: None, _owner: self.clone() };
        if let Some(pids) = limited.group("pids") {
            pids.write("pids.max", &(THREADS + 2 * processors()).to_string())?;
        }
        Ok(limited)
    }
}

/// The control groups of one monitor. Dropped, they are removed.
#[derive(Debug)]
pub struct Limited {
    groups: Vec<Cgroup>,
    /// A thread of this process that is in the groups until it ends.
    pub(super) thread: Option<JoinHandle<()>>,
    /// Removed after them.
    _owner: Arc<Limits>,
}

impl Limited {
    /// The group of a controller, by its name in the version that the host has.
    #[must_use]
    pub fn group(&self, controller: &str) -> Option<&Cgroup> {
        self.groups.iter().find(|group| group.has(controller))
    }

    /// Moves the calling thread into the groups of version 1. Its children are in them from the
    /// beginning.
    pub(super) fn enter_thread(&self) -> Result<(), CgroupError> {
        let v1 = |group: &&Cgroup| group.version() == CgroupVersion::V1;
        self.groups.iter().filter(v1).try_for_each(Cgroup::enter_thread)
    }

    /// The directory of the group of version 2, if there is one, open.
    pub(super) fn open_v2(&self) -> Result<Option<File>, CgroupError> {
        let v2 = |group: &&Cgroup| group.version() == CgroupVersion::V2;
        let open = |group: &Cgroup| {
            let path = group.path().to_owned();
            File::open(&path).map_err(|source| CgroupError::Io { path, source })
        };
        self.groups.iter().find(v2).map(open).transpose()
    }

    /// Limits the monitor's memory, bytes.
    pub(crate) fn limit_memory(&self, bytes: u64) -> Result<(), CgroupError> {
        let Some(group) = self.group("memory") else { return Ok(()) };
        let (memory, swap) = match group.version() {
            CgroupVersion::V1 => ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
            CgroupVersion::V2 => ("memory.max", "memory.swap.max"),
        };
        group.write(memory, &bytes.to_string())?;
        // Kernels that do not account for swap lack the file.
        match group.path().join(swap).exists() {
            true => group.write(swap, &bytes.to_string()),
            false => Ok(()),
        }
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            // It has nothing to report.
            let _ = thread.join();
        }
        for group in &self.groups {
            let mut left = LAST_THREAD;
            while !left.is_zero()
                && fs::remove_dir(group.path())
                    .is_err_and(|error| error.kind() == io::ErrorKind::ResourceBusy)
            {
                std::thread::sleep(PAUSE);
                left = left.saturating_sub(PAUSE);
            }
        }
    }
}

/// Makes and locks a group.
fn make(place: &CgroupPlace) -> Result<Owned, CgroupError> {
    loop {
        // A name is used once: another supervisor that was the first to lock the group removes what
        // has its name.
        let name = format!("{PREFIX}{}", Uuid::new_v4().simple());
        let group = place.create(&name)?;
        match lock(group.path()) {
            Ok(lock) if group.path().exists() => return Ok(Owned { group, lock }),
            Ok(_) | Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::NotFound => {}
            Err(TryLockError::Error(source)) => {
                return Err(CgroupError::Io { path: group.path().to_owned(), source });
            }
        }
    }
}

/// Sets the weight of a group, and what the groups in it inherit: the devices, and of a cpuset its
/// processors and memory, without which no process can enter it.
fn prepare(owned: &Owned, parent: &Path, devices: bool) -> Result<(), CgroupError> {
    let Owned { group, lock } = owned;
    if group.version() == CgroupVersion::V2 {
        let failed = |source| CgroupError::Devices { path: group.path().to_owned(), source };
        return if devices { device_filter::attach(lock).map_err(failed) } else { Ok(()) };
    }
    if group.has("devices") {
        group.write("devices.deny", "a")?;
        for device in device_filter::ALLOWED {
            group.write("devices.allow", device)?;
        }
    }
    if group.has("cpu") {
        // Beside the group are threads of other programs. On a processor, microVMs weigh as much as
        // one of those.
        let shares = (THREAD_SHARES * processors()).min(MOST_SHARES);
        group.write("cpu.shares", &shares.to_string())?;
    }
    if group.has("cpuset") {
        for file in ["cpuset.cpus", "cpuset.mems"] {
            let path = parent.join(file);
            let all =
                fs::read_to_string(&path).map_err(|source| CgroupError::Io { path, source })?;
            group.write(file, all.trim())?;
        }
        group.write("cgroup.clone_children", "1")?;
    }
    Ok(())
}

fn lock(group: &Path) -> Result<File, TryLockError> {
    let directory = File::open(group).map_err(TryLockError::Error)?;
    directory.try_lock()?;
    Ok(directory)
}

/// Removes the groups of supervisors that were killed: those that none has locked.
fn sweep(place: &Path) {
    for entry in fs::read_dir(place).into_iter().flatten().flatten() {
        let is_ours = entry.file_name().to_str().is_some_and(|name| name.starts_with(PREFIX));
        // Locked until it is removed.
        if let Some(_lock) = is_ours.then(|| lock(&entry.path()).ok()).flatten() {
            cgroup::remove(&entry.path());
        }
    }
}

#[cfg(test)]
#[path = "limits_tests.rs"]
mod tests;
