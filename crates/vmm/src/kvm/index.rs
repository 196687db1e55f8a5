//! KVM's own page tables, filled before the guest runs. They are the second index, after the host's
//! page tables.

use std::io;
use std::os::fd::AsRawFd;
use std::time::Instant;

use kvm_bindings::{KVM_CAP_PRE_FAULT_MEMORY, KVMIO, kvm_pre_fault_memory};
use kvm_ioctls::{Kvm, VcpuFd};
use serde::{Deserialize, Serialize};
use vmm_sys_util::ioctl::ioctl_with_mut_ref;
use vmm_sys_util::ioctl_iowr_nr;

use firn_base::{GuestRange, nanoseconds};

ioctl_iowr_nr!(KVM_PRE_FAULT_MEMORY, KVMIO, 0xd5, kvm_pre_fault_memory);

/// The part of KVM's own tables that was filled before the guest runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvmIndex {
    /// The plan has no complete index.
    NotAsked,
    /// This kernel's KVM cannot fill its tables in advance (`KVM_PRE_FAULT_MEMORY`, Linux 6.12):
    /// the guest's faults fill them.
    None,
    /// The tables were filled.
    Built {
        /// Bytes of guest memory that KVM maps now; less than requested if KVM returned an error.
        bytes: u64,
        /// Duration, ns.
        ns: u64,
    },
}

/// Fills KVM's tables for ranges of guest memory whose host index is complete. The vCPU does not
/// run.
///
/// An error of KVM is ignored: KVM maps the rest when the guest faults.
pub(super) fn build(kvm: &Kvm, vcpu: &VcpuFd, ranges: &[GuestRange]) -> KvmIndex {
    if ranges.is_empty() {
        return KvmIndex::NotAsked;
    }
    if kvm.check_extension_raw(u64::from(KVM_CAP_PRE_FAULT_MEMORY)) <= 0 {
        return KvmIndex::None;
    }
    let begin = Instant::now();
    let bytes = ranges.iter().map(|range| fill(vcpu, *range)).sum();
    KvmIndex::Built { bytes, ns: nanoseconds(begin.elapsed()) }
}

/// Fills the tables for one range; returns how many bytes of it KVM maps now.
fn fill(vcpu: &VcpuFd, range: GuestRange) -> u64 {
    let mut rest = kvm_pre_fault_memory { gpa: range.start, size: range.len, ..Default::default() };
    while rest.size > 0 {
        let before = rest.size;
        // SAFETY: the argument is the structure that this ioctl reads and updates.
        let result =
            unsafe { ioctl_with_mut_ref(&vcpu.as_raw_fd(), KVM_PRE_FAULT_MEMORY(), &mut rest) };
        let retry = result < 0
            && matches!(
                io::Error::last_os_error().raw_os_error(),
                Some(libc::EINTR | libc::EAGAIN)
            );
        if !retry && rest.size == before {
            break;
        }
    }
    range.len - rest.size
}
