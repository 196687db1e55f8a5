use super::{MOST, Report, Told, guest_page};
use crate::guest_memory::Slot;

fn slot(number: u64) -> Slot {
    // No process has memory there.
    Slot { guest_addr: number << 32, len: 0x2000, host_addr: (1 << 60) + (number << 20) }
}

#[test]
fn slots_come_and_go_and_may_be_too_many() {
    let told: Vec<Told> = (0..2 * MOST as u64).map(|number| Told::of(&[slot(number)])).collect();
    let known = |number: u64| guest_page(slot(number).host_addr + 0x1fff);
    // Other tests of this process may have guest memory, too.
    assert!((0..2 * MOST as u64).filter(|number| known(*number).is_some()).count() <= MOST);
    assert_eq!(known(2 * MOST as u64 - 1), None);
    for number in (0..MOST as u64).filter(|number| known(*number).is_some()) {
        assert_eq!(known(number), Some((number << 20) + 1));
    }
    drop(told);
    assert!((0..2 * MOST as u64).all(|number| known(number).is_none()));
}

#[test]
fn a_report_is_one_line_however_long() {
    let mut report = Report::of(1 << 60);
    let text = String::from_utf8_lossy(report.bytes()).into_owned();
    assert!(text.starts_with("firn: error: the memory at 0x1000000000000000 is lost. "), "{text}");
    assert!(text.ends_with('\n') && text.lines().count() == 1, "{text}");
    report.push(b"\x1b[2J");
    report.push(&[b'x'; 2000]);
    assert!(report.bytes().len() == 1024 && !report.bytes().contains(&0x1b));
}
