use std::collections::BTreeMap;

use kvm_bindings::{kvm_regs, kvm_segment, kvm_sregs};

use super::{PageTables, PhysicalMemory, Registers, accessed_by_delivery, written_by_instruction};

const CODE: u64 = 0x40_0000;
const TSS: u64 = 0x60_0000;

/// Pages by their physical addresses. A read within one page continues in the physically next one,
/// as guest memory does.
#[derive(Default)]
struct Pages(BTreeMap<u64, u8>);

impl Pages {
    fn put(&mut self, address: u64, bytes: &[u8]) {
        self.0.extend((address..).zip(bytes.iter().copied()));
    }

    fn entry_at(&mut self, table: u64, index: u64, value: u64) {
        self.put(table + 8 * index, &value.to_le_bytes());
    }
}

impl PhysicalMemory for Pages {
    fn read<const N: usize>(&self, address: u64) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        for (at, byte) in (address..).zip(&mut bytes) {
            *byte = self.0.get(&at).copied().unwrap_or(0);
        }
        Some(bytes)
    }
}

/// Two pages of code and two of a task state segment, each second one far from the first and before
/// it.
fn guest() -> (Pages, Registers, PageTables) {
    let mut memory = Pages::default();
    for (table, index, next) in [(0x1000, 0, 0x2000), (0x2000, 0, 0x3000), (0x3000, 2, 0x4000)] {
        memory.entry_at(table, index, next | 7);
    }
    memory.entry_at(0x3000, 3, 0x5000 | 7);
    for (table, first, second) in [(0x4000, 0x9000, 0x7000), (0x5000, 0xc000, 0x6000)] {
        memory.entry_at(table, 0, first | 7);
        memory.entry_at(table, 1, second | 7);
    }
    let regs = kvm_regs { rip: CODE + 0xffd, rdi: 0x10_0000, rsp: 0x20_0000, ..Default::default() };
    let sregs = kvm_sregs {
        cr0: 1 << 31,
        cr3: 0x1000,
        efer: 1 << 10,
        cs: kvm_segment { l: 1, ..Default::default() },
        tr: kvm_segment { base: TSS + 0xff8, limit: 103, ..Default::default() },
        ..Default::default()
    };
    let tables = PageTables::of(&sregs).unwrap();
    (memory, (regs, sregs), tables)
}

#[test]
fn an_instruction_across_pages_is_read_page_by_page() {
    let (mut memory, registers, tables) = guest();
    // mov dword ptr [rdi + 0x1000], 5, cut after three bytes. The physically next page has another
    // displacement.
    memory.put(0x9ffd, &[0xc7, 0x87, 0]);
    memory.put(0x7000, &[0x10, 0, 0, 5, 0, 0, 0]);
    memory.put(0xa000, &[0x20, 0, 0, 5, 0, 0, 0]);
    let written = written_by_instruction(&registers, tables, &memory);
    assert_eq!(written, [0x10_1000, 0x10_1003]);
}

#[test]
fn an_instruction_before_a_missing_page_is_read_as_far_as_it_goes() {
    let (mut memory, registers, tables) = guest();
    memory.entry_at(0x4000, 1, 0);
    // mov [rdi], eax
    memory.put(0x9ffd, &[0x89, 0x07, 0x90]);
    assert_eq!(memory.code(registers.0.rip, tables), [0x89, 0x07, 0x90]);
    assert_eq!(written_by_instruction(&registers, tables, &memory), [0x10_0000, 0x10_0003]);
}

#[test]
fn a_task_state_segment_across_pages_is_read_page_by_page() {
    let (mut memory, registers, tables) = guest();
    // The stack of ring 0, at offset 4: four bytes in the first page, four in the second.
    memory.put(0xcffc, &0x3344_5566_u32.to_le_bytes());
    memory.put(0x6000, &0x0000_1122_u32.to_le_bytes());
    memory.put(0xd000, &0xffff_u32.to_le_bytes());
    let found = accessed_by_delivery(&registers, tables, &memory);
    assert!(found.contains(&(0x1122_3344_5566 - 8)), "{found:x?}");
}
