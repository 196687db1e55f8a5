//! The machine state of a snapshot: everything of a microVM but its memory and its disks.
//!
//! It has a version of its own, kept by the snapshot's header, outside these bytes. Any change to a
//! struct that is serialised here needs a new [`MACHINE_STATE_VERSION`].

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::console::SerialRegisters;
use crate::vcpu::state::VcpuState;
use crate::virtio::TransportState;
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
