//! What a monitor cannot do to its host, even if its guest takes it over.
//!
//! A monitor enters the jail at its first line, while it has one thread and no guest. The walls are
//! the kernel's:
//!
//! - **network**: an empty network namespace, which all monitors of a supervisor share: making one
//!   for each takes 0.4 ms (network_namespaces(7));
//! - **names**: ipc and uts namespaces of its own;
//! - **privileges**: no capability but the one by which the files of other users are opened, none
//!   that it could get by executing a file, no core dumps, no reading of its memory by other
//!   processes (capabilities(7), `PR_SET_NO_NEW_PRIVS`, `PR_SET_DUMPABLE`);
//! - **programs**: Landlock denies executing files, TCP, abstract unix sockets of other processes
//!   and signals to them (landlock(7)).
//!
//! Files are not walled off: a monitor opens devices and files of `/proc` and `/sys` by their paths.

mod privileges;

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::OnceLock;
use std::time::Instant;

use firn_base::{ErrorChain, error_chain, ns_since};
use landlock::{
    ABI, Access, AccessFs, AccessNet, Ruleset, RulesetAttr, RulesetError, RulesetStatus, Scope,
};
use rustix::process::geteuid;
use rustix::thread::UnshareFlags;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::error::StartError;

/// Whether monitors are jailed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum JailMode {
    /// As far as the host can; the report of a start names what is missing.
    #[default]
    Auto,
    /// By all walls: a monitor that lacks one ends with the reason.
    Require,
    /// Not at all.
    Off,
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
    /// The network namespace.
    Network,
    /// The other namespaces.
    Names,
    /// What Landlock denies.
    Programs,
    /// The privileges.
    Privileges,
}

impl fmt::Display for Wall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Network => "network",
            Self::Names => "names",
            Self::Programs => "programs",
            Self::Privileges => "privileges",
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

/// The supervisor's side: how its monitors are jailed.
#[derive(Debug, Default)]
pub struct Jail {
    mode: JailMode,
    /// The network namespace of all monitors; each makes one where there is none.
    network: Option<File>,
}

impl Jail {
    /// A jail for the monitors of this process. Only a supervisor with root's rights can give them
    /// a network namespace that they share.
    #[must_use]
    pub fn new(mode: JailMode) -> Self {
        let shared = mode != JailMode::Off && geteuid().is_root();
        let network = shared.then(empty_network).and_then(Result::ok);
        Self { mode, network }
    }

    /// The jail of the monitors that this process starts without naming one: [`JailMode::Auto`].
    pub(crate) fn of_process() -> &'static Self {
        static JAIL: OnceLock<Jail> = OnceLock::new();
        JAIL.get_or_init(|| Self::new(JailMode::Auto))
    }

    /// The mode.
    #[must_use]
    pub fn mode(&self) -> JailMode {
        self.mode
    }

    /// The path by which a child of this process finds the network namespace.
    pub(crate) fn network(&self) -> Option<PathBuf> {
        let file = self.network.as_ref()?.as_raw_fd();
        Some(format!("/proc/{}/fd/{file}", std::process::id()).into())
    }
}

/// A new network namespace. It is made by a thread that is not used for anything else.
fn empty_network() -> io::Result<File> {
    let make = || {
        privileges::unshare(UnshareFlags::NEWNET)?;
        File::open("/proc/thread-self/ns/net")
    };
    let made = std::thread::Builder::new().name("network".into()).spawn(make)?;
    made.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Enters the jail, in a process with one thread. `network` is the network namespace to enter,
/// where there is one.
///
/// # Errors
/// [`StartError::Jail`]: a wall that is required cannot be had.
pub fn enter(mode: JailMode, network: Option<&Path>) -> Result<Option<JailReport>, StartError> {
    if mode == JailMode::Off {
        return Ok(None);
    }
    let begin = Instant::now();
    let mut report = JailReport::default();
    let mut build = |wall, built: io::Result<()>| match built {
        Ok(()) => report.walls.push(wall),
        Err(error) => report.missing.push((wall, error_chain(&error))),
    };
    let entered = match network {
        // Without privileges, all namespaces belong to a user namespace.
        _ if !geteuid().is_root() => privileges::enter_user_namespace(UnshareFlags::NEWNET),
        Some(path) => File::open(path).and_then(privileges::enter_network),
        None => privileges::unshare(UnshareFlags::NEWNET),
    };
    build(Wall::Network, entered);
    build(Wall::Names, privileges::unshare(UnshareFlags::NEWIPC | UnshareFlags::NEWUTS));
    build(Wall::Privileges, privileges::drop_all());
    build(Wall::Programs, deny_programs());
    report.ns = ns_since(begin);
    match report.missing.first() {
        Some((wall, reason)) if mode == JailMode::Require => {
            Err(StartError::Jail { wall: *wall, reason: reason.clone() })
        }
        _ => Ok(Some(report)),
    }
}

/// Denies this thread, and those that it makes, to execute files, to use TCP, and to reach other
/// processes.
fn deny_programs() -> io::Result<()> {
    let denied = || -> Result<_, RulesetError> {
        let newest = ABI::V6;
        Ruleset::default()
            .handle_access(AccessFs::Execute)?
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
