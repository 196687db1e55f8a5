use firn_net::NetworkState;
use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, kvm_clock_data, kvm_cpuid_entry2, kvm_irqchip, kvm_mp_state, kvm_msr_entry,
    kvm_pit_channel_state, kvm_pit_state2, kvm_regs, kvm_sregs,
};

use super::{DecodeStateError, LegacyState, MACHINE_STATE_VERSION, MachineState, SavedDevice};
use crate::config::{Devices, NetworkDevice};
use crate::console::SerialRegisters;
use crate::i8042::KeyboardState;
use crate::kvm::VmState;
use crate::vcpu::state::VcpuState;
use crate::virtio::{
    BalloonConfig, BalloonState, BlockState, DeviceState, NetState, NetworkConfig, QueueRegisters,
    TransportState, VsockState,
};

/// Machine state of version 1, written by the first firn. It never changes, nor do those below.
const GOLDEN_V1: &[u8] = include_bytes!("../tests/golden/machine-state-v1.bin");

/// The same of version 2, with a network device in place of the socket device.
const GOLDEN_V2: &[u8] = include_bytes!("../tests/golden/machine-state-v2.bin");

/// Version 3, with every kind of device.
const GOLDEN_V3: &[u8] = include_bytes!("../tests/golden/machine-state-v3.bin");

/// Version 4, the same but for a socket device without connections.
const GOLDEN_V4: &[u8] = include_bytes!("../tests/golden/machine-state-v4.bin");

/// All values of one type are distinct, so that swapped fields are detected.
fn state() -> MachineState {
    let pit_channel = |count| kvm_pit_channel_state { count, ..Default::default() };
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
    let device = |id: &str, device| SavedDevice {
        id: id.to_owned(),
        transport: TransportState {
            status: 15,
            interrupt_status: 1,
            driver_features: 1 << 32 | 2,
            device_features_sel: 3,
            driver_features_sel: 4,
            queue_sel: 5,
            config_generation: 6,
            queues: vec![queue],
            device,
        },
    };
    let block = BlockState {
        sectors: 77,
        read_only: true,
        serial: *b"root\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
    };
    let flows = NetworkState::default();
    let balloon = BalloonState {
        actual: 21,
        poison: 22,
        target: 23,
        deflate_on_oom: true,
        statistics: true,
        reporting: true,
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
        legacy: Some(LegacyState {
            keyboard: KeyboardState {
                control: 51,
                outputs: 52,
                command: Some(53),
                buffer: vec![54, 55],
            },
            pit: kvm_pit_state2 {
                channels: [pit_channel(61), pit_channel(62), pit_channel(63)],
                flags: 64,
                ..Default::default()
            },
        }),
        devices: vec![
            device("root", DeviceState::Block(block)),
            device("entropy", DeviceState::Rng),
            device("balloon", DeviceState::Balloon(balloon)),
            device("vsock", DeviceState::Vsock(VsockState { cid: 3, next_port: 31 })),
            device(
                "eth0",
                DeviceState::Net(NetState { mac: [41, 42, 43, 44, 45, 46], mtu: 47, flows }),
            ),
        ],
        note: vec![71, 72, 73],
    }
}

/// The same without what earlier versions lack, and without the device at `absent`.
fn earlier(absent: usize) -> MachineState {
    let mut state = state();
    state.devices.remove(absent);
    for SavedDevice { transport, .. } in &mut state.devices {
        transport.config_generation = 0;
        if let DeviceState::Balloon(balloon) = &mut transport.device {
            *balloon =
                BalloonState { target: 0, deflate_on_oom: false, statistics: false, ..*balloon };
        }
    }
    MachineState { legacy: None, note: Vec::new(), ..state }
}

#[test]
fn earlier_versions_are_read_with_the_ids_of_firns_own_devices() {
    for (version, golden, absent) in [(1, GOLDEN_V1, 4), (2, GOLDEN_V2, 3)] {
        let decoded = MachineState::decode(version, golden).unwrap();
        assert!(decoded.encode().unwrap() == earlier(absent).encode().unwrap(), "{version}");
        let config = NetworkConfig { mac: [41, 42, 43, 44, 45, 46], mtu: 47 };
        let network = NetworkDevice { id: "eth0".to_owned(), config };
        let devices = Devices {
            drives: vec!["root".to_owned()],
            vsock: (version == 1).then_some(3),
            entropy: true,
            balloon: Some(BalloonConfig::REPORTING),
            networks: (version == 2).then_some(network).into_iter().collect(),
        };
        assert_eq!(decoded.devices(), devices);
    }
}

/// [`state`] with a socket device without connections.
fn quiet() -> MachineState {
    let mut state = state();
    state.devices[3].transport.device =
        DeviceState::QuietVsock(VsockState { cid: 3, next_port: 31 });
    state
}

#[test]
fn the_encodings_of_versions_3_and_4_do_not_change() {
    assert_eq!(MACHINE_STATE_VERSION, 4);
    for (version, golden, state) in [(3, GOLDEN_V3, state()), (4, GOLDEN_V4, quiet())] {
        assert!(state.encode().unwrap() == golden, "the encoding of version {version} has changed");
        let decoded = MachineState::decode(version, golden).unwrap();
        assert!(decoded.encode().unwrap() == golden);
        assert_eq!(decoded.vcpus[0].regs.rip, 2);
        assert_eq!(decoded.devices, state.devices);
        assert_eq!(decoded.devices().vsock, Some(3));
        assert_eq!(decoded.note, [71, 72, 73]);
    }
}

#[test]
fn other_versions_and_damage_are_refused() {
    for version in [0, 5, u32::MAX] {
        let error = MachineState::decode(version, GOLDEN_V4).unwrap_err();
        assert!(
            matches!(error, DecodeStateError::Version { found, supported: 4 } if found == version)
        );
    }
    let versions = [(1, GOLDEN_V1), (2, GOLDEN_V2), (3, GOLDEN_V3), (4, GOLDEN_V4)];
    for (version, golden) in versions {
        for len in 0..golden.len() {
            let cut = MachineState::decode(version, &golden[..len]);
            assert!(cut.is_err(), "version {version}, cut to {len} bytes");
        }
        let longer = [golden, &[0]].concat();
        let error = MachineState::decode(version, &longer);
        assert!(matches!(error, Err(DecodeStateError::TrailingBytes(1))), "{version}");
    }
}
