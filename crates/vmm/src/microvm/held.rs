//! A microVM that was restored before its request, and waits for it.

use thiserror::Error;
use uuid::Uuid;

use super::Microvm;
use super::generation::GenerationError;
use crate::kvm::{VmError, VmState};
use crate::vcpu::VcpuThreadError;
use crate::vcpu::state::{RestoreVcpuError, Timers};

/// What a restore leaves for the moment of the resume.
pub(super) struct Held {
    /// The clock, and what the interrupt controllers accept.
    pub(super) vm: VmState,
    /// By vCPU, until its thread has them.
    pub(super) timers: Vec<Timers>,
}

/// Why a microVM that was restored in advance cannot run.
#[derive(Debug, Error)]
pub enum ReleaseError {
    /// A vCPU's thread has ended.
    #[error(transparent)]
    Thread(#[from] VcpuThreadError),
    /// A vCPU's timers cannot be set.
    #[error("cannot set the timers of a vCPU")]
    Vcpu(#[from] RestoreVcpuError),
    /// The clock cannot be set.
    #[error("cannot set the clock of the virtual machine")]
    Vm(#[from] VmError),
    /// The guest has no new generation id.
    #[error("cannot tell the guest that it is a clone")]
    Generation(#[from] GenerationError),
}

impl Microvm {
    /// Lets the vCPUs' threads begin with what [`Microvm::release`] sets of them, while this thread
    /// does something else. The second time it does nothing.
    ///
    /// # Errors
    /// [`ReleaseError::Thread`].
    pub fn begin_release(&mut self) -> Result<(), ReleaseError> {
        let Some(held) = &mut self.held else { return Ok(()) };
        for (vcpu, timers) in self.vcpus.iter().zip(held.timers.drain(..)) {
            vcpu.set_timers(timers)?;
        }
        Ok(())
    }

    /// Sets what a [held](super::FrozenMachine::hold) machine lacks: the time-stamp counters and
    /// the timers that depend on them, KVM's clock, and the generation id. The guest then finds
    /// the time of the freeze, as after any other restore, however long the microVM has waited.
    /// Does nothing the second time.
    ///
    /// # Errors
    /// See [`ReleaseError`].
    pub fn release(&mut self, generation: Option<Uuid>) -> Result<(), ReleaseError> {
        self.begin_release()?;
        let Some(Held { vm, .. }) = self.held.take() else { return Ok(()) };
        for vcpu in &self.vcpus {
            vcpu.timers_set()??;
        }
        self.vm.set_clock(&vm)?;
        if let Some(generation) = generation {
            self.announce(generation, &vm)?;
        }
        Ok(())
    }
}
