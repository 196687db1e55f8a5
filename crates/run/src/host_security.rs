//! Facts about this host on which the isolation of microVMs depends.

use std::fs;
use std::path::Path;

use firn_memory::USERFAULTFD_DEVICE;
use landlock::{AccessFs, LandlockStatus, Ruleset, RulesetAttr, RulesetError};
use serde::Serialize;

const SMT: &str = "/sys/devices/system/cpu/smt";
const VULNERABILITIES: &str = "/sys/devices/system/cpu/vulnerabilities";
const KSM_RUN: &str = "/sys/kernel/mm/ksm/run";
const KSM_OF_PROCESS: &str = "/proc/self/ksm_stat";
const SECCOMP_ACTIONS: &str = "/proc/sys/kernel/seccomp/actions_avail";
const USER_NAMESPACES: &str = "/proc/sys/user/max_user_namespaces";
/// Switches of distributions, each with the value that limits user namespaces to root: Debian's and
/// Ubuntu's.
const USER_NAMESPACE_SWITCHES: [(&str, &str); 2] = [
    ("/proc/sys/kernel/unprivileged_userns_clone", "0"),
    ("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1"),
];

/// What this host has for the isolation of microVMs, and what it lacks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct HostSecurity {
    /// Simultaneous multithreading; `None` where the kernel does not report it.
    pub smt: Option<Smt>,
    /// Kernel same-page merging.
    pub ksm: Ksm,
    /// The vulnerabilities of the processor that the kernel knows, by name.
    pub vulnerabilities: Vec<Vulnerability>,
    /// The version of Landlock's ABI; `None` without Landlock.
    pub landlock_abi: Option<i32>,
    /// Whether a seccomp filter can end a process.
    pub seccomp: bool,
    /// Which processes may make user namespaces.
    pub user_namespaces: UserNamespaces,
    /// Whether there is a device that userfaultfds can be opened from (Linux 6.1).
    pub userfaultfd_device: bool,
}

/// Simultaneous multithreading: several hardware threads of one core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Smt {
    /// Hardware threads share cores.
    On,
    /// It is switched off.
    Off,
    /// The processor has none, or this is a virtual machine that is not shown any.
    Absent,
}

/// Kernel same-page merging.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ksm {
    /// The kernel has none.
    Absent,
    /// The kernel merges no pages.
    Off,
    /// It merges pages of processes that request it, and this one does not.
    OfOthers,
    /// It merges pages of this process and its children: the process that started it has requested
    /// that (`PR_SET_MEMORY_MERGE`, systemd's `MemoryKSM=`).
    OfThisProcess,
}

/// One vulnerability of the processor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Vulnerability {
    /// The name of its file in /sys/devices/system/cpu/vulnerabilities.
    pub name: String,
    /// What the kernel reports.
    pub text: String,
    /// What that means.
    pub exposure: Exposure,
}

/// How much a vulnerability matters on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Exposure {
    /// The processor does not have it.
    NotAffected,
    /// The kernel mitigates it.
    Mitigated,
    /// The kernel cannot tell.
    Unknown,
    /// It is mitigated, except between the hardware threads of one core.
    VulnerableThreads,
    /// It is not mitigated, or not in full.
    Vulnerable,
}

/// Which processes may make user namespaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum UserNamespaces {
    /// All.
    All,
    /// Those of root: this file has the switch.
    Root(&'static str),
    /// None.
    None,
}

impl HostSecurity {
    /// Reads the facts, without changing anything. A file that is missing counts as the absence of
    /// what it describes.
    #[must_use]
    pub fn read() -> Self {
        let file = |path: &str| fs::read_to_string(path).ok();
        let smt = |name: &str| fs::read_to_string(Path::new(SMT).join(name)).ok();
        let ksm = (file(KSM_RUN), file(KSM_OF_PROCESS));
        Self {
            smt: smt_of(smt("active").as_deref(), smt("control").as_deref()),
            ksm: ksm_of(ksm.0.as_deref(), ksm.1.as_deref()),
            vulnerabilities: vulnerabilities(Path::new(VULNERABILITIES)),
            landlock_abi: landlock_abi(),
            seccomp: file(SECCOMP_ACTIONS).is_some_and(|actions| has_filters(&actions)),
            user_namespaces: user_namespaces(file),
            userfaultfd_device: Path::new(USERFAULTFD_DEVICE).exists(),
        }
    }
}

fn smt_of(active: Option<&str>, control: Option<&str>) -> Option<Smt> {
    match (active?.trim(), control.map(str::trim)) {
        ("1", _) => Some(Smt::On),
        ("0", Some("on" | "off" | "forceoff")) => Some(Smt::Off),
        ("0", _) => Some(Smt::Absent),
        _ => None,
    }
}

fn ksm_of(run: Option<&str>, process: Option<&str>) -> Ksm {
    let merges = |line: &str| matches!(line.trim(), "ksm_merge_any: yes" | "ksm_mergeable: yes");
    match run.map(str::trim) {
        None => Ksm::Absent,
        Some("1") if process.is_some_and(|text| text.lines().any(merges)) => Ksm::OfThisProcess,
        Some("1") => Ksm::OfOthers,
        // 2: what was merged is separated again.
        Some(_) => Ksm::Off,
    }
}

/// The vulnerabilities, by name.
fn vulnerabilities(directory: &Path) -> Vec<Vulnerability> {
    let entries = fs::read_dir(directory).into_iter().flatten();
    let read = entries.filter_map(|entry| {
        let entry = entry.ok()?;
        let text = fs::read_to_string(entry.path()).ok()?.trim().to_owned();
        let name = entry.file_name().into_string().ok()?;
        Some(Vulnerability { exposure: exposure(&text), name, text })
    });
    let mut found: Vec<_> = read.collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

/// The meaning of a file's text, which has one or more parts: `Mitigation: PTE Inversion; VMX:
/// conditional cache flushes, SMT vulnerable`.
fn exposure(text: &str) -> Exposure {
    let text = text.to_ascii_lowercase();
    let without_threads = text.replace("smt vulnerable", "");
    if without_threads.contains("vulnerable") {
        Exposure::Vulnerable
    } else if without_threads.len() < text.len() {
        Exposure::VulnerableThreads
    } else if text.starts_with("not affected") {
        Exposure::NotAffected
    } else if text.contains("mitigation:") {
        Exposure::Mitigated
    } else {
        Exposure::Unknown
    }
}

/// The version of the kernel's Landlock. The library reports it for a ruleset that is enforced, so
/// a thread of its own is restricted.
fn landlock_abi() -> Option<i32> {
    let restrict = || -> Result<LandlockStatus, RulesetError> {
        let ruleset = Ruleset::default().handle_access(AccessFs::Execute)?;
        Ok(ruleset.create()?.restrict_self()?.landlock)
    };
    let restricted = std::thread::spawn(restrict).join();
    match restricted.unwrap_or_else(|panic| std::panic::resume_unwind(panic)) {
        Ok(LandlockStatus::Available { effective_abi, kernel_abi }) => {
            Some(kernel_abi.unwrap_or(effective_abi as i32))
        }
        _ => None,
    }
}

fn has_filters(actions: &str) -> bool {
    actions.split_whitespace().any(|action| action == "kill_process")
}

fn user_namespaces(file: impl Fn(&str) -> Option<String>) -> UserNamespaces {
    let is = |path: &str, value: &str| file(path).is_some_and(|text| text.trim() == value);
    if file(USER_NAMESPACES).is_none() || is(USER_NAMESPACES, "0") {
        return UserNamespaces::None;
    }
    let switch = USER_NAMESPACE_SWITCHES.into_iter().find(|(path, value)| is(path, value));
    switch.map_or(UserNamespaces::All, |(path, _)| UserNamespaces::Root(path))
}

#[cfg(test)]
#[path = "host_security_tests.rs"]
mod tests;
