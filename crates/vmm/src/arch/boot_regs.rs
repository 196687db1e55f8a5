//! The state in which a processor enters the kernel: the 64-bit Linux boot protocol
//! (`Documentation/arch/x86/boot.rst`, "64-bit Boot Protocol").
//!
//! Long mode, paging with the first 4 GiB identity-mapped, flat segments with the selectors of the
//! protocol, `rsi` pointing to the boot parameters.

use kvm_bindings::{kvm_dtable, kvm_regs, kvm_segment, kvm_sregs};
use vm_memory::{Bytes, GuestAddress, GuestMemoryError, GuestMemoryMmap};

use super::layout;

const CR0_PE: u64 = 1;
const CR0_ET: u64 = 1 << 4;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
/// Bit 1 of RFLAGS is always set.
const RFLAGS_RESERVED: u64 = 1 << 1;

const PRESENT_WRITABLE: u64 = 0b11;
const HUGE_LEAF: u64 = 1 << 7;
const ENTRIES: u64 = 512;
const PAGE: u64 = 4096;
const DIRECTORIES: u64 = 4;

/// `__BOOT_CS` and `__BOOT_DS` of the protocol.
const CODE_SELECTOR: u16 = 0x10;
const DATA_SELECTOR: u16 = 0x18;

/// GDT entries: null, unused, 64-bit code, data.
const GDT: [u64; 4] = [0, 0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff];

/// Registers at the entry of the kernel.
pub(crate) fn regs(entry: u64) -> kvm_regs {
    kvm_regs {
        rip: entry,
        rsi: layout::BOOT_PARAMS,
        rsp: layout::BOOT_STACK,
        rbp: layout::BOOT_STACK,
        rflags: RFLAGS_RESERVED,
        ..Default::default()
    }
}

/// Sets the special registers to long mode with the tables of [`write_tables`].
pub(crate) fn set_long_mode(sregs: &mut kvm_sregs) {
    let data = segment(DATA_SELECTOR, 3);
    sregs.cs = kvm_segment { l: 1, db: 0, ..segment(CODE_SELECTOR, 11) };
    sregs.ds = data;
    sregs.es = data;
    sregs.fs = data;
    sregs.gs = data;
    sregs.ss = data;
    sregs.gdt = kvm_dtable { base: layout::GDT, limit: 31, ..Default::default() };
    sregs.cr0 = CR0_PE | CR0_ET | CR0_PG;
    sregs.cr3 = layout::PAGE_TABLES;
    sregs.cr4 |= CR4_PAE;
    sregs.efer |= EFER_LME | EFER_LMA;
}

fn segment(selector: u16, type_: u8) -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector,
        type_,
        present: 1,
        s: 1,
        db: 1,
        g: 1,
        ..Default::default()
    }
}

/// Writes the GDT, and page tables that identity-map the first 4 GiB with 2 MiB leaves.
pub(crate) fn write_tables(memory: &GuestMemoryMmap) -> Result<(), GuestMemoryError> {
    for (index, entry) in (0u64..).zip(GDT) {
        memory.write_obj(entry, GuestAddress(layout::GDT + index * 8))?;
    }
    let pml4 = layout::PAGE_TABLES;
    let pdpt = pml4 + PAGE;
    let first_directory = pdpt + PAGE;
    memory.write_obj(pdpt | PRESENT_WRITABLE, GuestAddress(pml4))?;
    for directory in 0..DIRECTORIES {
        let table = first_directory + directory * PAGE;
        memory.write_obj(table | PRESENT_WRITABLE, GuestAddress(pdpt + directory * 8))?;
        for entry in 0..ENTRIES {
            let leaf = (directory * ENTRIES + entry) << 21;
            memory
                .write_obj(leaf | PRESENT_WRITABLE | HUGE_LEAF, GuestAddress(table + entry * 8))?;
        }
    }
    Ok(())
}
