use std::sync::Arc;

use parking_lot::Mutex;

use super::super::testing::{BUFFER, Guest, HIGH, HIGH_LEN, NEEDS_RESET, STATUS, WRITE};
use super::super::{DeviceState, RestoreDeviceError};
use super::*;

#[derive(Clone, Default)]
struct Ledger {
    ranges: Arc<Mutex<Vec<(u64, u64)>>>,
    refuses: bool,
}

impl PageDiscard for Ledger {
    fn discard(&self, addr: u64, len: u64) -> std::io::Result<()> {
        if self.refuses {
            return Err(std::io::ErrorKind::Unsupported.into());
        }
        self.ranges.lock().push((addr, len));
        Ok(())
    }
}

fn guest(without: u32) -> (Guest<Balloon<Ledger>>, Ledger) {
    let ledger = Ledger::default();
    let without = if without == 0 { 0 } else { 1 << without };
    (Guest::started_without(Balloon::new(ledger.clone()), without), ledger)
}

fn report(guest: &mut Guest<Balloon<Ledger>>, ranges: &[(u64, u32)]) -> bool {
    let descriptors: Vec<_> = ranges.iter().map(|(addr, len)| (*addr, *len, WRITE)).collect();
    guest.add_raw(2, &descriptors);
    guest.kick(2);
    let free = guest.used_len(2);
    assert!(free.is_none_or(|len| len == 0));
    free.is_some()
}

#[test]
fn reported_ranges_are_discarded() {
    let (mut guest, ledger) = guest(0);
    assert!(report(&mut guest, &[(0x20_0000, 0x20_0000), (HIGH, 4096)]));
    assert!(report(&mut guest, &[(0x60_0000, 0x40_0000)]));
    let expected = [(0x20_0000, 0x20_0000), (HIGH, 4096), (0x60_0000, 0x40_0000)];
    assert_eq!(*ledger.ranges.lock(), expected);
    let counters = guest.transport().device().counters();
    assert_eq!(counters, BalloonCounters { discarded: 0x60_1000, failures: 0 });
}

#[test]
fn invalid_ranges_stop_the_device() {
    let bad = [
        (0x20_0001, 4096),
        (0x20_0000, 4095),
        (0x100_0000 - 4096, 8192),
        (HIGH + HIGH_LEN, 4096),
        (u64::MAX - 4095, 4096),
        (0, u32::MAX - 4095),
    ];
    for range in bad {
        let (mut guest, ledger) = guest(0);
        assert!(!report(&mut guest, &[range]), "{range:x?}");
        assert_eq!(guest.get(STATUS) & NEEDS_RESET, NEEDS_RESET);
        assert_eq!(*ledger.ranges.lock(), []);
    }
}

#[test]
fn ranges_that_cannot_be_discarded_are_counted() {
    let ledger = Ledger { refuses: true, ..Ledger::default() };
    let mut guest = Guest::started(Balloon::new(ledger));
    assert!(report(&mut guest, &[(0x20_0000, 4096)]));
    let counters = guest.transport().device().counters();
    assert_eq!(counters, BalloonCounters { discarded: 0, failures: 1 });
}

#[test]
fn pages_with_a_fill_value_are_not_discarded() {
    let (mut first, ledger) = guest(0);
    // init_on_free: freed pages are zeros.
    first.set(0x100 + POISON, 0);
    assert!(report(&mut first, &[(0x20_0000, 4096)]));
    first.set(0x100 + POISON, 0xaaaa_aaaa);
    assert_eq!(first.get(0x100 + POISON), 0xaaaa_aaaa);
    assert!(report(&mut first, &[(0x40_0000, 4096)]));
    assert_eq!(*ledger.ranges.lock(), [(0x20_0000, 4096)]);

    // A clone has the fill value too.
    let other = Ledger::default();
    let mut thawed = first.restored(Balloon::new(other.clone()), &first.save());
    assert!(report(&mut thawed, &[(0x40_0000, 4096)]));
    assert_eq!(*other.ranges.lock(), []);

    // Without the feature the register has no effect.
    let (mut third, ledger) = guest(PAGE_POISON);
    third.set(0x100 + POISON, 0xaaaa_aaaa);
    assert!(report(&mut third, &[(0x20_0000, 4096)]));
    assert_eq!(ledger.ranges.lock().len(), 1);
}

#[test]
fn only_reported_ranges_are_discarded() {
    let (mut silent, ledger) = guest(REPORTING);
    assert!(report(&mut silent, &[(0x20_0000, 4096)]));
    // Inflating and deflating: lists of page numbers, accepted without effect.
    let (mut guest, second) = guest(0);
    for queue in [0, 1] {
        assert_eq!(guest.request(queue, &[&[1, 0, 0, 0, 2, 0, 0, 0]], &[]), b"");
        let room = u32::try_from(BUFFER).unwrap();
        assert_eq!(guest.request(queue, &[], &[room]), b"");
    }
    guest.set(0x100 + ACTUAL, 7);
    assert_eq!(guest.get(0x100), 0, "the balloon stays empty");
    assert_eq!(guest.get(0x100 + ACTUAL), 7);
    assert_eq!(*ledger.ranges.lock(), []);
    assert_eq!(*second.ranges.lock(), []);
}

#[test]
fn the_state_of_another_device_is_refused() {
    let result = Balloon::new(Ledger::default()).restore(&DeviceState::Rng, true);
    assert!(matches!(result, Err(RestoreDeviceError::OtherDevice { id: 5 })));
}
