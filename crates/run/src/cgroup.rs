//! Control groups, which limit what processes use, of version 1 and of version 2 (Linux
//! Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use procfs::process::{MountInfo, Process};
use procfs::{ProcError, ProcessCGroup};
use thiserror::Error;

/// A control group cannot be made or used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CgroupError {
    /// The controller is not mounted.
    #[error(
        "no writable hierarchy has the {0} controller, neither of cgroup version 1 nor of version 2: mount the cgroup file \
         system with it"
    )]
    NoController(&'static str),
    /// The groups of this process cannot be read.
    #[error("cannot read the control groups of this process")]
    Proc(#[from] ProcError),
    /// A file of the cgroup file system cannot be read or written.
    #[error("cannot use {} of a control group: run as root, with a writable cgroup file system", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The devices of a group of version 2 cannot be limited.
    #[error("cannot limit the devices of the control group {}: the kernel refuses a BPF program; run as root, on a kernel with CONFIG_CGROUP_BPF", path.display())]
    Devices {
        /// The group.
        path: PathBuf,
        /// The error of bpf(2).
        source: io::Error,
    },
    /// A file does not contain an expected value.
    #[error("{} does not contain {what}", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// The value.
        what: &'static str,
    },
}

/// A version of the interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CgroupVersion {
    /// A hierarchy for each controller.
    V1,
    /// One hierarchy for all.
    V2,
}

/// Where this process can make groups of a hierarchy's controllers.
#[derive(Debug, PartialEq, Eq)]
pub struct CgroupPlace {
    controllers: Vec<&'static str>,
    /// The directory of new groups.
    parent: PathBuf,
    /// The directory of this process's group.
    own: PathBuf,
    version: CgroupVersion,
}

/// A control group. Dropped, it is removed, with the groups in it, as far as no process is in them.
#[derive(Debug)]
pub struct Cgroup {
    controllers: Vec<&'static str>,
    path: PathBuf,
    version: CgroupVersion,
}

impl CgroupPlace {
    /// The place for groups of a controller, such as `memory`.
    ///
    /// # Errors
    /// [`CgroupError`].
    pub fn find(controller: &'static str) -> Result<Self, CgroupError> {
        let process = Process::myself()?;
        let (groups, mounts) = (process.cgroups()?, process.mountinfo()?);
        let named = Controller { v1: controller, v2: Some(controller) };
        find(named, &groups.0, &mounts.0).ok_or(CgroupError::NoController(controller))
    }

    /// The places for groups of all these controllers, one for each hierarchy, and an error for
    /// each controller that has none.
    ///
    /// # Errors
    /// [`CgroupError::Proc`].
    pub(crate) fn find_all(
        controllers: &[Controller],
    ) -> Result<(Vec<Self>, Vec<CgroupError>), CgroupError> {
        let process = Process::myself()?;
        let (groups, mounts) = (process.cgroups()?, process.mountinfo()?);
        let (mut places, mut missing) = (Vec::<Self>::new(), Vec::new());
        for controller in controllers {
            let found = find(*controller, &groups.0, &mounts.0).filter(CgroupPlace::is_available);
            match found {
                Some(found) => match places.iter_mut().find(|place| place.parent == found.parent) {
                    Some(place) => place.controllers.extend(found.controllers),
                    None => places.push(found),
                },
                None => missing.push(CgroupError::NoController(controller.v1)),
            }
        }
        Ok((places, missing))
    }

    /// Whether a hierarchy of version 2 has the controllers: those of version 1 are elsewhere.
    fn is_available(&self) -> bool {
        let path = self.parent.join("cgroup.controllers");
        self.version == CgroupVersion::V1
            || fs::read_to_string(path).is_ok_and(|text| {
                let has = |name: &&str| text.split_whitespace().any(|found| found == *name);
                self.controllers.iter().all(has)
            })
    }

    /// The directory of new groups.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.parent
    }

    /// Makes a group.
    ///
    /// # Errors
    /// [`CgroupError`].
    pub fn create(&self, name: &str) -> Result<Cgroup, CgroupError> {
        create(self.controllers.clone(), &self.parent, name, self.version)
    }

    /// Moves this process back to the group that it was in.
    ///
    /// # Errors
    /// [`CgroupError`].
    pub fn return_to_own(&self) -> Result<(), CgroupError> {
        write(&self.own.join("cgroup.procs"), "0")
    }
}

impl Cgroup {
    /// The version of its interface.
    #[must_use]
    pub fn version(&self) -> CgroupVersion {
        self.version
    }

    /// Its directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it is a group of this controller.
    pub(crate) fn has(&self, controller: &str) -> bool {
        self.controllers.contains(&controller)
    }

    /// Makes a group in this one, for processes.
    ///
    /// # Errors
    /// [`CgroupError`].
    pub fn create(&self, name: &str) -> Result<Self, CgroupError> {
        create(self.controllers.clone(), &self.path, name, self.version)
    }

    /// Moves this process into the group.
    ///
    /// # Errors
    /// [`CgroupError`].
    pub fn enter(&self) -> Result<(), CgroupError> {
        write(&self.path.join("cgroup.procs"), "0")
    }

    /// Moves the calling thread into a group of version 1. In contrast to moving a process, this
    /// takes no lock that other processes wait for when they make a thread.
    ///
    /// # Errors
    /// [`CgroupError`].
    pub(crate) fn enter_thread(&self) -> Result<(), CgroupError> {
        write(&self.path.join("tasks"), "0")
    }

    /// Writes one of the group's files.
    ///
    /// # Errors
    /// [`CgroupError::Io`].
    pub fn write(&self, file: &str, text: &str) -> Result<(), CgroupError> {
        write(&self.path.join(file), text)
    }

    /// Reads one of the group's files.
    ///
    /// # Errors
    /// [`CgroupError::Io`].
    pub fn read(&self, file: &str) -> Result<String, CgroupError> {
        let path = self.path.join(file);
        fs::read_to_string(&path).map_err(io(&path))
    }

    /// The number in one of the group's files.
    ///
    /// # Errors
    /// [`CgroupError::Io`], [`CgroupError::Missing`].
    pub fn number(&self, file: &str) -> Result<u64, CgroupError> {
        let missing = || CgroupError::Missing { path: self.path.join(file), what: "a number" };
        self.read(file)?.trim().parse().map_err(|_| missing())
    }

    /// A value in one of the group's files with one name and value per line.
    ///
    /// # Errors
    /// [`CgroupError::Io`], [`CgroupError::Missing`].
    pub fn value(&self, file: &str, what: &'static str) -> Result<u64, CgroupError> {
        let text = self.read(file)?;
        let found = text.lines().find_map(|line| line.strip_prefix(what)?.strip_prefix(' '));
        let missing = || CgroupError::Missing { path: self.path.join(file), what };
        found.and_then(|value| value.parse().ok()).ok_or_else(missing)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        remove(&self.path);
    }
}

/// Removes a group and the groups in it. Those with processes stay.
pub fn remove(path: &Path) {
    let inner = fs::read_dir(path).into_iter().flatten().flatten();
    for entry in inner.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        remove(&entry.path());
    }
    let _ = fs::remove_dir(path);
}

fn create(
    controllers: Vec<&'static str>,
    parent: &Path,
    name: &str,
    version: CgroupVersion,
) -> Result<Cgroup, CgroupError> {
    if version == CgroupVersion::V2 {
        let path = parent.join("cgroup.subtree_control");
        let enabled = fs::read_to_string(&path).map_err(io(&path))?;
        let is_enabled = |name: &str| enabled.split_whitespace().any(|found| found == name);
        let missing = controllers.iter().filter(|name| !is_enabled(name));
        let missing: Vec<_> = missing.map(|name| format!("+{name}")).collect();
        if !missing.is_empty() {
            write(&path, &missing.join(" "))?;
        }
    }
    let path = parent.join(name);
    fs::create_dir(&path).map_err(io(&path))?;
    Ok(Cgroup { controllers, path, version })
}

/// The names of a controller.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Controller {
    /// In version 1.
    pub(crate) v1: &'static str,
    /// In version 2; `None` where every group of version 2 has it, under no name.
    pub(crate) v2: Option<&'static str>,
}

/// Where a process in these groups can have a group, in a cgroup file system among these mounts.
fn find(
    controller: Controller,
    groups: &[ProcessCGroup],
    mounts: &[MountInfo],
) -> Option<CgroupPlace> {
    let v1 = |group: &&ProcessCGroup| group.controllers.iter().any(|name| name == controller.v1);
    let v2 = |group: &&ProcessCGroup| group.controllers.is_empty();
    let path = |group: &ProcessCGroup| group.pathname.trim_start_matches('/').to_owned();
    let mount_of = |kind: &str, option: Option<&str>| {
        let fits = |mount: &&MountInfo| {
            mount.fs_type == kind
                && option.is_none_or(|name| mount.super_options.contains_key(name))
        };
        mounts.iter().find(fits).map(|mount| mount.mount_point.clone())
    };
    if let Some(mount) = mount_of("cgroup", Some(controller.v1))
        && let Some(group) = groups.iter().find(v1)
    {
        let own = mount.join(path(group));
        let version = CgroupVersion::V1;
        let controllers = vec![controller.v1];
        return Some(CgroupPlace { controllers, parent: own.clone(), own, version });
    }
    // In version 2 a group with processes gives its children no controller, so the new group is a
    // child of the root.
    let parent = mount_of("cgroup2", None)?;
    let own = parent.join(path(groups.iter().find(v2)?));
    let controllers = controller.v2.into_iter().collect();
    Some(CgroupPlace { controllers, own, parent, version: CgroupVersion::V2 })
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
