//! A memory cgroup, which limits the DRAM of all microVMs of a measurement together.
//!
//! This process moves into a group of its own with a limit, and its later children are in the group
//! too. The kernel charges a page to the group of the process that touches it first: anonymous
//! pages, page tables and KVM's tables of its members, and the page cache that they fill. Memory
//! that other processes filled, such as a pool, is charged to them. (Linux
//! Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst.)

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use procfs::process::{MountInfo, Process};
use procfs::{ProcError, ProcessCGroup};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Why memory cannot be limited.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CgroupError {
    /// No memory controller is mounted.
    #[error(
        "cannot limit memory: no memory controller is mounted, neither of cgroup version 1 nor of version 2"
    )]
    NoController,
    /// The groups of this process cannot be read.
    #[error("cannot limit memory: cannot read the control groups of this process")]
    Proc(#[from] ProcError),
    /// A file of the cgroup file system cannot be read or written.
    #[error("cannot limit memory: cannot use {path}; run as root, with a writable memory cgroup")]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A file does not contain an expected value.
    #[error("{path} does not contain {what}")]
    Missing {
        /// The file.
        path: PathBuf,
        /// The value.
        what: &'static str,
    },
}

/// Memory that is charged to a group, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupUsage {
    /// All of it, including the kernel's own memory for the group.
    pub total: u64,
    /// Anonymous memory.
    pub anonymous: u64,
    /// Page cache.
    pub page_cache: u64,
}

/// Names of files and values in one version of the interface.
struct Interface {
    limit: &'static str,
    usage: &'static str,
    anonymous: &'static str,
    page_cache: &'static str,
    events: &'static str,
}

const V1: Interface = Interface {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    anonymous: "rss",
    page_cache: "cache",
    events: "memory.oom_control",
};
const V2: Interface = Interface {
    limit: "memory.max",
    usage: "memory.current",
    anonymous: "anon",
    page_cache: "file",
    events: "memory.events",
};

/// A limit on the memory of this process and its later children, until it is dropped. The children
/// must have ended by then; otherwise the group is not removed.
#[derive(Debug)]
pub struct MemoryLimit {
    group: PathBuf,
    before: PathBuf,
    interface: &'static Interface,
}

impl std::fmt::Debug for Interface {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.limit)
    }
}

impl MemoryLimit {
    /// Moves this process into a new group with a limit in bytes.
    ///
    /// # Errors
    ///
    /// [`CgroupError`]; the process then stays in its group.
    pub fn enter(bytes: u64) -> Result<Self, CgroupError> {
        let Place { parent, own: before, interface } = current()?;
        let group = parent.join(format!("firn-bench-{}", std::process::id()));
        fs::create_dir(&group).map_err(io(&group))?;
        // From here on the drop removes the group.
        let limit = Self { group, before, interface };
        write(&limit.group.join(interface.limit), &bytes.to_string())?;
        write(&limit.group.join("cgroup.procs"), "0")?;
        Ok(limit)
    }

    /// The memory that is charged to the group now.
    ///
    /// # Errors
    ///
    /// [`CgroupError`].
    pub fn usage(&self) -> Result<GroupUsage, CgroupError> {
        let path = self.group.join(self.interface.usage);
        let total = read(&path)?.trim().parse();
        let total = total.map_err(|_| CgroupError::Missing { path, what: "a number" })?;
        Ok(GroupUsage {
            total,
            anonymous: self.value("memory.stat", self.interface.anonymous)?,
            page_cache: self.value("memory.stat", self.interface.page_cache)?,
        })
    }

    /// The number of processes of the group that the kernel has killed because memory ran out,
    /// including those that have not ended yet.
    ///
    /// # Errors
    ///
    /// [`CgroupError`].
    pub fn kills(&self) -> Result<u64, CgroupError> {
        self.value(self.interface.events, "oom_kill")
    }

    /// A value in a file of the group with one name and value per line.
    fn value(&self, file: &str, what: &'static str) -> Result<u64, CgroupError> {
        let path = self.group.join(file);
        let text = read(&path)?;
        let found = text.lines().find_map(|line| line.strip_prefix(what)?.strip_prefix(' '));
        found.and_then(|value| value.parse().ok()).ok_or(CgroupError::Missing { path, what })
    }
}

impl Drop for MemoryLimit {
    fn drop(&mut self) {
        // If this fails the group stays; its name contains this process's id.
        let _ = write(&self.before.join("cgroup.procs"), "0");
        let _ = fs::remove_dir(&self.group);
    }
}

/// Where a new group is created.
#[derive(Debug)]
struct Place {
    /// The directory of its parent.
    parent: PathBuf,
    /// The directory of this process's group.
    own: PathBuf,
    interface: &'static Interface,
}

/// Where this process can create a group.
fn current() -> Result<Place, CgroupError> {
    let process = Process::myself()?;
    find(&process.cgroups()?.0, &process.mountinfo()?.0).ok_or(CgroupError::NoController)
}

/// Where a process in these groups can have a group, in a cgroup file system among these mounts.
fn find(groups: &[ProcessCGroup], mounts: &[MountInfo]) -> Option<Place> {
    let v1 = |group: &&ProcessCGroup| group.controllers.iter().any(|name| name == "memory");
    let v2 = |group: &&ProcessCGroup| group.controllers.is_empty();
    let path = |group: &ProcessCGroup| group.pathname.trim_start_matches('/').to_owned();
    let mount_of = |kind: &str, option: Option<&str>| {
        let fits = |mount: &&MountInfo| {
            mount.fs_type == kind
                && option.is_none_or(|name| mount.super_options.contains_key(name))
        };
        mounts.iter().find(fits).map(|mount| mount.mount_point.clone())
    };
    if let Some(mount) = mount_of("cgroup", Some("memory"))
        && let Some(group) = groups.iter().find(v1)
    {
        let own = mount.join(path(group));
        return Some(Place { parent: own.clone(), own, interface: &V1 });
    }
    // In version 2 a group with processes gives its children no controller, so the new group is a
    // child of the root.
    let parent = mount_of("cgroup2", None)?;
    let own = parent.join(path(groups.iter().find(v2)?));
    Some(Place { own, parent, interface: &V2 })
}

fn read(path: &Path) -> Result<String, CgroupError> {
    fs::read_to_string(path).map_err(io(path))
}

fn write(path: &Path, text: &str) -> Result<(), CgroupError> {
    fs::write(path, text).map_err(io(path))
}

fn io(path: &Path) -> impl FnOnce(io::Error) -> CgroupError {
    move |source| CgroupError::Io { path: path.to_owned(), source }
}

#[cfg(test)]
#[path = "cgroup_tests.rs"]
mod tests;
