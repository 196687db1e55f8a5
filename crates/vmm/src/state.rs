//! The machine state of a snapshot: a microVM without its memory and its disks.
//!
//! It has its own version, which the snapshot's header contains, outside these bytes. Any change to
//! a struct that is serialised here requires a new [`MACHINE_STATE_VERSION`].

use kvm_bindings::{kvm_cpuid_entry2, kvm_irqchip, kvm_msr_entry};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::console::SerialRegisters;
use crate::kvm::VmState;
use crate::vcpu::state::VcpuState;
use crate::virtio::{DeviceState, NetState, NetworkConfig, QueueRegisters, TransportState};

/// The newest version of the machine state that this build writes and reads. It differs from
/// version 1, which it reads as well, in a kind of device.
pub(crate) const MACHINE_STATE_VERSION: u32 = 2;
/// The version of a machine without a network device, which earlier builds read.
const WITHOUT_NETWORK: u32 = 1;

/// The machine state.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct MachineState {
    pub(crate) vm: VmState,
    pub(crate) vcpus: Vec<VcpuState>,
    pub(crate) serial: SerialRegisters,
    /// In the order of their windows on the bus.
    pub(crate) virtio: Vec<TransportState>,
}

/// Why machine state cannot be decoded.
#[derive(Debug, Error)]
pub enum DecodeStateError {
    /// The state was written by another version of firn.
    #[error(
        "the snapshot's machine state has version {found}, and this firn reads versions up to {supported}: \
         freeze the function again with this firn, or thaw it with the firn that froze it"
    )]
    Version {
        /// Version in the snapshot's header.
        found: u32,
        /// Newest version of this build.
        supported: u32,
    },
    /// The content does not parse although its checksum is correct: a defect of the writer.
    #[error("cannot parse the snapshot's machine state, although its checksum is correct")]
    Parse(#[source] postcard::Error),
    /// Bytes follow the content: a defect of the writer.
    #[error("{0} excess bytes follow the snapshot's machine state")]
    TrailingBytes(usize),
}

impl MachineState {
    /// The guest's network device, if it has one.
    pub(crate) fn network(&self) -> Option<NetworkConfig> {
        self.virtio.iter().find_map(|transport| match &transport.device {
            DeviceState::Net(state) => Some(state.config()),
            _ => None,
        })
    }

    /// The oldest version that has everything in this state.
    pub(crate) fn version(&self) -> u32 {
        if self.network().is_some() { MACHINE_STATE_VERSION } else { WITHOUT_NETWORK }
    }

    pub(crate) fn encode(&self) -> Result<Vec<u8>, postcard::Error> {
        postcard::to_stdvec(self)
    }

    pub(crate) fn decode(version: u32, bytes: &[u8]) -> Result<Self, DecodeStateError> {
        if !(WITHOUT_NETWORK..=MACHINE_STATE_VERSION).contains(&version) {
            return Err(DecodeStateError::Version {
                found: version,
                supported: MACHINE_STATE_VERSION,
            });
        }
        let (state, rest) = postcard::take_from_bytes(bytes).map_err(DecodeStateError::Parse)?;
        if rest.is_empty() { Ok(state) } else { Err(DecodeStateError::TrailingBytes(rest.len())) }
    }
}

/// Sizes of the structs of version 2. If the build fails here, the format of the machine state has
/// changed: increment [`MACHINE_STATE_VERSION`], and add a golden state of the new version.
const _: () = {
    assert!(MACHINE_STATE_VERSION == 2);
    assert!(size_of::<MachineState>() == 160);
    assert!(size_of::<VmState>() == 72);
    assert!(size_of::<VcpuState>() == 6216);
    assert!(size_of::<SerialRegisters>() == 40);
    assert!(size_of::<TransportState>() == 96);
    assert!(size_of::<DeviceState>() == 40);
    assert!(size_of::<NetState>() == 32);
    assert!(size_of::<QueueRegisters>() == 40);
    assert!(size_of::<kvm_irqchip>() == 520);
    assert!(size_of::<kvm_cpuid_entry2>() == 40);
    assert!(size_of::<kvm_msr_entry>() == 16);
};

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
