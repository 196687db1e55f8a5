//! How the host's KVM runs guests.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::sync::OnceLock;

/// How this host's KVM runs a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Virtualization {
    /// VT-x or SVM: every guest runs.
    Hardware,
    /// KVM with software page tables, as PVM provides it. Ring 3 runs natively, ring 0 is emulated
    /// one instruction at a time, and a stock Linux kernel does not finish its boot.
    Software,
}

impl Virtualization {
    /// Whether the host's processor has VT-x or SVM, from /proc/cpuinfo, which is read once in a
    /// process: a jailed one cannot.
    ///
    /// # Errors
    /// /proc/cpuinfo cannot be read.
    pub fn of_host() -> io::Result<Self> {
        static FOUND: OnceLock<Result<Virtualization, io::ErrorKind>> = OnceLock::new();
        let read = || Self::from_cpuinfo(BufReader::new(File::open("/proc/cpuinfo")?));
        let found = FOUND.get_or_init(|| read().map_err(|error| error.kind()));
        found.map_err(io::Error::from)
    }

    /// Reads the entry of the first processor only: all processors have the same flags.
    pub(super) fn from_cpuinfo(cpuinfo: impl BufRead) -> io::Result<Self> {
        for line in cpuinfo.lines() {
            if let Some(flags) = line?.strip_prefix("flags") {
                let hardware = flags.split_whitespace().any(|flag| flag == "vmx" || flag == "svm");
                return Ok(if hardware { Self::Hardware } else { Self::Software });
            }
        }
        Ok(Self::Software)
    }
}
