//! Bringing a vCPU out of `KVM_RUN`: a signal to its thread, and the flag that `KVM_RUN` checks.

use std::sync::Once;
use std::sync::atomic::{AtomicU8, Ordering};

use kvm_ioctls::VcpuFd;
use vmm_sys_util::errno::Error;
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

/// The signal that interrupts `KVM_RUN`.
pub(super) fn signal() -> libc::c_int {
    SIGRTMIN()
}

extern "C" fn on_signal(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

/// Installs the handler of the signal, once for each process.
pub(super) fn install_handler() -> Result<(), Error> {
    static HANDLER: Once = Once::new();
    let mut installed = Ok(());
    HANDLER.call_once(|| {
        installed = register_signal_handler(signal(), on_signal);
    });
    installed
}

/// The byte of `kvm_run` that makes the next `KVM_RUN` return at once.
pub(super) struct ImmediateExit(*const AtomicU8);

// SAFETY: after the first run the byte is only accessed atomically, and the pointer is removed from
// its mutex before the mapping of the byte is dropped.
unsafe impl Send for ImmediateExit {}

impl ImmediateExit {
    pub(super) fn of(fd: &mut VcpuFd) -> Self {
        let flag = std::ptr::from_mut(&mut fd.get_kvm_run().immediate_exit);
        Self(flag.cast::<AtomicU8>().cast_const())
    }

    pub(super) fn set(&self, value: u8) {
        // SAFETY: the caller holds the mutex, which contains this value only while the mapping
        // exists.
        unsafe { &*self.0 }.store(value, Ordering::SeqCst);
    }

    pub(super) fn is_set(&self) -> bool {
        // SAFETY: as above.
        unsafe { &*self.0 }.load(Ordering::SeqCst) != 0
    }
}
