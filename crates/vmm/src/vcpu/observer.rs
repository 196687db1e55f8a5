//! Looking at a vCPU from inside its own thread, wherever the guest happens to be.

use kvm_bindings::{kvm_regs, kvm_sregs};
use kvm_ioctls::VcpuFd;

use super::interrupt_signal;

/// Is shown a vCPU whenever [`VcpuThread::interrupt`] or another signal brought it out of guest mode.
pub trait Observer: Send + Sync {
    /// Called in the vCPU's thread. The guest stands still until it returns, before the instruction at its instruction
    /// pointer; where it was to touch memory that is not there yet, that is the instruction that touches it.
    fn interrupted(&self, vcpu: &StoppedVcpu<'_>);
}

/// A vCPU that is not in guest mode.
pub struct StoppedVcpu<'a> {
    pub(super) fd: &'a VcpuFd,
}

impl StoppedVcpu<'_> {
    /// Its general and special registers.
    ///
    /// # Errors
    /// KVM refuses, which it does for no vCPU that runs.
    pub fn registers(&self) -> Result<(kvm_regs, kvm_sregs), kvm_ioctls::Error> {
        Ok((self.fd.get_regs()?, self.fd.get_sregs()?))
    }
}

/// The thread of a vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VcpuThread {
    id: u32,
}

impl VcpuThread {
    pub(super) fn current() -> Self {
        Self { id: rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs() }
    }

    /// Its system-wide id.
    #[must_use]
    pub fn id(self) -> u32 {
        self.id
    }

    /// Brings the vCPU out of guest mode once, or out of KVM where it waits for memory. Without effect where the vCPU
    /// is in neither.
    pub fn interrupt(self) {
        let process = rustix::process::getpid().as_raw_nonzero().get();
        // SAFETY: the signal has a handler since before this thread was started, and none of its own effects.
        unsafe { libc::syscall(libc::SYS_tgkill, process, self.id, interrupt_signal()) };
    }
}
