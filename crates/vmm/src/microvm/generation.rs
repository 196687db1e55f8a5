//! The VM generation id, which tells a guest that it is a clone.

use std::io;

use thiserror::Error;
use uuid::Uuid;
use vm_memory::GuestMemoryError;

use super::Microvm;
use crate::arch::layout;
use crate::kvm::{VmError, VmState};

/// Why a guest has no new generation id.
#[derive(Debug, Error)]
pub enum GenerationError {
    /// The id cannot be written to guest memory.
    #[error("cannot write the VM generation id")]
    Memory(#[source] GuestMemoryError),
    /// The id cannot be announced.
    #[error("cannot raise the interrupt that announces the VM generation id")]
    Interrupt(#[source] io::Error),
}

/// Why a paused guest has no new generation id.
#[derive(Debug, Error)]
pub enum RenewError {
    /// The state of the interrupt controllers cannot be read.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// The id cannot be written or announced.
    #[error(transparent)]
    Generation(#[from] GenerationError),
}

impl Microvm {
    /// Gives the paused guest another generation id, as a clone of its own snapshot would have.
    ///
    /// # Errors
    /// See [`RenewError`].
    pub fn renew_generation(&self, generation: Uuid) -> Result<(), RenewError> {
        let state = self.vm.save()?;
        Ok(self.announce(generation, &state)?)
    }

    /// Writes a new generation id, and interrupts the guest if it accepts the interrupt.
    pub(super) fn announce(
        &self,
        generation: Uuid,
        state: &VmState,
    ) -> Result<(), GenerationError> {
        self.vm.write_generation(generation).map_err(GenerationError::Memory)?;
        if state.accepts(layout::GENERATION_GSI) {
            self.generation_irq.write(1).map_err(GenerationError::Interrupt)?;
        }
        Ok(())
    }
}
