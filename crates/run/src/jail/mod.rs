//! What a monitor cannot do to its host, even if its guest takes it over.
//!
//! A monitor enters the jail at its first line, while it has one thread and no guest. The walls are
//! the kernel's:
//!
//! - **limits**: control groups of its own, which limit its memory, its processes and the devices
//!   that it may open (`limits.rs`, cgroups(7));
//! - **descriptors**: it has those that it was given and those that it opens before, and not many,
//!   and writes no larger file than its guest needs (close_range(2), `RLIMIT_NOFILE`,
//!   `RLIMIT_FSIZE`);
//! - **network**: an empty network namespace, which all monitors of a supervisor share: making one
//!   for each takes 0.4 ms (network_namespaces(7));
//! - **names**: ipc and uts namespaces of its own;
//! - **processes**: it is the only process of a pid namespace (pid_namespaces(7));
//! - **files**: its root directory is empty and read-only. All monitors of a supervisor share the
//!   mount namespace (mount_namespaces(7));
//! - **user**: an id that no other process has, in a user namespace of its own
//!   (user_namespaces(7));
//! - **privileges**: no capability, none that it could get by executing a file, no core dumps, no
//!   reading of its memory by other processes (capabilities(7), `PR_SET_NO_NEW_PRIVS`,
//!   `PR_SET_DUMPABLE`);
//! - **programs**: Landlock denies all access to files by their paths, TCP, abstract unix sockets
//!   of other processes and signals to them (landlock(7));
//! - **calls**: a filter of system calls, and a narrower one from the guest's first instruction on
//!   (`filter.rs`, seccomp(2)).
//!
//! What it needs of /proc it opens before; its supervisor opens everything else, KVM among it.

mod device_filter;
mod filter;
mod limits;
mod privileges;
mod process;
mod spawner;

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Instant;

use firn_base::{ErrorChain, error_chain, ns_since};
use firn_memory::{HostFacts, OwnFiles};
use firn_net::MAX_FLOWS;
use landlock::{
    ABI, Access, AccessFs, AccessNet, Ruleset, RulesetAttr, RulesetError, RulesetStatus, Scope,
};
use rustix::process::geteuid;
use rustix::thread::{CapabilitySet, LinkNameSpaceType, UnshareFlags};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::cgroup::CgroupError;
use crate::error::StartError;
pub use limits::Limited;
use limits::Limits;
pub(crate) use limits::memory_limit;
pub(crate) use process::{Process, Program};
pub(crate) use spawner::{Spawner, Spawners};

/// Whether monitors are jailed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JailMode {
    /// As far as the host can; the report of a start names what is missing.
    #[default]
    Auto,
    /// By all walls: a monitor that lacks one ends with the reason.
    Require,
    /// Not at all.
    Off,
}

impl JailMode {
    /// The mode of a daemon that was given none: root has the right to build every wall, so a
    /// missing one is an error.
    #[must_use]
    pub fn of_daemon() -> Self {
        if geteuid().is_root() { Self::Require } else { Self::Auto }
    }
}

/// Not a mode.
#[derive(Debug, Error)]
#[error("{0:?} is not auto, require or off")]
pub struct JailModeError(String);

impl FromStr for JailMode {
    type Err = JailModeError;

    fn from_str(text: &str) -> Result<Self, JailModeError> {
        match text {
            "auto" => Ok(Self::Auto),
            "require" => Ok(Self::Require),
            "off" => Ok(Self::Off),
            text => Err(JailModeError(text.to_owned())),
        }
    }
}

impl fmt::Display for JailMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Require => "require",
            Self::Off => "off",
        })
    }
}

/// A wall of the jail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Wall {
    /// The control groups.
    Limits,
    /// Descriptors that it was not given, their number, and the size of files.
    Descriptors,
    /// The network namespace.
    Network,
    /// The ipc and uts namespaces.
    Names,
    /// The pid namespace.
    Processes,
    /// The empty root directory.
    Files,
    /// A user id of its own, in a user namespace of its own.
    User,
    /// The privileges.
    Privileges,
    /// What Landlock denies.
    Programs,
    /// The system calls that it may make.
    Calls,
}

impl fmt::Display for Wall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Limits => "limits",
            Self::Descriptors => "descriptors",
            Self::Network => "network",
            Self::Names => "names",
            Self::Processes => "processes",
            Self::Files => "files",
            Self::User => "user",
            Self::Privileges => "privileges",
            Self::Programs => "programs",
            Self::Calls => "calls",
        })
    }
}

/// How a monitor was jailed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JailReport {
    /// The walls.
    pub walls: Vec<Wall>,
    /// The walls that this host does not have, with the reasons.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<(Wall, String)>,
    /// Entering, ns; part of the start of a process.
    pub ns: u64,
}

/// The namespaces that the monitors of a supervisor share, open, by which a monitor enters them.
#[derive(Debug)]
pub(crate) struct Shared {
    /// An empty network namespace.
    pub(crate) network: OwnedFd,
    /// A mount namespace with an empty root directory.
    pub(crate) root: OwnedFd,
}

impl Shared {
    /// Makes the namespaces, in a thread that is not used for anything else.
    fn make() -> io::Result<Self> {
        let make = || {
            privileges::unshare(UnshareFlags::NEWNET)?;
            let network = File::open("/proc/thread-self/ns/net")?.into();
            Ok(Self { network, root: privileges::make_empty_root()?.into() })
        };
        let made = std::thread::Builder::new().name("namespaces".into()).spawn(make)?;
        made.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// The supervisor's side: how its monitors are jailed.
#[derive(Debug)]
pub struct Jail {
    mode: JailMode,
    /// Without them each monitor makes its own.
    shared: Option<Shared>,
    limits: Option<Arc<Limits>>,
    /// Why the limits are no whole wall.
    missing: Option<String>,
    spawners: Arc<Spawners>,
}

impl Jail {
    /// A jail for the monitors of this process. Only a supervisor with root's rights can give them
    /// namespaces that they share.
    #[must_use]
    pub fn new(mode: JailMode) -> Self {
        let limits = (mode != JailMode::Off).then(|| Limits::make(limits::ALL));
        Self::with(mode, limits.unwrap_or_else(|| Ok(Limits::none(None))))
    }

    /// The same for monitors that stay in the control groups of this process, for a reason.
    #[must_use]
    pub fn without_limits(mode: JailMode, reason: &str) -> Self {
        Self::with(mode, Ok(Limits::none(Some(reason.to_owned()))))
    }

    /// A jail whose monitors have a group that can limit CPU time, in any mode.
    ///
    /// # Errors
    /// [`CgroupError`].
    pub fn with_cpu_limits(mode: JailMode) -> Result<Self, CgroupError> {
        let jail = match mode {
            JailMode::Off => Self::with(mode, Limits::make(limits::CPU)),
            mode => Self::new(mode),
        };
        match jail.limits.as_ref().is_some_and(|limits| limits.has("cpu")) {
            true => Ok(jail),
            false => Err(CgroupError::NoController("cpu")),
        }
    }

    /// Whether every monitor would end for lack of control groups.
    ///
    /// # Errors
    /// [`StartError::Jail`].
    pub fn check(&self) -> Result<(), StartError> {
        self.without(self.missing.clone()).map(drop)
    }

    /// Why a monitor has no whole wall of limits, unless it has to have one.
    fn without(&self, missing: Option<String>) -> Result<Option<String>, StartError> {
        match missing {
            Some(reason) if self.mode == JailMode::Require => {
                Err(StartError::Jail { wall: Wall::Limits, reason })
            }
            missing => Ok(missing),
        }
    }

    fn with(mode: JailMode, limits: Result<Limits, CgroupError>) -> Self {
        let shared = mode != JailMode::Off && geteuid().is_root();
        let limits = limits.unwrap_or_else(|error| Limits::none(Some(error_chain(&error))));
        let missing = limits.missing().map(ToOwned::to_owned);
        let shared = shared.then(Shared::make).and_then(Result::ok);
        let limits = limits.is_some().then(|| Arc::new(limits));
        let spawners = Arc::new(Spawners::new(limits.clone(), shared.is_some()));
        Self { mode, shared, limits, missing, spawners }
    }

    /// The mode.
    #[must_use]
    pub fn mode(&self) -> JailMode {
        self.mode
    }

    /// The namespaces that monitors share.
    pub(crate) fn shared(&self) -> Option<&Shared> {
        self.shared.as_ref()
    }

    /// A thread that starts a monitor, and why the monitor's limits are no whole wall.
    ///
    /// # Errors
    /// [`StartError::Jail`]: it is to have all walls, and lacks these.
    pub(crate) fn spawner(&self) -> Result<(Spawner, Option<String>), StartError> {
        let failed = |error| StartError::session("start a thread", error);
        let mut spawner = self.spawners.take().map_err(failed)?;
        let missing = spawner.wait().err().or_else(|| self.missing.clone());
        Ok((spawner, self.without(missing)?))
    }

    /// What prepares the threads that start monitors.
    pub(crate) fn spawners(&self) -> &Arc<Spawners> {
        &self.spawners
    }
}

/// Closes the descriptors that a monitor has inherited, at its first line.
///
/// # Errors
/// That of close_range(2).
///
/// # Safety
/// Nothing in this process owns a descriptor, except for the standard ones.
pub unsafe fn close_inherited() -> Result<(), StartError> {
    // SAFETY: as the caller guarantees.
    let closed = unsafe { privileges::close_inherited() };
    closed.map_err(|error| StartError::session("close inherited descriptors", error))
}

/// Opens what a monitor, or a [confined](confine_thread) thread, needs of /proc and /sys while it
/// can, and reads what is read once in a process.
pub fn prepare() {
    OwnFiles::of_process();
    // What needs these has an error of its own.
    let _ = HostFacts::of_process();
}

/// Enters the jail, in a process with one thread. `shared` are the namespaces of its supervisor,
/// where it has some. `begin` is called behind all walls but that of the calls, which all threads
/// get: it may start a thread, and the filter is compiled meanwhile.
///
/// # Errors
/// [`StartError::Jail`]: a wall that is required cannot be had.
pub(crate) fn enter(
    mode: JailMode,
    shared: Option<Shared>,
    begin: impl FnOnce(),
) -> Result<Option<JailReport>, StartError> {
    if mode == JailMode::Off {
        begin();
        return Ok(None);
    }
    prepare();
    let begun = Instant::now();
    let mut report = JailReport::default();
    let mut build = |wall, built: io::Result<()>| match built {
        Ok(()) => report.walls.push(wall),
        Err(error) => report.missing.push((wall, error_chain(&error))),
    };
    build(Wall::Descriptors, privileges::limit_descriptors(MAX_FLOWS));
    let own = || {
        // Without privileges, all namespaces belong to a user namespace.
        if !geteuid().is_root() {
            privileges::enter_user_namespace()?;
        }
        privileges::unshare(UnshareFlags::NEWNET)
    };
    let root = match shared {
        Some(Shared { network, root }) => {
            build(Wall::Network, privileges::enter(network, LinkNameSpaceType::Network));
            Ok(root)
        }
        None => {
            build(Wall::Network, own());
            privileges::make_empty_root().map(Into::into)
        }
    };
    let first = is_first_process();
    // Those of a first process were made with its pid namespace.
    let names = match first {
        Ok(()) => Ok(()),
        Err(_) => privileges::unshare(UnshareFlags::NEWIPC | UnshareFlags::NEWUTS),
    };
    build(Wall::Names, names);
    build(Wall::Processes, first);
    let process = privileges::outer_process();
    build(Wall::Files, root.and_then(|root| privileges::enter(root, LinkNameSpaceType::Mount)));
    build(Wall::User, process.and_then(privileges::become_unique));
    build(Wall::Privileges, privileges::drop_all());
    build(Wall::Programs, deny_programs());
    begin();
    build(Wall::Calls, filter::apply());
    report.ns = ns_since(begun);
    match report.missing.first() {
        Some((wall, reason)) if mode == JailMode::Require => {
            Err(StartError::Jail { wall: *wall, reason: reason.clone() })
        }
        _ => Ok(Some(report)),
    }
}

/// Gives all threads of this process, which has one, the same heap: with another one a thread would
/// make calls that a jail and [`confine_thread`] deny.
///
/// # Errors
/// [`StartError::Session`]: the allocator refuses its parameter.
pub fn share_heap() -> Result<(), StartError> {
    privileges::share_heap().map_err(|error| StartError::session("share one heap", error))
}

/// What a thread is for that is [confined](confine_thread).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadRole {
    /// It serves a microVM as a monitor does, and opens nothing by its path.
    Serve,
    /// It opens the files, unix sockets and tap devices that a client names, for other threads.
    Open,
}

/// Takes from this thread, and from those that it makes from now on, the capabilities and system
/// calls that its role does not need. Threads share memory, so a guest that has taken the process
/// over has what any of them has: with those of both roles no program is executed, no other process
/// reached, nothing mounted and no network used but the tap devices.
///
/// A call that is denied ends the process with `exit_code`.
///
/// # Errors
/// [`StartError::Session`].
pub fn confine_thread(role: ThreadRole, exit_code: i32) -> Result<(), StartError> {
    let kept = match role {
        ThreadRole::Serve => CapabilitySet::empty(),
        // A client's files may be another user's, and so may a tap device.
        ThreadRole::Open => {
            CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH | CapabilitySet::NET_ADMIN
        }
    };
    privileges::drop_of_thread(kept)
        .and_then(|()| filter::apply_to_thread(role, exit_code))
        .map_err(|error| StartError::session("take the privileges of a thread", error))
}

/// Starts the thread in which a jailed standby monitor narrows its filter of system calls beside a
/// start, after [`begin_to_narrow`].
///
/// # Errors
/// There is no thread.
pub(crate) fn wait_to_narrow() -> Result<(), StartError> {
    filter::wait_to_narrow().map_err(|error| StartError::session("start a thread", error))
}

/// Begins to narrow the filter of system calls, where a thread waits for that: from now on this
/// process maps no file, and makes no VM. [`narrow`] waits for its end.
pub(crate) fn begin_to_narrow() {
    filter::begin_to_narrow();
}

/// Narrows a jailed process before its guest's first instruction: the filter of system calls, the
/// size of the files that it writes, `largest_file` bytes, and its descriptors to `sockets` and
/// its own.
///
/// # Errors
/// [`StartError::Jail`].
pub(crate) fn narrow(largest_file: u64, sockets: usize) -> Result<(), StartError> {
    let denied =
        |wall| move |error: io::Error| StartError::Jail { wall, reason: error_chain(&error) };
    if !filter::narrow().map_err(denied(Wall::Calls))? {
        return Ok(());
    }
    privileges::limit_files(largest_file)
        .and_then(|()| privileges::limit_descriptors(sockets))
        .map_err(denied(Wall::Descriptors))
}

/// Whether the supervisor has made this process the first of a pid namespace.
fn is_first_process() -> io::Result<()> {
    if std::process::id() == 1 {
        return Ok(());
    }
    let reason = "only a supervisor with root's rights can make a pid namespace, and only where the \
                  kernel has ipc and uts namespaces";
    Err(io::Error::new(io::ErrorKind::Unsupported, reason))
}

/// Denies this thread, and those that it makes, to reach files by their paths, to use TCP, and to
/// reach other processes.
fn deny_programs() -> io::Result<()> {
    let denied = || -> Result<_, RulesetError> {
        let newest = ABI::V6;
        Ruleset::default()
            .handle_access(AccessFs::from_all(newest))?
            .handle_access(AccessNet::from_all(newest))?
            .scope(Scope::from_all(newest))?
            .create()?
            .restrict_self()
    };
    match denied().map_err(|error| io::Error::other(ErrorChain::of(&error)))?.ruleset {
        RulesetStatus::NotEnforced => Err(io::ErrorKind::Unsupported.into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
