//! A memory cgroup, which limits the DRAM of all microVMs of a measurement together.
//!
//! This process moves into a group of its own with a limit, and its later children are in the group
//! too. The kernel charges a page to the group of the process that touches it first: anonymous
//! pages, page tables and KVM's tables of its members, and the page cache that they fill. Memory
//! that other processes filled, such as a pool, is charged to them. (Linux
//! Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst.)

use std::fmt;

use firn_run::cgroup::{Cgroup, CgroupError, CgroupPlace, CgroupVersion};
use serde::{Deserialize, Serialize};

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
    place: CgroupPlace,
    group: Cgroup,
    interface: &'static Interface,
}

impl fmt::Debug for Interface {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
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
        let place = CgroupPlace::find("memory")?;
        let group = place.create(&format!("firn-bench-{}", std::process::id()))?;
        let interface = match group.version() {
            CgroupVersion::V1 => &V1,
            CgroupVersion::V2 => &V2,
        };
        group.write(interface.limit, &bytes.to_string())?;
        group.enter()?;
        Ok(Self { place, group, interface })
    }

    /// The memory that is charged to the group now.
    ///
    /// # Errors
    ///
    /// [`CgroupError`].
    pub fn usage(&self) -> Result<GroupUsage, CgroupError> {
        Ok(GroupUsage {
            total: self.group.number(self.interface.usage)?,
            anonymous: self.group.value("memory.stat", self.interface.anonymous)?,
            page_cache: self.group.value("memory.stat", self.interface.page_cache)?,
        })
    }

    /// The number of processes of the group that the kernel has killed because memory ran out,
    /// including those that have not ended yet.
    ///
    /// # Errors
    ///
    /// [`CgroupError`].
    pub fn kills(&self) -> Result<u64, CgroupError> {
        self.group.value(self.interface.events, "oom_kill")
    }
}

impl Drop for MemoryLimit {
    fn drop(&mut self) {
        // If this fails the group stays; its name contains this process's id.
        let _ = self.place.return_to_own();
    }
}
