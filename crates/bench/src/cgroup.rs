//! A memory cgroup: how much DRAM the microVMs of a measurement may have together.
//!
//! This process goes into a group of its own with a limit, and what it starts from then on is in it too. The kernel
//! charges a page to the group whose process touches it first: anonymous pages, page tables and KVM's tables of its
//! members, and the page cache that they fill. What others filled (a pool, by its manager) is charged to them.
//! (Linux Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst.)

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Why memory is not limited.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CgroupError {
    /// There is no such controller.
    #[error(
        "this host has no memory cgroup to be used: neither a mounted version 1 controller nor one of version 2"
    )]
    NoController,
    /// A file of the cgroup file system could not be read or written.
    #[error("limiting memory needs root and a memory cgroup: {path} cannot be used")]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// A file does not hold what the kernel's documentation says.
    #[error("{path} does not say {what}")]
    Missing {
        /// The file.
        path: PathBuf,
        /// What was looked for.
        what: &'static str,
    },
}

/// What is charged to a group, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupUsage {
    /// All of it, the kernel's own memory for the group included.
    pub total: u64,
    /// Anonymous memory.
    pub anonymous: u64,
    /// Page cache.
    pub page_cache: u64,
}

/// The two interfaces: names of their files.
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

/// A limit that this process and what it starts live under, until it is dropped. Whatever was started has to have ended
/// by then, or the group stays behind.
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
    /// Puts this process into a new group that may have so many bytes.
    ///
    /// # Errors
    ///
    /// [`CgroupError`]: the process is where it was.
    pub fn enter(bytes: u64) -> Result<Self, CgroupError> {
        let Place { parent, own: before, interface } = current()?;
        let group = parent.join(format!("firn-bench-{}", std::process::id()));
        fs::create_dir(&group).map_err(io(&group))?;
        // From here on its drop removes the group.
        let limit = Self { group, before, interface };
        write(&limit.group.join(interface.limit), &bytes.to_string())?;
        write(&limit.group.join("cgroup.procs"), "0")?;
        Ok(limit)
    }

    /// What the group is charged with now.
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

    /// How many processes of the group the kernel has killed for want of memory, those among them that have not ended yet.
    ///
    /// # Errors
    ///
    /// [`CgroupError`].
    pub fn kills(&self) -> Result<u64, CgroupError> {
        self.value(self.interface.events, "oom_kill")
    }

    /// What a file of the group says of something, in a line of its own.
    fn value(&self, file: &str, what: &'static str) -> Result<u64, CgroupError> {
        let path = self.group.join(file);
        let text = read(&path)?;
        let found = text.lines().find_map(|line| line.strip_prefix(what)?.strip_prefix(' '));
        found.and_then(|value| value.parse().ok()).ok_or(CgroupError::Missing { path, what })
    }
}

impl Drop for MemoryLimit {
    fn drop(&mut self) {
        // What cannot be undone is left: the group says by its name whose it is.
        let _ = write(&self.before.join("cgroup.procs"), "0");
        let _ = fs::remove_dir(&self.group);
    }
}

/// Where a new group goes.
#[derive(Debug)]
struct Place {
    /// The directory of the group above it.
    parent: PathBuf,
    /// The directory of the group that this process is in.
    own: PathBuf,
    interface: &'static Interface,
}

/// Where this process can have a group.
fn current() -> Result<Place, CgroupError> {
    let groups = read(Path::new("/proc/self/cgroup"))?;
    let mounts = read(Path::new("/proc/self/mounts"))?;
    find(&groups, &mounts).ok_or(CgroupError::NoController)
}

/// The same from what the kernel says: lines `ID:CONTROLLERS:PATH` and lines of mounts.
fn find(groups: &str, mounts: &str) -> Option<Place> {
    let path_of = |controller: &str| {
        groups.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            let controllers = parts.next()?;
            let path = parts.next()?.trim_start_matches('/');
            controllers.split(',').any(|name| name == controller).then_some(path)
        })
    };
    let mount_of = |kind: &str, option: Option<&str>| {
        mounts.lines().find_map(|line| {
            let mut parts = line.split(' ').skip(1);
            let (place, found, options) = (parts.next()?, parts.next()?, parts.next()?);
            let fits = option.is_none_or(|option| options.split(',').any(|name| name == option));
            (found == kind && fits).then(|| PathBuf::from(place))
        })
    };
    let v1 = || {
        let own = mount_of("cgroup", Some("memory"))?.join(path_of("memory")?);
        Some(Place { parent: own.clone(), own, interface: &V1 })
    };
    // Below a group that has processes, version 2 gives no child a controller: the new one goes below the root.
    let v2 = || {
        let parent = mount_of("cgroup2", None)?;
        Some(Place { own: parent.join(path_of("")?), parent, interface: &V2 })
    };
    v1().or_else(v2)
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
