//! The guest of the floor: two loops in ring 3, and their page tables.

use std::arch::global_asm;

use kvm_bindings::{kvm_regs, kvm_segment, kvm_sregs};
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use firn_base::{GuestRange, PAGE_SIZE as PAGE};
use firn_memory::{GuestView, Leaf};

use super::FloorAccess;

/// Offset of the page tables in the control memory, after the code; the root comes first.
const PAGE_TABLES: u64 = 0x1_0000;

/// Virtual addresses: the code and the report in the first chunk, guest memory from `MEMORY` up.
const CODE_AT: u64 = 0x40_0000;
const REPORT_AT: u64 = 0x41_0000;
const MEMORY: u64 = 1 << 39;

/// Page-table entry bits (AMD64 Architecture Programmer's Manual, volume 2, 5.4.1): present,
/// writable, user, accessed, dirty.
const ENTRY: u64 = 0b110_0111;
const HUGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

// rdi: first address, rsi: number of pages, rcx: address of the report.
global_asm!(
    ".pushsection .rodata.firn_floor, \"a\"",
    "firn_floor_read:",
    "xor eax, eax",
    "2: add rax, [rdi]",
    "add rdi, 4096",
    "dec rsi",
    "jnz 2b",
    "mov [rcx], rax",
    "firn_floor_write:",
    "xor eax, eax",
    "3: inc qword ptr [rdi]",
    "add rdi, 4096",
    "dec rsi",
    "jnz 3b",
    "mov [rcx], rax",
    "firn_floor_end:",
    ".popsection",
);

unsafe extern "C" {
    static firn_floor_read: u8;
    static firn_floor_write: u8;
    static firn_floor_end: u8;
}

/// Both loops, and where the second starts.
fn code() -> (&'static [u8], usize) {
    let read = &raw const firn_floor_read;
    let (write, end) = (&raw const firn_floor_write, &raw const firn_floor_end);
    // SAFETY: the labels frame the instructions above, which are constant data of this program.
    let code = unsafe { std::slice::from_raw_parts(read, end.addr() - read.addr()) };
    (code, write.addr() - read.addr())
}

/// Bytes of control memory for a range: the code, and a page table for every 2 MiB, rounded up
/// generously for the levels above.
pub(super) fn control_bytes(range: GuestRange) -> u64 {
    let tables = range.len.div_ceil(2 << 20) + range.len.div_ceil(1 << 30) + 8;
    PAGE_TABLES + tables * PAGE
}

/// Guest-physical addresses of what the loop needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Places {
    /// The control memory: code, then page tables.
    pub(super) control: u64,
    /// Where no memory is: a store there ends the loop.
    pub(super) report: u64,
}

/// Writes code and page tables, and returns the registers with which the loop starts.
pub(super) fn load(
    control: &GuestView,
    places: Places,
    range: GuestRange,
    access: FloorAccess,
    leaf: Leaf,
) -> Result<kvm_regs, GuestMemoryError> {
    let (code, write) = code();
    control.write_slice(code, GuestAddress(places.control))?;
    let root = places.control + PAGE_TABLES;
    let mut tables = PageTables { control, root, next: root + PAGE };
    tables.map(CODE_AT, places.control, Leaf::Size4K)?;
    tables.map(REPORT_AT, places.report, Leaf::Size4K)?;
    let first = range.start - range.start % leaf.bytes();
    let mut at = first;
    while at < range.end() {
        tables.map(MEMORY + at, at, leaf)?;
        at += leaf.bytes();
    }
    let start = match access {
        FloorAccess::Read => 0,
        FloorAccess::Write => write as u64,
    };
    Ok(kvm_regs {
        rip: CODE_AT + start,
        rdi: MEMORY + range.start,
        rsi: range.len / PAGE,
        rcx: REPORT_AT,
        rflags: 0x2,
        ..kvm_regs::default()
    })
}

/// Page tables in the making.
struct PageTables<'a> {
    control: &'a GuestView,
    root: u64,
    /// Where the next table goes: memory that is zero so far.
    next: u64,
}

impl PageTables<'_> {
    fn map(&mut self, virt: u64, phys: u64, leaf: Leaf) -> Result<(), GuestMemoryError> {
        let last = if leaf == Leaf::Size4K { 1 } else { 2 };
        let slot = |table: u64, level: u64| {
            GuestAddress(table + (virt >> (12 + 9 * (level - 1)) & 511) * 8)
        };
        let mut table = self.root;
        for level in (last + 1..=4).rev() {
            let entry: u64 = self.control.read_obj(slot(table, level))?;
            if entry == 0 {
                self.control.write_obj(self.next | ENTRY, slot(table, level))?;
                table = self.next;
                self.next += PAGE;
            } else {
                table = entry & ADDRESS;
            }
        }
        let huge = if leaf == Leaf::Size4K { 0 } else { HUGE };
        self.control.write_obj(phys | ENTRY | huge, slot(table, last))
    }
}

/// Ring 3 in 64-bit mode from the first instruction: no interrupts, no descriptor tables.
pub(super) fn set_ring3(sregs: &mut kvm_sregs, places: Places) {
    let segment = |selector, type_, long| kvm_segment {
        selector,
        limit: u32::MAX,
        type_,
        present: 1,
        dpl: 3,
        s: 1,
        l: long,
        db: 1 - long,
        g: 1,
        ..kvm_segment::default()
    };
    sregs.cr0 = 0x8005_0033;
    sregs.cr3 = places.control + PAGE_TABLES;
    sregs.cr4 = 0x620;
    sregs.efer = 0xd01;
    sregs.cs = segment(0x33, 11, 1);
    let data = segment(0x2b, 3, 0);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.ldt = kvm_segment { unusable: 1, ..kvm_segment::default() };
}
