//! Observation of a vCPU from its own thread, at any instruction of the guest.

use kvm_bindings::{kvm_regs, kvm_sregs};
use kvm_ioctls::VcpuFd;

use super::interrupt::signal;

/// Observes a vCPU each time that [`VcpuThread::interrupt`] or another signal interrupts it.
pub(crate) trait Observer: Send + Sync {
    /// Called in the vCPU's thread. Until it returns, the guest is stopped before the instruction
    /// at its instruction pointer. If the vCPU was waiting for missing memory, that instruction
    /// accesses it.
    fn interrupted(&self, vcpu: &StoppedVcpu<'_>);
}

/// A vCPU that is not in guest mode.
pub(crate) struct StoppedVcpu<'a> {
    pub(super) fd: &'a VcpuFd,
}

impl StoppedVcpu<'_> {
    /// The general and special registers.
    pub(crate) fn registers(&self) -> Result<(kvm_regs, kvm_sregs), kvm_ioctls::Error> {
        Ok((self.fd.get_regs()?, self.fd.get_sregs()?))
    }
}

/// The thread of a vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VcpuThread {
    id: u32,
}

impl VcpuThread {
    pub(super) fn current() -> Self {
        Self { id: rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs() }
    }

    /// The thread's system-wide id.
    pub(crate) fn id(self) -> u32 {
        self.id
    }

    /// Brings the vCPU out of guest mode once, or out of KVM while it waits for memory. It has no
    /// effect otherwise.
    pub(crate) fn interrupt(self) {
        let process = rustix::process::getpid().as_raw_nonzero().get();
        // SAFETY: the handler of the signal was installed before this thread started, and does
        // nothing.
        unsafe { libc::syscall(libc::SYS_tgkill, process, self.id, signal()) };
    }
}
