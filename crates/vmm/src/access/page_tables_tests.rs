use std::collections::BTreeMap;

use firn_memory::Leaf;
use kvm_bindings::kvm_sregs;
use proptest::prelude::{any, proptest};

use super::{PageTables, WalkEnd};

const LONG_MODE: (u64, u64) = (1 << 31, 1 << 10);

fn sregs(cr3: u64, cr4: u64) -> kvm_sregs {
    let (cr0, efer) = LONG_MODE;
    kvm_sregs { cr0, cr3, cr4, efer, ..Default::default() }
}

/// Tables at 0x1000, 0x2000, …, one for each level; entry 1 of each points to the next table, entry
/// 2 of the lower levels maps a page.
fn memory() -> BTreeMap<u64, u64> {
    let entry = |table: u64, index: u64| table + 8 * index;
    BTreeMap::from([
        (entry(0x1000, 1), 0x2000 | 0x67),
        (entry(0x2000, 1), 0x3000 | 0x67),
        (entry(0x3000, 1), 0x4000 | 0x67),
        // The no-execute bit and the bits available to software are not part of the address.
        (entry(0x2000, 2), 0x4000_0000 | 0x80 | 1 | 1 << 63),
        (entry(0x3000, 2), 0x0060_0000 | 0x80 | 1 | 1 << 58),
        (entry(0x4000, 2), 0x0012_3000 | 1),
        (entry(0x4000, 3), 0x0012_3000),
    ])
}

fn linear(indices: [u64; 4], offset: u64) -> u64 {
    indices.iter().fold(0, |address, index| address << 9 | index) << 12 | offset
}

#[track_caller]
fn check(tables: PageTables, linear: u64, visited: &[u64], end: WalkEnd) {
    let memory = memory();
    let walk = tables.walk(linear, |address| Some(memory.get(&address).copied().unwrap_or(0)));
    assert_eq!((walk.tables(), walk.end), (visited, end), "{linear:#x}");
}

#[test]
fn pages_of_every_size_are_found() {
    let tables = PageTables::of(&sregs(0x1000 | 0x18, 0)).unwrap();
    let mapped = |address, leaf| WalkEnd::Mapped { address, leaf };
    let all = [0x1000, 0x2000, 0x3000, 0x4000];
    check(tables, linear([1, 1, 1, 2], 0x45), &all, mapped(0x12_3045, Leaf::Size4K));
    check(tables, linear([1, 1, 2, 5], 6), &all[..3], mapped(0x60_5006, Leaf::Size2M));
    check(tables, linear([1, 2, 3, 4], 9), &all[..2], mapped(0x4060_4009, Leaf::Size1G));
}

#[test]
fn entries_that_are_not_present_differ_from_tables_that_cannot_be_read() {
    let tables = PageTables::of(&sregs(0x1000, 0)).unwrap();
    let all = [0x1000, 0x2000, 0x3000, 0x4000];
    check(tables, linear([1, 1, 1, 3], 0), &all, WalkEnd::NotPresent);
    check(tables, linear([2, 0, 0, 0], 0), &all[..1], WalkEnd::NotPresent);
    // Bit 47 without the bits above it, and a bit above it alone.
    check(tables, 1 << 47, &[], WalkEnd::NotPresent);
    check(tables, 1 << 60, &[], WalkEnd::NotPresent);

    let memory = memory();
    let walk = tables.walk(linear([1, 1, 1, 2], 0), |address| {
        (address < 0x3000).then(|| memory.get(&address).copied().unwrap_or(0))
    });
    assert_eq!((walk.tables(), walk.end), (&all[..3], WalkEnd::Unread));
}

#[test]
fn a_fifth_level_is_walked_if_cr4_enables_it() {
    let tables = PageTables::of(&sregs(0x9000, 1 << 12)).unwrap();
    let mut memory = memory();
    memory.insert(0x9000 + 8 * 3, 0x1000 | 1);
    let address = linear([1, 1, 1, 2], 7) | 3 << 48;
    let walk = tables.walk(address, |address| memory.get(&address).copied());
    assert_eq!(walk.tables(), [0x9000, 0x1000, 0x2000, 0x3000, 0x4000]);
    assert_eq!(walk.end, WalkEnd::Mapped { address: 0x12_3007, leaf: Leaf::Size4K });
}

#[test]
fn a_vcpu_outside_long_mode_has_no_page_tables() {
    let (cr0, efer) = LONG_MODE;
    for (cr0, efer) in [(0, efer), (cr0, 0), (0, 0)] {
        assert_eq!(PageTables::of(&kvm_sregs { cr0, efer, ..Default::default() }), None);
    }
}

proptest! {
    #[test]
    fn arbitrary_tables_end_every_walk(cr3 in any::<u64>(), five in any::<bool>(), linear in any::<u64>(), entry in any::<u64>()) {
        let tables = PageTables::of(&sregs(cr3, u64::from(five) << 12)).unwrap();
        let walk = tables.walk(linear, |address| {
            assert!(address < 1 << 52 && address.is_multiple_of(8));
            Some(entry)
        });
        assert!(walk.tables().len() <= 5);
        if let WalkEnd::Mapped { address, .. } = walk.end {
            assert!(address < 1 << 52);
            assert_eq!(address % 4096, linear % 4096);
        }
    }
}
