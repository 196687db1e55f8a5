use std::sync::Arc;
use std::time::Duration;

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
    fn discard(&self, addr: u64, len: u64) -> io::Result<()> {
        if self.refuses {
            return Err(io::ErrorKind::Unsupported.into());
        }
        self.ranges.lock().push((addr, len));
        Ok(())
    }
}

fn balloon(pages: Ledger) -> Balloon<Ledger> {
    Balloon::new(BalloonConfig::REPORTING, None, pages).unwrap()
}

fn guest(without: u32) -> (Guest<Balloon<Ledger>>, Ledger) {
    let ledger = Ledger::default();
    let without = if without == 0 { 0 } else { 1 << without };
    (Guest::started_without(balloon(ledger.clone()), without), ledger)
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
    assert_eq!(counters, BalloonCounters { discarded: 0x60_1000, ..BalloonCounters::default() });
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
    let mut guest = Guest::started(balloon(ledger));
    assert!(report(&mut guest, &[(0x20_0000, 4096)]));
    let counters = guest.transport().device().counters();
    assert_eq!(counters, BalloonCounters { failures: 1, ..BalloonCounters::default() });
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
    let mut thawed = first.restored(balloon(other.clone()), &first.save());
    assert!(report(&mut thawed, &[(0x40_0000, 4096)]));
    assert_eq!(*other.ranges.lock(), []);

    // Without the feature the register has no effect.
    let (mut third, ledger) = guest(PAGE_POISON);
    third.set(0x100 + POISON, 0xaaaa_aaaa);
    assert!(report(&mut third, &[(0x20_0000, 4096)]));
    assert_eq!(ledger.ranges.lock().len(), 1);
}

#[test]
fn a_driver_without_reporting_discards_nothing_by_reports() {
    let (mut guest, ledger) = guest(REPORTING);
    assert!(report(&mut guest, &[(0x20_0000, 4096)]));
    guest.set(0x100 + ACTUAL, 7);
    assert_eq!(guest.get(0x100), 0, "the host wants an empty balloon");
    assert_eq!(guest.get(0x100 + ACTUAL), 7);
    assert_eq!(*ledger.ranges.lock(), []);
}

fn numbers(pages: impl IntoIterator<Item = u32>) -> Vec<u8> {
    pages.into_iter().flat_map(u32::to_le_bytes).collect()
}

/// A balloon with all queues, and its ranges.
fn whole() -> (Balloon<Ledger>, Ledger) {
    let ledger = Ledger::default();
    let config = BalloonConfig {
        target: 0x100,
        deflate_on_oom: true,
        statistics: true,
        ..BalloonConfig::REPORTING
    };
    (Balloon::new(config, None, ledger.clone()).unwrap(), ledger)
}

#[test]
fn inflated_pages_are_discarded_with_their_neighbours() {
    let (balloon, ledger) = whole();
    let mut guest = Guest::started(balloon);
    assert_eq!(guest.get(0x100), 0x100);
    // In the order in which Linux takes pages, downwards, and with a remainder of a number.
    let mut request = numbers([0x203, 0x202, 0x300, 0x201, 0x201, 0x2000]);
    request.push(9);
    assert_eq!(guest.request(INFLATE_QUEUE, &[&request], &[]), b"");
    let inflated = [(0x20_1000, 0x3000), (0x30_0000, 4096), (HIGH, 4096)];
    assert_eq!(*ledger.ranges.lock(), inflated);
    // Deflating takes nothing.
    assert_eq!(guest.request(1, &[&numbers([0x203])], &[]), b"");
    let room = u32::try_from(BUFFER).unwrap();
    for queue in [INFLATE_QUEUE, 1] {
        assert_eq!(guest.request(queue, &[], &[room]), b"");
    }
    assert_eq!(*ledger.ranges.lock(), inflated);

    guest.transport().configure(|balloon| balloon.set_target(5));
    assert_eq!(guest.get(0x100), 5);
    let thawed = guest.save();
    let DeviceState::Balloon(state) = thawed.device else { panic!("{thawed:?}") };
    assert_eq!(state.config().target, 5);
}

#[test]
fn pages_outside_memory_and_endless_requests_stop_the_device() {
    let endless = vec![0; 4 * (PAGES_PER_TURN + 1)];
    for request in [&numbers([0x1000]), &numbers([0xfff, 0x1000]), &numbers([u32::MAX]), &endless] {
        let (balloon, ledger) = whole();
        let mut guest = Guest::started(balloon);
        // Several buffers, because the driver's are small.
        let parts: Vec<_> = request.chunks(usize::try_from(BUFFER).unwrap()).collect();
        guest.add(INFLATE_QUEUE, &parts, &[]);
        guest.kick(INFLATE_QUEUE);
        assert_eq!(guest.get(STATUS) & NEEDS_RESET, NEEDS_RESET);
        assert_eq!(*ledger.ranges.lock(), []);
    }
}

#[test]
fn a_turn_ends_after_many_pages_and_the_next_one_goes_on() {
    let (balloon, ledger) = whole();
    let mut guest = Guest::started(balloon);
    // Every other page, so that each is a range.
    let request = numbers((0..2048).map(|page| page * 2 % 0x1000));
    for _ in 0..4 {
        guest.add(INFLATE_QUEUE, &[&request], &[]);
    }
    guest.set(0x50, 0);
    guest.run_once();
    assert_eq!(ledger.ranges.lock().len(), PAGES_PER_TURN);
    guest.run();
    assert_eq!(ledger.ranges.lock().len(), 2 * PAGES_PER_TURN);
}

fn told(values: &[(u16, u64)]) -> Vec<u8> {
    let bytes = values.iter().map(|(tag, value)| (tag.to_le_bytes(), value.to_le_bytes()));
    bytes.flat_map(|(tag, value)| [&tag[..], &value[..]].concat()).collect()
}

#[test]
fn the_guest_tells_how_it_uses_its_memory_once_in_a_period() {
    let (guest, _) = guest(0);
    assert!(!guest.transport().device().set_period(None));
    assert_eq!(guest.transport().device().statistics(), None);

    let mut guest = Guest::started(whole().0);
    guest.set(0x100 + ACTUAL, 3);
    let first = told(&[(4, 100), (5, 200), (16, 1), (u16::MAX, 2)]);
    guest.add(FIRST_OPTIONAL_QUEUE, &[&first], &[]);
    guest.kick(FIRST_OPTIONAL_QUEUE);
    let values = |guest: &Guest<Balloon<Ledger>>| {
        let statistics = guest.transport().device().statistics().unwrap();
        assert_eq!((statistics.target_pages, statistics.actual_pages), (0x100, 3));
        statistics.values().collect::<Vec<_>>()
    };
    assert_eq!(values(&guest), [("free_memory", 100), ("total_memory", 200)]);
    assert_eq!(guest.transport().device().counters().statistics, 1);
    assert!(guest.used(FIRST_OPTIONAL_QUEUE).is_none(), "the buffer waits for the next period");

    for device in 0..2 {
        assert!(guest.transport().device().set_period(Some(Duration::from_millis(1))));
        let used = loop {
            guest.run();
            if let Some(used) = guest.used(FIRST_OPTIONAL_QUEUE) {
                break used;
            }
        };
        assert_eq!(used.data, b"");
        assert!(guest.transport().device().set_period(None));
        guest.add(FIRST_OPTIONAL_QUEUE, &[&told(&[(4, 50 + device)])], &[]);
        guest.kick(FIRST_OPTIONAL_QUEUE);
        assert_eq!(values(&guest), [("free_memory", 50 + device)]);
        // A clone has what waits, and reads it again.
        let state = guest.save();
        guest = guest.restored(whole().0, &state);
        guest.transport().kick_all();
        guest.run();
        assert_eq!(values(&guest), [("free_memory", 50 + device)]);
    }
}

#[test]
fn optional_queues_follow_without_gaps() {
    // A driver that tells nothing reports in the first of them.
    let (balloon, ledger) = whole();
    let mut guest = Guest::started_without(balloon, 1 << STATISTICS);
    assert!(report(&mut guest, &[(0x20_0000, 4096)]));
    assert_eq!(*ledger.ranges.lock(), [(0x20_0000, 4096)]);
    let sizes = |config| Balloon::new(config, None, Ledger::default()).unwrap().queue_sizes().len();
    assert_eq!(sizes(BalloonConfig::default()), 2);
    assert_eq!(sizes(BalloonConfig::REPORTING), 3);
    assert_eq!(sizes(BalloonConfig { statistics: true, ..BalloonConfig::REPORTING }), 4);
}

#[test]
fn the_state_of_another_device_is_refused() {
    let result = balloon(Ledger::default()).restore(&DeviceState::Rng, true);
    assert!(matches!(result, Err(RestoreDeviceError::OtherDevice { id: 5 })));
}
