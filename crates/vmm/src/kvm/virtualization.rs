//! How the host's KVM runs guests.

use std::arch::x86_64::__cpuid;
use std::sync::LazyLock;

/// How this host's KVM runs a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Virtualization {
    /// VT-x or SVM: every guest runs.
    Hardware,
    /// KVM with software page tables, as PVM provides it. Ring 3 runs natively, ring 0 is emulated
    /// one instruction at a time, and a stock Linux kernel does not finish its boot.
    Software,
}

/// The feature VMX in ECX of CPUID's leaf 1 (Intel SDM, volume 2A, CPUID).
const VMX: u32 = 1 << 5;
/// The feature SVM in ECX of CPUID's leaf 0x8000_0001 (AMD64 APM, volume 3, appendix E).
const SVM: u32 = 1 << 2;
const EXTENDED: u32 = 0x8000_0000;

impl Virtualization {
    /// Whether the host's processor has VT-x or SVM, by CPUID, which a jailed process can ask. Only
    /// the first call asks: in a virtual machine CPUID leaves it.
    #[must_use]
    pub fn of_host() -> Self {
        static HOST: LazyLock<Virtualization> = LazyLock::new(Virtualization::read);
        *HOST
    }

    fn read() -> Self {
        let has_vmx = __cpuid(1).ecx & VMX != 0;
        let has_svm = __cpuid(EXTENDED).eax > EXTENDED && __cpuid(EXTENDED + 1).ecx & SVM != 0;
        if has_vmx || has_svm { Self::Hardware } else { Self::Software }
    }
}
