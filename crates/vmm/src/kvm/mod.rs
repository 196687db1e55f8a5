//! KVM: opening it, its virtual machines, its own page tables and its counters.

mod index;
mod stats;
mod virtualization;
mod vm;

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use firn_base::move_away;
use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::{Cap, Kvm, VmFd};
use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use index::KvmIndex;
pub(crate) use stats::{FaultCounts, StatsFile};
pub use stats::{KvmCounters, KvmStats};
pub use virtualization::Virtualization;
pub use vm::VmError;
pub(crate) use vm::{Vm, VmState, create_vm};

/// The device through which the kernel provides KVM.
pub const KVM_DEVICE: &str = "/dev/kvm";

/// The only stable version of KVM's API.
const API_VERSION: i32 = 12;

/// Capabilities that the monitor requires.
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

/// Why KVM cannot be used.
#[derive(Debug, Error)]
pub enum KvmError {
    /// There is no KVM device.
    #[error(
        "{0} does not exist: load the kvm_intel or kvm_amd module, enable virtualisation in the \
         firmware, or use the lab (`firn lab run -- firn ...`)"
    )]
    Missing(PathBuf),
    /// The device exists, but this user may not open it.
    #[error("no permission to open {0}: run as root or join the group that owns it (often `kvm`)")]
    Permission(PathBuf),
    /// The device cannot be opened for another reason.
    #[error("cannot open {path}")]
    Open {
        /// The device.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// An API version other than the stable one.
    #[error(
        "{path} cannot be used as KVM: its API version is {version}, {API_VERSION} is required"
    )]
    Version {
        /// The device.
        path: PathBuf,
        /// The result of KVM_GET_API_VERSION.
        version: i32,
    },
    /// A capability is missing.
    #[error("this kernel's KVM has no {0}, which the monitor requires: use Linux 6.1 or newer")]
    Capability(&'static str),
}

/// Opens the KVM device, for this process or for another one: a virtual machine belongs to the
/// process that makes it.
///
/// # Errors
/// [`KvmError::Missing`], [`KvmError::Permission`], [`KvmError::Open`].
pub fn open_device(path: &Path) -> Result<OwnedFd, KvmError> {
    let device = File::options().read(true).write(true).open(path);
    let device = device.map_err(|source| match source.raw_os_error() {
        Some(libc::ENOENT | libc::ENXIO | libc::ENODEV) => KvmError::Missing(path.to_owned()),
        Some(libc::EACCES | libc::EPERM) => KvmError::Permission(path.to_owned()),
        _ => KvmError::Open { path: path.to_owned(), source },
    })?;
    Ok(device.into())
}

/// Opens the KVM device and checks that it has every capability that the monitor requires.
///
/// # Errors
/// See [`KvmError`].
pub fn open(path: &Path) -> Result<Kvm, KvmError> {
    check(open_device(path)?, path)
}

fn check(device: OwnedFd, path: &Path) -> Result<Kvm, KvmError> {
    // SAFETY: nothing else owns the descriptor. If it is not KVM's, the first request fails.
    let kvm = unsafe { Kvm::from_raw_fd(device.into_raw_fd()) };
    let version = kvm.get_api_version();
    if version != API_VERSION {
        return Err(KvmError::Version { path: path.to_owned(), version });
    }
    match REQUIRED.iter().find(|(capability, _)| !kvm.check_extension(*capability)) {
        Some((_, name)) => Err(KvmError::Capability(name)),
        None => Ok(kvm),
    }
}

/// Why the frequency of the time-stamp counter is unknown.
#[derive(Debug, Error)]
pub enum TscError {
    /// KVM cannot be used.
    #[error(transparent)]
    Open(#[from] KvmError),
    /// KVM does not report it.
    #[error("cannot read the frequency of the time-stamp counter from KVM")]
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

/// The thread that waits for a page of guest memory that is not present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultHandling {
    /// KVM decides: the vCPU's thread, or a kernel thread (asynchronous page faults).
    Default,
    /// Always the thread of the vCPU that accesses the page.
    InVcpuThreads,
}

/// An open KVM and the CPUID that it supports: the part of a start that depends on no snapshot.
pub struct OpenKvm {
    pub(crate) kvm: Arc<Kvm>,
    pub(crate) cpuid: CpuId,
    pub(crate) fault_handling: FaultHandling,
    /// The thread that creates a virtual machine in advance.
    machine: Cell<Option<JoinHandle<Option<VmFd>>>>,
}

/// The CPUID that this host's KVM supports. To read it takes 0.3 ms in a virtual machine, whose
/// host sees each CPUID instruction, so a process that opens KVM often, or has others do that,
/// keeps it.
///
/// An entry is a number for each of its fields: serialised, that of the crate is one for each byte.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SupportedCpuid(Vec<[u32; 7]>);

impl SupportedCpuid {
    /// Reads it (`KVM_GET_SUPPORTED_CPUID`) from the device that [`open_device`] has opened at
    /// `path`.
    ///
    /// # Errors
    /// See [`OpenKvmError`].
    pub fn read(device: &OwnedFd, path: &Path) -> Result<Self, OpenKvmError> {
        let cloned = device.try_clone();
        let device = cloned.map_err(|source| KvmError::Open { path: path.to_owned(), source })?;
        let supported = check(device, path)?.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES);
        let fields = |entry: &kvm_cpuid_entry2| {
            let kvm_cpuid_entry2 { function, index, flags, eax, ebx, ecx, edx, .. } = *entry;
            [function, index, flags, eax, ebx, ecx, edx]
        };
        let supported = supported.map_err(OpenKvmError::Cpuid)?;
        Ok(Self(supported.as_slice().iter().map(fields).collect()))
    }

    fn entries(&self) -> Vec<kvm_cpuid_entry2> {
        let entry = |[function, index, flags, eax, ebx, ecx, edx]: [u32; 7]| {
            let padding = [0; 3];
            kvm_cpuid_entry2 { function, index, flags, eax, ebx, ecx, edx, padding }
        };
        self.0.iter().copied().map(entry).collect()
    }
}

/// Why KVM cannot be used for a microVM.
#[derive(Debug, Error)]
pub enum OpenKvmError {
    /// KVM cannot be opened, or lacks a capability.
    #[error(transparent)]
    Open(#[from] KvmError),
    /// The supported CPUID cannot be read.
    #[error("cannot read the CPUID that KVM supports")]
    Cpuid(#[source] kvm_ioctls::Error),
}

impl OpenKvm {
    /// Opens the KVM device at `path`, usually [`KVM_DEVICE`], and reads the CPUID that it
    /// supports.
    ///
    /// # Errors
    /// See [`OpenKvmError`].
    pub fn open(path: &Path) -> Result<Self, OpenKvmError> {
        Self::on(open_device(path)?, path)
    }

    /// The same on the device that [`open_device`] has opened at `path`.
    ///
    /// # Errors
    /// See [`OpenKvmError`].
    pub fn on(device: OwnedFd, path: &Path) -> Result<Self, OpenKvmError> {
        let cpuid = SupportedCpuid::read(&device, path)?;
        Self::with(device, path, &cpuid)
    }

    /// The same where the CPUID that it supports is known.
    ///
    /// # Errors
    /// See [`OpenKvmError`].
    pub fn with(
        device: OwnedFd,
        path: &Path,
        cpuid: &SupportedCpuid,
    ) -> Result<Self, OpenKvmError> {
        let kvm = Arc::new(check(device, path)?);
        let cpuid = CpuId::from_entries(&cpuid.entries())
            .map_err(|_| OpenKvmError::Cpuid(kvm_ioctls::Error::new(libc::E2BIG)))?;
        let (fault_handling, machine) = (FaultHandling::Default, Cell::default());
        Ok(Self { kvm, cpuid, fault_handling, machine })
    }

    /// Begins to create the virtual machine of the next microVM, in a thread beside this one: the
    /// part of a start that takes longest of those that depend on nothing. If it fails, the start
    /// has the error.
    pub fn create_in_advance(&self) {
        let (kvm, thread) = (self.kvm.clone(), std::thread::Builder::new());
        let thread = thread.name("create-vm".into()).spawn(move || kvm.create_vm().ok());
        thread.iter().for_each(move_away);
        self.machine.set(thread.ok());
    }

    /// The same KVM for another thread, with what is created in advance.
    pub(crate) fn share(&self) -> Self {
        let Self { kvm, cpuid, fault_handling, machine } = self;
        let machine = Cell::new(machine.take());
        Self { kvm: kvm.clone(), cpuid: cpuid.clone(), fault_handling: *fault_handling, machine }
    }

    /// A new virtual machine.
    pub(crate) fn create_machine(&self) -> Result<VmFd, kvm_ioctls::Error> {
        let created = self.machine.take().and_then(|thread| thread.join().ok().flatten());
        created.map_or_else(|| self.kvm.create_vm(), Ok)
    }

    /// Whether KVM emulates the local APIC timer's deadline mode, which its CPUID does not report.
    pub(crate) fn has_tsc_deadline(&self) -> bool {
        self.kvm.check_extension(Cap::TscDeadlineTimer)
    }
}

#[cfg(test)]
mod tests;
