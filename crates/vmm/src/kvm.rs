//! Opening KVM, and what this host's KVM can do.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES};
use kvm_ioctls::{Cap, Kvm};
use thiserror::Error;

/// The device through which the kernel offers KVM.
pub const KVM_DEVICE: &str = "/dev/kvm";

/// Capabilities that the monitor cannot do without.
const REQUIRED: &[(Cap, &str)] = &[
    (Cap::Irqchip, "KVM_CAP_IRQCHIP"),
    (Cap::Ioeventfd, "KVM_CAP_IOEVENTFD"),
    (Cap::Irqfd, "KVM_CAP_IRQFD"),
    (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
    (Cap::SetTssAddr, "KVM_CAP_SET_TSS_ADDR"),
    (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
    (Cap::AdjustClock, "KVM_CAP_ADJUST_CLOCK"),
    (Cap::MpState, "KVM_CAP_MP_STATE"),
    (Cap::VcpuEvents, "KVM_CAP_VCPU_EVENTS"),
    (Cap::Debugregs, "KVM_CAP_DEBUGREGS"),
    (Cap::Xsave, "KVM_CAP_XSAVE"),
    (Cap::Xcrs, "KVM_CAP_XCRS"),
    (Cap::ExtCpuid, "KVM_CAP_EXT_CPUID"),
];

/// How this host's KVM runs a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Virtualization {
    /// VT-x or SVM: any guest runs.
    Hardware,
    /// Neither: KVM with software page tables. Ring 3 runs natively, ring 0 is emulated
    /// instruction by instruction, and a stock Linux kernel does not get through its boot.
    Software,
}

impl Virtualization {
    /// What /proc/cpuinfo says of the host's processor.
    ///
    /// # Errors
    /// /proc/cpuinfo cannot be read.
    pub fn detect() -> io::Result<Self> {
        Self::from_cpuinfo(BufReader::new(File::open("/proc/cpuinfo")?))
    }

    /// Reads no further than the first processor: they are all alike, and the file has as many
    /// entries as there are processors.
    fn from_cpuinfo(cpuinfo: impl BufRead) -> io::Result<Self> {
        for line in cpuinfo.lines() {
            if let Some(flags) = line?.strip_prefix("flags") {
                let hardware = flags.split_whitespace().any(|flag| flag == "vmx" || flag == "svm");
                return Ok(if hardware { Self::Hardware } else { Self::Software });
            }
        }
        Ok(Self::Software)
    }
}

/// Why KVM cannot be used.
#[derive(Debug, Error)]
pub enum KvmError {
    /// There is no KVM device.
    #[error(
        "{0} does not exist: load the kvm_intel or kvm_amd module, enable virtualisation in the \
         firmware, or use the lab (`firn lab run -- firn ...`)"
    )]
    Missing(PathBuf),
    /// The device is there, this user may not open it.
    #[error("no permission to open {0}: run as root or join the group that owns it (often `kvm`)")]
    Permission(PathBuf),
    /// Opening failed in another way.
    #[error("opening {path}")]
    Open {
        /// The device.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// An interface version other than the stable 12.
    #[error("{path} is not a usable KVM: its API version is {version}, 12 is needed")]
    Version {
        /// The device.
        path: PathBuf,
        /// What KVM_GET_API_VERSION answered.
        version: i32,
    },
    /// A capability is missing.
    #[error("this kernel's KVM lacks {0}, which the monitor needs: use Linux 6.1 or newer")]
    Capability(&'static str),
}

/// Opens the KVM device and checks that it has what the monitor needs.
///
/// # Errors
/// See [`KvmError`].
pub fn open(path: &Path) -> Result<Kvm, KvmError> {
    let c_path = std::ffi::CString::new(path.as_os_str().as_encoded_bytes())
        .map_err(|_| KvmError::Missing(path.to_owned()))?;
    let kvm = Kvm::new_with_path(c_path).map_err(|errno| match errno.errno() {
        libc::ENOENT | libc::ENXIO | libc::ENODEV => KvmError::Missing(path.to_owned()),
        libc::EACCES | libc::EPERM => KvmError::Permission(path.to_owned()),
        code => {
            KvmError::Open { path: path.to_owned(), source: io::Error::from_raw_os_error(code) }
        }
    })?;
    let version = kvm.get_api_version();
    if version != 12 {
        return Err(KvmError::Version { path: path.to_owned(), version });
    }
    for (capability, name) in REQUIRED {
        if !kvm.check_extension(*capability) {
            return Err(KvmError::Capability(name));
        }
    }
    Ok(kvm)
}

/// Why the frequency of the time-stamp counter is not known.
#[derive(Debug, Error)]
pub enum TscError {
    /// KVM cannot be used.
    #[error(transparent)]
    Open(#[from] KvmError),
    /// KVM does not name it.
    #[error("asking KVM for the frequency of the time-stamp counter")]
    Frequency(#[source] kvm_ioctls::Error),
}

/// Frequency of the time-stamp counter that guests see on this host, kHz (`KVM_GET_TSC_KHZ`).
///
/// # Errors
/// See [`TscError`].
pub fn tsc_khz(kvm: &Path) -> Result<u32, TscError> {
    let vm = open(kvm)?.create_vm().map_err(TscError::Frequency)?;
    let vcpu = vm.create_vcpu(0).map_err(TscError::Frequency)?;
    vcpu.get_tsc_khz().map_err(TscError::Frequency)
}

/// Who waits for a page of guest memory that is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Faults {
    /// As KVM thinks best.
    Any,
    /// The thread of the vCPU that touches it.
    InVcpuThreads,
}

/// KVM, opened, the processors that it offers, and how its virtual machines are to meet faults: what a restore needs that
/// depends on no snapshot.
pub struct OpenKvm {
    pub(crate) kvm: Kvm,
    pub(crate) cpuid: CpuId,
    pub(crate) faults: Faults,
}

/// Why KVM cannot be used for a microVM.
#[derive(Debug, Error)]
pub enum OpenKvmError {
    /// It cannot be opened, or lacks something.
    #[error(transparent)]
    Open(#[from] KvmError),
    /// It does not say what processors it offers.
    #[error("asking KVM for the CPUID it supports")]
    Cpuid(#[source] kvm_ioctls::Error),
}

impl OpenKvm {
    /// Opens a KVM device, and asks it for its processors.
    ///
    /// # Errors
    /// See [`OpenKvmError`].
    pub fn open(path: &Path) -> Result<Self, OpenKvmError> {
        let kvm = open(path)?;
        let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(OpenKvmError::Cpuid)?;
        Ok(Self { kvm, cpuid, faults: Faults::Any })
    }

    /// Whether KVM offers the local APIC timer's deadline mode, which its CPUID leaves out.
    pub(crate) fn tsc_deadline(&self) -> bool {
        self.kvm.check_extension(Cap::TscDeadlineTimer)
    }
}

#[cfg(test)]
#[path = "kvm_tests.rs"]
mod tests;
