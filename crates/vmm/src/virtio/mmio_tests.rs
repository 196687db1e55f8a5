use std::sync::Arc;

use parking_lot::Mutex;

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

use super::super::chain::ChainFault;
use super::super::testing::{
    ACKNOWLEDGE, DRIVER, DRIVER_OK, EVENT_IDX, FEATURES_OK, Guest, NEEDS_RESET, STATUS, VERSION_1,
};
use super::super::{DeviceState, VirtioDevice};
use super::*;

const CONFIG_INTERRUPT: u32 = 2;
const QUEUE_INTERRUPT: u32 = 1;
const FEATURE: u64 = 1 << 3;

/// A device with two queues, which returns the bytes that it reads in reverse order.
#[derive(Debug, Default)]
struct Mirror {
    config: [u8; 6],
    resets: usize,
    served: usize,
    /// After each chain, acts as a hostile guest that makes this many more available.
    refill: u16,
}

impl VirtioDevice for Mirror {
    fn id(&self) -> u32 {
        42
    }

    fn features(&self) -> u64 {
        FEATURE
    }

    fn queue_sizes(&self) -> &[u16] {
        &[16, 4]
    }

    fn config(&self) -> Vec<u8> {
        self.config.to_vec()
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        for (at, byte) in (offset..).zip(data) {
            if let Some(to) = usize::try_from(at).ok().and_then(|at| self.config.get_mut(at)) {
                *to = *byte;
            }
        }
    }

    fn process_queue(
        &mut self,
        queue: usize,
        context: &mut DeviceContext<'_>,
    ) -> Result<(), DeviceError> {
        let queue = &mut context.queues[queue];
        while let Some(chain) = queue.pop(context.mem)? {
            let mut bytes = vec![0; chain.readable.len()];
            chain.readable.read_at(context.mem, 0, &mut bytes).unwrap();
            bytes.reverse();
            chain
                .writable
                .write_at(context.mem, 0, &bytes)
                .map_err(|fault| queue.chain_error(fault))?;
            queue.push_used(context.mem, &chain, bytes.len())?;
            self.served += 1;
            if self.refill > 0 {
                let index = queue.available(context.mem)?.wrapping_add(self.refill);
                context.mem.write_obj(index, GuestAddress(16 * 16 + 2)).unwrap();
            }
        }
        Ok(())
    }

    fn reset(&mut self) {
        self.resets += 1;
    }

    fn save(&self) -> DeviceState {
        DeviceState::Rng
    }

    fn restore(&mut self, _: &DeviceState, _: bool) -> Result<(), RestoreDeviceError> {
        Ok(())
    }
}

#[test]
fn a_driver_recognises_the_device() {
    let guest = Guest::new(Mirror::default());
    assert_eq!(guest.get(0), u32::from_le_bytes(*b"virt"));
    assert_eq!(guest.get(4), 2);
    assert_eq!(guest.get(8), 42);
    // No shared memory region: its length is all ones.
    assert_eq!((guest.get(0xb0), guest.get(0xb4)), (u32::MAX, u32::MAX));
}

#[test]
fn features_are_negotiated_in_two_halves() {
    let mut guest = Guest::new(Mirror::default());
    assert_eq!(guest.offered(), FEATURE | EVENT_IDX | VERSION_1);
    guest.set(0x14, 2);
    assert_eq!(guest.get(0x10), 0, "there are 64 feature bits");

    guest.set(STATUS, ACKNOWLEDGE);
    guest.accept(FEATURE | VERSION_1);
    guest.set(STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK);
    assert_eq!(guest.get(STATUS), ACKNOWLEDGE | DRIVER, "features before DRIVER are ignored");

    for refused in [FEATURE, VERSION_1 | 1 << 40, 0, u64::MAX] {
        guest.accept(refused);
        guest.set(STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK);
        assert_eq!(guest.get(STATUS), ACKNOWLEDGE | DRIVER, "{refused:#x}");
    }
    guest.accept(VERSION_1);
    guest.set(STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK);
    assert_eq!(guest.get(STATUS), ACKNOWLEDGE | DRIVER | FEATURES_OK);

    guest.accept(u64::MAX);
    guest.set(STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
    assert_eq!(guest.transport().save().driver_features, VERSION_1, "features are final");
}

#[test]
fn initialisation_steps_are_accepted_in_order_only() {
    let mut guest = Guest::new(Mirror::default());
    for early in [DRIVER, DRIVER_OK, FEATURES_OK | DRIVER_OK] {
        guest.set(STATUS, early);
        assert_eq!(guest.get(STATUS), 0);
    }
    guest.set(STATUS, ACKNOWLEDGE | DRIVER_OK);
    assert_eq!(guest.get(STATUS), ACKNOWLEDGE);
    guest.set(STATUS, DRIVER);
    assert_eq!(guest.get(STATUS), ACKNOWLEDGE, "only a reset clears bits");
    guest.set(STATUS, 0);
    assert_eq!(guest.get(STATUS), 0);
}

#[test]
fn a_request_is_served_and_raises_one_interrupt() {
    for without in [0, EVENT_IDX] {
        let mut guest = Guest::started_without(Mirror::default(), without);
        assert_eq!(guest.request(0, &[b"ab", b"cde"], &[3, 8]), b"edcba");
        assert_eq!(guest.get(0x60), QUEUE_INTERRUPT);
        assert_eq!(guest.interrupts(), 1);
        guest.set(0x64, QUEUE_INTERRUPT);
        assert_eq!(guest.get(0x60), 0);
        assert_eq!(guest.request(1, &[b"xyz"], &[3]), b"zyx");
        for round in 0..100 {
            let text = format!("round {round}");
            let mut back = guest.request(0, &[text.as_bytes()], &[20]);
            back.reverse();
            assert_eq!(back, text.as_bytes());
        }
        assert_eq!(guest.notifications, 102);
    }
}

#[test]
fn event_indices_save_notifications_and_interrupts() {
    let mut guest = Guest::started(Mirror::default());
    for _ in 0..4 {
        guest.add(0, &[b"x"], &[1]);
    }
    guest.kick(0);
    assert_eq!(guest.notifications, 1);
    assert_eq!(guest.interrupts(), 1, "four requests, one interrupt");
    // The driver has not read its used ring since, so it gets no further interrupt.
    for _ in 0..4 {
        guest.add(0, &[b"x"], &[1]);
        guest.kick(0);
    }
    assert_eq!(guest.notifications, 5);
    assert_eq!(guest.interrupts(), 0);
}

#[test]
fn queues_are_set_up_only_after_feature_negotiation() {
    let mut guest = Guest::new(Mirror::default());
    guest.set(0x44, 1);
    assert_eq!(guest.get(0x44), 0, "before the negotiation");
    guest.negotiate(0);
    guest.set(0x30, 7);
    guest.set(0x44, 1);
    assert_eq!((guest.get(0x34), guest.get(0x44)), (0, 0), "no such queue");
    guest.set_up_queues();
    guest.set(0x30, 0);
    guest.set(0x38, 2);
    assert_eq!(guest.transport().save().queues[0].size, 16, "a ready queue does not change");
    guest.set(STATUS, guest.get(STATUS) | DRIVER_OK);
    guest.set(0x44, 0);
    assert_eq!(guest.get(0x44), 1, "after the start");
}

#[test]
fn an_invalid_queue_size_stops_the_device() {
    let bad: [(u64, u32); 8] = [
        (0x38, 0),
        (0x38, 3),
        (0x38, 32),
        (0x38, 0x1_0002),
        (0x80, 0x1008),
        (0x90, 0x1001),
        (0xa0, 0x1002),
        (0xa4, 1),
    ];
    for (register, value) in bad {
        let mut guest = Guest::new(Mirror::default());
        guest.negotiate(0);
        guest.set(0x30, 1);
        guest.set(register, value);
        guest.set_up_queues_if_possible();
        guest.set(STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
        assert_eq!(guest.get(STATUS) & NEEDS_RESET, NEEDS_RESET, "{register:#x} {value:#x}");
        assert!(matches!(guest.transport().error(), Some(DeviceError::Setup { queue: 1 })));
    }
}

#[test]
fn a_queue_outside_guest_memory_stops_the_device_at_its_start() {
    let mut guest = Guest::new(Mirror::default());
    guest.negotiate(0);
    guest.set(0x30, 0);
    guest.set(0xa4, 1);
    guest.set(0x44, 1);
    guest.set(STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
    assert_eq!(guest.get(STATUS) & NEEDS_RESET, NEEDS_RESET);
    assert_eq!(guest.get(0x60), CONFIG_INTERRUPT);
    assert_eq!(guest.interrupts(), 1);
}

#[test]
fn an_invalid_request_stops_the_device_until_a_reset() {
    let mut guest = Guest::started(Mirror::default());
    guest.add(0, &[b"fine"], &[4]);
    guest.add(0, &[b"no room for an answer"], &[4]);
    guest.add(0, &[b"fine"], &[4]);
    guest.kick(0);
    assert_eq!(guest.used(0).unwrap().data, b"enif", "earlier requests are served");
    assert_eq!(guest.used(0), None);
    assert_eq!(guest.get(STATUS) & NEEDS_RESET, NEEDS_RESET);
    assert_eq!(guest.get(0x60) & CONFIG_INTERRUPT, CONFIG_INTERRUPT);
    assert!(matches!(
        guest.transport().error(),
        Some(DeviceError::Chain { queue: 0, fault: ChainFault::TooShort { needed: 21, found: 4 } })
    ));
    guest.set(0x50, 0);
    guest.set(0x50, 1);
    guest.run();
    assert_eq!(guest.transport().device().served, 1);
    let queue = guest.transport().counters().queues[0];
    assert_eq!((queue.notifications, queue.failures), (2, 1));

    let (mem, resets) = (guest.mem.clone(), guest.transport().device().resets);
    guest.set(STATUS, 0);
    assert_eq!(guest.get(STATUS), 0);
    assert_eq!(guest.get(0x60), 0);
    assert!(guest.transport().error().is_none());
    assert_eq!(guest.transport().device().resets, resets + 1);
    mem.write_slice(&[0; 0x2_0000], GuestAddress(0)).unwrap();
    guest.forget_rings();
    guest.negotiate(0);
    guest.set_up_queues();
    guest.set(STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
    assert_eq!(guest.request(0, &[b"again"], &[5]), b"niaga");
}

#[test]
fn invalid_heads_and_indices_stop_the_device() {
    let mut guest = Guest::started(Mirror::default());
    guest.offer(0, 16);
    guest.kick(0);
    assert!(matches!(
        guest.transport().error(),
        Some(DeviceError::Chain { fault: ChainFault::Unterminated, .. })
    ));
    let mut guest = Guest::started(Mirror::default());
    guest.mem.write_obj(17_u16, GuestAddress(guest.rings[0].avail_ring() + 2)).unwrap();
    guest.set(0x50, 0);
    guest.run();
    assert!(matches!(
        guest.transport().error(),
        Some(DeviceError::Ring { queue: 0, error: virtio_queue::Error::InvalidAvailRingIndex })
    ));
}

#[test]
fn a_failed_driver_is_not_served() {
    let mut guest = Guest::started(Mirror::default());
    guest.set(STATUS, guest.get(STATUS) | 128);
    guest.add(0, &[b"x"], &[1]);
    guest.kick(0);
    assert_eq!(guest.used(0), None);
}

#[test]
fn nothing_is_served_before_the_start() {
    let mut guest = Guest::new(Mirror::default());
    guest.negotiate(0);
    guest.set_up_queues();
    guest.add(0, &[b"x"], &[1]);
    guest.kick(0);
    assert_eq!(guest.used(0), None);
    guest.set(STATUS, guest.get(STATUS) | DRIVER_OK);
    guest.set(0x50, 0);
    guest.run();
    assert_eq!(guest.used(0).unwrap().data, b"x");
}

#[test]
fn a_queue_that_is_refilled_continuously_does_not_block_the_event_loop() {
    let mut guest = Guest::started(Mirror { refill: 1, ..Mirror::default() });
    guest.add(0, &[b"x"], &[1]);
    guest.set(0x50, 0);
    for round in 1..=5 {
        assert_eq!(guest.run_once(), 1, "another turn is due");
        assert_eq!(guest.transport().device().served, 16 * round);
    }
}

#[test]
fn many_bytes_take_several_turns() {
    let mut guest = Guest::started(Mirror::default());
    for _ in 0..3 {
        // The same 16 MiB is read and written; the content does not matter.
        guest.add_raw(0, &[(0x20_0000, 0xd0_0000, 0), (0x20_0000, 0xd0_0000, 2)]);
    }
    guest.set(0x50, 0);
    assert_eq!(guest.run_once(), 1);
    assert_eq!(guest.transport().device().served, 2);
    guest.run();
    assert_eq!(guest.transport().device().served, 3);
    // The device notified itself of the third.
    let queue = guest.transport().counters().queues[0];
    assert_eq!((queue.notifications, queue.empty_notifications), (1, 0));
}

#[test]
fn configuration_space_allows_any_access_width() {
    let mut guest = Guest::new(Mirror::default());
    guest.transport().write(0x101, &[1, 2, 3]);
    guest.transport().write(0x105, &[9, 9, 9, 9]);
    let mut all = [7; 9];
    guest.transport().read(0x100, &mut all);
    assert_eq!(all, [0, 1, 2, 3, 0, 9, 0, 0, 0]);
    let mut far = [7; 8];
    guest.transport().read(u64::MAX - 3, &mut far);
    assert_eq!(far, [0; 8]);
    // All but the first access reach behind the end.
    assert_eq!(guest.transport().counters().config_failures, 3);
    guest.set(STATUS, ACKNOWLEDGE);
    let mut half = [7; 2];
    guest.transport().read(STATUS, &mut half);
    assert_eq!(half, [0; 2], "registers have four bytes");
}

#[test]
fn requests_in_flight_are_served_after_a_restore() {
    for without in [0, EVENT_IDX] {
        let mut guest = Guest::started_without(Mirror::default(), without);
        assert_eq!(guest.request(0, &[b"before"], &[6]), b"erofeb");
        guest.set(0x64, QUEUE_INTERRUPT);
        // Made available without a notification, which is lost with the monitor.
        guest.add(0, &[b"one"], &[3]);
        guest.add(1, &[b"two"], &[3]);
        let state = guest.save();
        let mut thawed = guest.restored(Mirror::default(), &state);
        assert_eq!(thawed.used(0).unwrap().data, b"eno");
        assert_eq!(thawed.used(1).unwrap().data, b"owt");
        assert!(thawed.interrupts() > 0);
        assert_eq!(thawed.get(0x60), QUEUE_INTERRUPT);
        assert_eq!(thawed.request(0, &[b"after"], &[5]), b"retfa");
    }
}

#[test]
fn an_unacknowledged_interrupt_is_raised_again_after_a_restore() {
    let mut guest = Guest::started(Mirror::default());
    guest.request(0, &[b"x"], &[1]);
    let state = guest.save();
    assert_eq!(state.interrupt_status, QUEUE_INTERRUPT);
    let thawed = guest.restored(Mirror::default(), &state);
    assert_eq!(thawed.interrupts(), 1);
    thawed.transport().write(0x64, &1_u32.to_le_bytes());
    let quiet = guest.restored(Mirror::default(), &thawed.save());
    assert_eq!(quiet.interrupts(), 0);
}

#[test]
fn a_restored_device_still_needs_its_reset() {
    let mut guest = Guest::started(Mirror::default());
    guest.offer(0, 99);
    guest.kick(0);
    let mut thawed = guest.restored(Mirror::default(), &guest.save());
    thawed.add(1, &[b"x"], &[1]);
    thawed.kick(1);
    assert_eq!(thawed.used(1), None);
    assert_eq!(thawed.get(STATUS) & NEEDS_RESET, NEEDS_RESET);
}

#[test]
fn invalid_states_are_refused() {
    let guest = Guest::started(Mirror::default());
    let good = guest.save();
    let refused = |change: &dyn Fn(&mut TransportState)| {
        let mut state = good.clone();
        change(&mut state);
        let fresh = Guest::new(Mirror::default());
        let result = fresh.transport().restore(&state);
        result.unwrap_err()
    };
    assert!(matches!(
        refused(&|state| state.queues.truncate(1)),
        RestoreDeviceError::QueueCount { offered: 2, saved: 1 }
    ));
    assert!(matches!(
        refused(&|state| state.queues[1].max_size = 8),
        RestoreDeviceError::QueueSize { queue: 1, offered: 4, saved: 8 }
    ));
    assert!(matches!(
        refused(&|state| state.queues[0].size = 3),
        RestoreDeviceError::Queue { queue: 0, .. }
    ));
    assert!(matches!(
        refused(&|state| state.queues[0].used_ring = 0x1_0000_0000),
        RestoreDeviceError::QueueOutside { queue: 0 }
    ));
    assert!(matches!(
        refused(&|state| state.driver_features |= 1 << 50),
        RestoreDeviceError::Features { missing } if missing == 1 << 50
    ));
    for status in [0x100, DRIVER_OK] {
        assert!(matches!(
            refused(&|state| state.status = status),
            RestoreDeviceError::Status { .. }
        ));
    }
    Guest::new(Mirror::default()).transport().restore(&good).unwrap();
}

#[test]
fn transports_of_different_devices_share_one_type() {
    let guest = Guest::new(Mirror::default());
    let interrupt = guest.interrupt.try_clone().unwrap();
    let transport = VirtioMmio::new(Mirror::default(), guest.mem.clone(), interrupt).unwrap();
    let any: Arc<Mutex<VirtioMmio>> = Arc::new(Mutex::new(transport));
    assert_eq!(any.lock().device().id(), 42);
}

proptest! {
    /// After any accesses the state can be saved and restored, and nothing panics.
    #[test]
    fn registers_accept_any_access(
        accesses in prop::collection::vec(
            (
                prop_oneof![
                    3 => prop::sample::select(vec![
                        0x14_u64, 0x20, 0x24, 0x30, 0x38, 0x44, 0x50, 0x64, 0x70, 0x80, 0x90, 0xa0,
                    ]),
                    1 => 0_u64..0x120,
                    1 => any::<u64>(),
                ],
                prop_oneof![
                    3 => prop::sample::select(vec![
                        0_u32, 1, 2, 3, 4, 7, 11, 15, 16, 0x4000, 0x8000, u32::MAX,
                    ])
                    .prop_map(|value| value.to_le_bytes().to_vec()),
                    1 => prop::collection::vec(any::<u8>(), 0..9),
                ],
            ),
            0..60,
        ),
        rings in prop::collection::vec(any::<u8>(), 0x200),
    ) {
        let mut guest = Guest::new(Mirror::default());
        guest.mem.write_slice(&rings, GuestAddress(0)).unwrap();
        guest.mem.write_slice(&rings, GuestAddress(0x4000)).unwrap();
        for (offset, data) in accesses {
            guest.transport().write(offset, &data);
            guest.transport().read(offset, &mut vec![0; data.len()]);
        }
        for _ in 0..8 {
            guest.run_once();
        }
        let state = guest.save();
        let fresh = Guest::new(Mirror::default());
        prop_assert!(fresh.transport().restore(&state).is_ok());
        prop_assert_eq!(fresh.save(), state);
    }
}
