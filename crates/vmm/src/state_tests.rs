use firn_net::NetworkState;
use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, kvm_clock_data, kvm_cpuid_entry2, kvm_irqchip, kvm_mp_state, kvm_msr_entry,
    kvm_regs, kvm_sregs,
};

use super::{DecodeStateError, MACHINE_STATE_VERSION, MachineState};
use crate::console::SerialRegisters;
use crate::kvm::VmState;
use crate::vcpu::state::VcpuState;
use crate::virtio::{
    BalloonState, BlockState, DeviceState, NetState, QueueRegisters, TransportState, VsockState,
};

/// Machine state of version 1, written by the first firn. It never changes.
const GOLDEN: &[u8] = include_bytes!("../tests/golden/machine-state-v1.bin");

/// The same of version 2, with a network device in place of the socket device.
const GOLDEN_V2: &[u8] = include_bytes!("../tests/golden/machine-state-v2.bin");

/// All values of one type are distinct, so that swapped fields are detected.
fn state() -> MachineState {
    let queue = QueueRegisters {
        max_size: 256,
        size: 128,
        ready: true,
        event_idx: false,
        next_avail: 11,
        next_used: 12,
        desc_table: 0x1_0000,
        avail_ring: 0x2_0000,
        used_ring: 0x3_0000,
    };
    let transport = |device| TransportState {
        status: 15,
        interrupt_status: 1,
        driver_features: 1 << 32 | 2,
        device_features_sel: 3,
        driver_features_sel: 4,
        queue_sel: 5,
        queues: vec![queue],
        device,
    };
    let block = BlockState {
        sectors: 77,
        read_only: true,
        serial: *b"root\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
    };
    MachineState {
        vm: VmState {
            irqchips: vec![kvm_irqchip { chip_id: KVM_IRQCHIP_IOAPIC, ..Default::default() }],
            clock: kvm_clock_data { clock: 123_456_789, ..Default::default() },
        },
        vcpus: vec![VcpuState {
            cpuid: vec![kvm_cpuid_entry2 { function: 7, ebx: 8, ..Default::default() }],
            mp_state: kvm_mp_state { mp_state: 3 },
            regs: kvm_regs { rax: 1, rip: 2, rflags: 0x202, ..Default::default() },
            sregs: kvm_sregs { cr3: 0x9000, efer: 0xd01, ..Default::default() },
            xsave: Default::default(),
            xcrs: Default::default(),
            debug_regs: Default::default(),
            lapic: Default::default(),
            msrs: vec![kvm_msr_entry { index: 0x10, data: 99, ..Default::default() }],
            events: Default::default(),
            tsc_khz: 2_596_124,
        }],
        serial: SerialRegisters {
            baud_divisor_low: 1,
            baud_divisor_high: 2,
            interrupt_enable: 3,
            interrupt_identification: 4,
            line_control: 5,
            line_status: 6,
            modem_control: 7,
            modem_status: 8,
            scratch: 9,
            in_buffer: vec![10, 11],
        },
        virtio: vec![
            transport(DeviceState::Block(block)),
            transport(DeviceState::Rng),
            transport(DeviceState::Balloon(BalloonState { actual: 21, poison: 22 })),
            transport(DeviceState::Vsock(VsockState { next_port: 31 })),
        ],
    }
}

#[test]
fn the_encoding_of_version_1_does_not_change() {
    assert_eq!(state().version(), 1);
    assert!(state().encode().unwrap() == GOLDEN, "the encoding of version 1 has changed");
    let decoded = MachineState::decode(1, GOLDEN).unwrap();
    assert!(decoded.encode().unwrap() == GOLDEN);
    assert_eq!(decoded.vcpus[0].regs.rip, 2);
    assert_eq!(decoded.virtio[3].device, DeviceState::Vsock(VsockState { next_port: 31 }));
}

#[test]
fn a_network_device_is_version_2() {
    let mut state = state();
    let flows = NetworkState::default();
    let network = NetState { mac: [41, 42, 43, 44, 45, 46], mtu: 47, flows };
    let config = network.config();
    let TransportState { queues, .. } = state.virtio.remove(3);
    let transport = TransportState { queues, device: DeviceState::Net(network), ..state.virtio[0] };
    state.virtio.push(transport);
    assert_eq!((state.version(), MACHINE_STATE_VERSION), (2, 2));
    assert!(state.encode().unwrap() == GOLDEN_V2, "the encoding of version 2 has changed");
    let decoded = MachineState::decode(2, GOLDEN_V2).unwrap();
    assert_eq!(decoded.network(), Some(config));
}

#[test]
fn other_versions_and_damage_are_refused() {
    for version in [0, 3, u32::MAX] {
        let error = MachineState::decode(version, GOLDEN).unwrap_err();
        assert!(
            matches!(error, DecodeStateError::Version { found, supported: 2 } if found == version)
        );
    }
    for len in 0..GOLDEN.len() {
        assert!(MachineState::decode(1, &GOLDEN[..len]).is_err(), "cut to {len} bytes");
    }
    let longer = [GOLDEN, &[0]].concat();
    assert!(matches!(MachineState::decode(1, &longer), Err(DecodeStateError::TrailingBytes(1))));
}
