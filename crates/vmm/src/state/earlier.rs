//! Machine state of versions 1 and 2: a fixed set of devices, by position. The two differ in a kind
//! of device.

use serde::{Deserialize, Serialize};

use super::{MachineState, SavedDevice};
use crate::config::{GUEST_CID, NETWORK};
use crate::console::SerialRegisters;
use crate::kvm::VmState;
use crate::vcpu::state::VcpuState;
use crate::virtio::{
    BalloonState, BlockState, DeviceState, NetState, QueueRegisters, TransportState, VsockState,
};

/// The oldest and the newest version in this form.
pub(super) const VERSIONS: [u32; 2] = [1, 2];

/// The machine state.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct EarlierMachineState {
    vm: VmState,
    vcpus: Vec<VcpuState>,
    serial: SerialRegisters,
    virtio: Vec<EarlierTransportState>,
}

#[derive(Debug, Serialize, Deserialize)]
struct EarlierTransportState {
    status: u32,
    interrupt_status: u32,
    driver_features: u64,
    device_features_sel: u32,
    driver_features_sel: u32,
    queue_sel: u32,
    queues: Vec<QueueRegisters>,
    device: EarlierDeviceState,
}

#[derive(Debug, Serialize, Deserialize)]
enum EarlierDeviceState {
    Block(BlockState),
    Rng,
    Balloon(EarlierBalloonState),
    Vsock(EarlierVsockState),
    /// Only in version 2.
    Net(NetState),
}

/// Of a balloon that only reports free pages.
#[derive(Debug, Serialize, Deserialize)]
struct EarlierBalloonState {
    actual: u32,
    poison: u32,
}

#[derive(Debug, Serialize, Deserialize)]
struct EarlierVsockState {
    next_port: u32,
}

impl From<EarlierMachineState> for MachineState {
    fn from(earlier: EarlierMachineState) -> Self {
        let EarlierMachineState { vm, vcpus, serial, virtio } = earlier;
        let devices = virtio.into_iter().map(SavedDevice::from).collect();
        Self { vm, vcpus, serial, legacy: None, devices, note: Vec::new() }
    }
}

impl From<EarlierTransportState> for SavedDevice {
    fn from(earlier: EarlierTransportState) -> Self {
        let device = match earlier.device {
            EarlierDeviceState::Block(state) => DeviceState::Block(state),
            EarlierDeviceState::Rng => DeviceState::Rng,
            EarlierDeviceState::Balloon(EarlierBalloonState { actual, poison }) => {
                DeviceState::Balloon(BalloonState {
                    actual,
                    poison,
                    target: 0,
                    deflate_on_oom: false,
                    statistics: false,
                    reporting: true,
                })
            }
            EarlierDeviceState::Vsock(EarlierVsockState { next_port }) => {
                DeviceState::Vsock(VsockState { cid: GUEST_CID, next_port })
            }
            EarlierDeviceState::Net(state) => DeviceState::Net(state),
        };
        let id = match &device {
            // The disks' names to the guest.
            DeviceState::Block(state) => {
                String::from_utf8_lossy(&state.serial).trim_end_matches('\0').to_owned()
            }
            DeviceState::Net(_) => NETWORK.to_owned(),
            other => other.kind().to_owned(),
        };
        let transport = TransportState {
            status: earlier.status,
            interrupt_status: earlier.interrupt_status,
            driver_features: earlier.driver_features,
            device_features_sel: earlier.device_features_sel,
            driver_features_sel: earlier.driver_features_sel,
            queue_sel: earlier.queue_sel,
            config_generation: 0,
            queues: earlier.queues,
            device,
        };
        Self { id, transport }
    }
}
