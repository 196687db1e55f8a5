//! The machine state of a snapshot: everything of a microVM but its memory and its disks.
//!
//! It has a version of its own, kept by the snapshot's header, outside these bytes. Any change to a
//! struct that is serialised here needs a new [`MACHINE_STATE_VERSION`].

use kvm_bindings::{kvm_cpuid_entry2, kvm_irqchip, kvm_msr_entry};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::console::SerialRegisters;
use crate::vcpu::state::VcpuState;
use crate::virtio::{DeviceState, QueueRegisters, TransportState};
use crate::vm::VmState;

/// Version of the machine state that this build writes and reads.
pub const MACHINE_STATE_VERSION: u32 = 1;

/// The machine state.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct MachineState {
    pub(crate) vm: VmState,
    pub(crate) vcpus: Vec<VcpuState>,
    pub(crate) serial: SerialRegisters,
    /// In the order of their windows on the bus.
    pub(crate) virtio: Vec<TransportState>,
}

/// Why machine state cannot be read.
#[derive(Debug, Error)]
pub enum DecodeStateError {
    /// Written by another version of firn.
    #[error(
        "the snapshot's machine state has version {found}, this firn reads version {supported}: \
         freeze the function again with this firn, or thaw with the one that froze it"
    )]
    Version {
        /// Version in the snapshot's header.
        found: u32,
        /// Version of this build.
        supported: u32,
    },
    /// Its checksum held, its content does not parse: a defect of the writer.
    #[error("the snapshot's machine state does not parse although its checksum holds")]
    Parse(#[source] postcard::Error),
    /// Bytes are left over after parsing: a defect of the writer.
    #[error("the snapshot's machine state has {0} bytes too many")]
    TrailingBytes(usize),
}

impl MachineState {
    pub(crate) fn encode(&self) -> Result<Vec<u8>, postcard::Error> {
        postcard::to_stdvec(self)
    }

    pub(crate) fn decode(version: u32, bytes: &[u8]) -> Result<Self, DecodeStateError> {
        if version != MACHINE_STATE_VERSION {
            return Err(DecodeStateError::Version {
                found: version,
                supported: MACHINE_STATE_VERSION,
            });
        }
        let (state, rest) = postcard::take_from_bytes(bytes).map_err(DecodeStateError::Parse)?;
        if rest.is_empty() { Ok(state) } else { Err(DecodeStateError::TrailingBytes(rest.len())) }
    }
}

/// Sizes of what version 1 serialises. Where the build fails here, the machine state's format has
/// changed: raise [`MACHINE_STATE_VERSION`], and add a golden state of the new version beside the old.
const _: () = {
    assert!(MACHINE_STATE_VERSION == 1);
    assert!(size_of::<MachineState>() == 160);
    assert!(size_of::<VmState>() == 72);
    assert!(size_of::<VcpuState>() == 6216);
    assert!(size_of::<SerialRegisters>() == 40);
    assert!(size_of::<TransportState>() == 88);
    assert!(size_of::<DeviceState>() == 32);
    assert!(size_of::<QueueRegisters>() == 40);
    assert!(size_of::<kvm_irqchip>() == 520);
    assert!(size_of::<kvm_cpuid_entry2>() == 40);
    assert!(size_of::<kvm_msr_entry>() == 16);
};

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
