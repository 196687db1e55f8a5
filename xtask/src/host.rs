//! The properties of this machine that select what is built and tested.

use std::fs;
use std::path::Path;

use crate::Result;
use crate::step::Step;

const WRITES_CGROUP2: &str =
    "test -w \"$(awk '$3 == \"cgroup2\" { print $2; exit }' /proc/mounts)/cgroup.procs\"";

/// Whether the CPU controller is in a writable hierarchy of version 1, or in a writable one of
/// version 2.
const LIMITS_CPU: &str = "awk '$3 == \"cgroup\" && $4 ~ /(^|,)cpu(,|$)/ || $3 == \"cgroup2\" { print $2 }' /proc/mounts \
     | while read -r place; do \
         if test -e \"$place/cgroup.controllers\"; then grep -qw cpu \"$place/cgroup.controllers\" || continue; fi; \
         test -w \"$place/cgroup.procs\" && echo yes; \
       done | grep -q yes";

/// Whether this user can open a tap device in a network namespace of its own.
const MAKES_TAPS: &str = "unshare --net sh -c ': <> /dev/net/tun'";

/// This machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Host {
    /// `/dev/kvm` is writable.
    pub(crate) kvm: bool,
    /// That KVM has hardware virtualisation, so it runs Linux guests.
    pub(crate) hardware: bool,
    /// Temporary files are on a disk.
    pub(crate) disk: bool,
    /// This user is root.
    pub(crate) root: bool,
    /// Control groups of version 2 are mounted, and this user can make some.
    pub(crate) cgroup2: bool,
    /// This user can limit the CPU time of control groups.
    pub(crate) cpu_limits: bool,
    /// This user can make tap devices.
    pub(crate) tun: bool,
}

impl Host {
    pub(crate) fn detect() -> Result<Self> {
        let kvm = Step::new("test").args(["-w", "/dev/kvm"]).succeeds()?;
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let temporary = std::env::temp_dir();
        let file_system =
            Step::new("stat").args(["-f", "-c", "%T"]).arg(&temporary).output().unwrap_or_default();
        let cgroup2 = Step::new("sh").args(["-c", WRITES_CGROUP2]).succeeds()?;
        let cpu_limits = Step::new("sh").args(["-c", LIMITS_CPU]).succeeds()?;
        let tun = Step::new("sh").args(["-c", MAKES_TAPS]).succeeds()?;
        Ok(Self {
            tun,
            cgroup2,
            cpu_limits,
            kvm,
            hardware: kvm && has_virtualization(&cpuinfo),
            disk: !["tmpfs", "ramfs"].contains(&file_system.trim()),
            root: Step::new("id").arg("-u").output()?.trim() == "0",
        })
    }

    /// The parts of this machine that tests require instead of passing without them
    /// (tests/required).
    pub(crate) fn required(&self) -> String {
        let parts = [
            (self.kvm, "kvm"),
            (self.disk, "disk"),
            (self.root, "root"),
            (self.cgroup2, "cgroup2"),
            (self.cpu_limits, "cpu_limits"),
            (self.tun, "tun"),
        ];
        let found: Vec<&str> =
            parts.into_iter().filter(|(found, _)| *found).map(|(_, name)| name).collect();
        found.join(",")
    }

    /// The make target that builds the files for Linux guests: under this machine's KVM, or in the
    /// lab.
    pub(crate) fn guests(&self) -> &'static str {
        if self.hardware { "guest" } else { "lab" }
    }
}

fn has_virtualization(cpuinfo: &str) -> bool {
    cpuinfo.split_whitespace().any(|flag| flag == "vmx" || flag == "svm")
}

/// Whether a program is in a folder of `PATH`.
pub(crate) fn has_program(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| Path::is_file(&folder.join(name)))
}

#[cfg(test)]
#[path = "host_tests.rs"]
mod tests;
