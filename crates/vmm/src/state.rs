//! The machine state of a snapshot: a microVM without its memory and its disks.
//!
//! It has its own version, which the snapshot's header contains, outside these bytes. Any change to
//! a struct that is serialised here requires a new [`MACHINE_STATE_VERSION`].

mod earlier;

use kvm_bindings::{kvm_cpuid_entry2, kvm_irqchip, kvm_msr_entry, kvm_pit_state2};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::config::{Devices, NetworkDevice};
use crate::console::SerialRegisters;
use crate::i8042::KeyboardState;
use crate::kvm::VmState;
use crate::vcpu::state::VcpuState;
use crate::virtio::{DeviceState, NetState, QueueRegisters, TransportState};
use earlier::EarlierMachineState;

/// The version of the machine state that this build writes. It reads earlier ones, too.
pub(crate) const MACHINE_STATE_VERSION: u32 = 4;

/// The machine state.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct MachineState {
    pub(crate) vm: VmState,
    pub(crate) vcpus: Vec<VcpuState>,
    pub(crate) serial: SerialRegisters,
    /// `None` for a guest without them.
    pub(crate) legacy: Option<LegacyState>,
    /// In the order of their windows on the bus.
    pub(crate) devices: Vec<SavedDevice>,
    /// What the monitor's caller has noted, opaque here.
    pub(crate) note: Vec<u8>,
}

/// The devices of a PC that a kernel without ACPI expects.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct LegacyState {
    pub(crate) keyboard: KeyboardState,
    pub(crate) pit: kvm_pit_state2,
}

/// A virtio device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedDevice {
    /// Unique among the devices of its kind.
    pub(crate) id: String,
    pub(crate) transport: TransportState,
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
    /// The guest's devices.
    pub(crate) fn devices(&self) -> Devices {
        let mut devices = Devices::default();
        for SavedDevice { id, transport } in &self.devices {
            match &transport.device {
                DeviceState::Block(_) => devices.drives.push(id.clone()),
                DeviceState::Vsock(state) | DeviceState::QuietVsock(state) => {
                    devices.vsock = Some(state.cid);
                }
                DeviceState::Rng => devices.entropy = true,
                DeviceState::Balloon(state) => devices.balloon = Some(state.config()),
                DeviceState::Net(state) => {
                    let (id, config) = (id.clone(), state.config());
                    devices.networks.push(NetworkDevice { id, config });
                }
            }
        }
        devices
    }

    pub(crate) fn encode(&self) -> Result<Vec<u8>, postcard::Error> {
        postcard::to_stdvec(self)
    }

    pub(crate) fn decode(version: u32, bytes: &[u8]) -> Result<Self, DecodeStateError> {
        let [oldest, newest] = earlier::VERSIONS;
        if (oldest..=newest).contains(&version) {
            return decode::<EarlierMachineState>(bytes).map(Self::from);
        }
        // Version 4 has one more kind of device state than version 3.
        if !(newest + 1..=MACHINE_STATE_VERSION).contains(&version) {
            return Err(DecodeStateError::Version {
                found: version,
                supported: MACHINE_STATE_VERSION,
            });
        }
        decode(bytes)
    }
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, DecodeStateError> {
    let (state, rest) = postcard::take_from_bytes(bytes).map_err(DecodeStateError::Parse)?;
    if rest.is_empty() { Ok(state) } else { Err(DecodeStateError::TrailingBytes(rest.len())) }
}

/// Sizes of the structs of version 4. If the build fails here, the format of the machine state has
/// changed: increment [`MACHINE_STATE_VERSION`], and add a golden state of the new version.
const _: () = {
    assert!(MACHINE_STATE_VERSION == 4);
    assert!(size_of::<MachineState>() == 328);
    assert!(size_of::<VmState>() == 72);
    assert!(size_of::<VcpuState>() == 6216);
    assert!(size_of::<SerialRegisters>() == 40);
    assert!(size_of::<LegacyState>() == 144);
    assert!(size_of::<SavedDevice>() == 120);
    assert!(size_of::<TransportState>() == 96);
    assert!(size_of::<DeviceState>() == 40);
    assert!(size_of::<NetState>() == 32);
    assert!(size_of::<QueueRegisters>() == 40);
    assert!(size_of::<EarlierMachineState>() == 160);
    assert!(size_of::<kvm_irqchip>() == 520);
    assert!(size_of::<kvm_pit_state2>() == 112);
    assert!(size_of::<kvm_cpuid_entry2>() == 40);
    assert!(size_of::<kvm_msr_entry>() == 16);
};

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
