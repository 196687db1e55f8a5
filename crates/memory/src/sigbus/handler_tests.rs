use super::{MAX_SLOTS, RegisteredSlots, Report, guest_page};
use crate::slot::Slot;

fn slot(number: u64) -> Slot {
    // Not a valid user address.
    Slot { guest_addr: number << 32, len: 0x2000, host_addr: (1 << 60) + (number << 20) }
}

#[test]
fn slots_are_registered_up_to_a_limit_and_unregistered_on_drop() {
    let registered: Vec<_> =
        (0..2 * MAX_SLOTS as u64).map(|number| RegisteredSlots::new(&[slot(number)])).collect();
    let known = |number: u64| guest_page(slot(number).host_addr + 0x1fff);
    // Other tests of this process may have guest memory, too.
    assert!(
        (0..2 * MAX_SLOTS as u64).filter(|number| known(*number).is_some()).count() <= MAX_SLOTS
    );
    assert_eq!(known(2 * MAX_SLOTS as u64 - 1), None);
    for number in (0..MAX_SLOTS as u64).filter(|number| known(*number).is_some()) {
        assert_eq!(known(number), Some((number << 20) + 1));
    }
    drop(registered);
    assert!((0..2 * MAX_SLOTS as u64).all(|number| known(number).is_none()));
}

#[test]
fn a_report_is_one_line_of_limited_length() {
    let mut report = Report::of(1 << 60);
    let text = String::from_utf8_lossy(report.bytes()).into_owned();
    assert!(text.starts_with("firn: error: the memory at 0x1000000000000000 is lost. "), "{text}");
    assert!(text.ends_with('\n') && text.lines().count() == 1, "{text}");
    report.push(b"\x1b[2J");
    report.push(&[b'x'; 2000]);
    assert!(report.bytes().len() == 1024 && !report.bytes().contains(&0x1b));
}
