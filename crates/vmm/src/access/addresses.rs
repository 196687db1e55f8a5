//! Linear addresses that a vCPU is about to access: by its next instruction, and by the delivery of
//! an interrupt or an exception.

use firn_base::PAGE_SIZE;
use kvm_bindings::{kvm_regs, kvm_sregs};

use super::operands::{MAX_INSTRUCTION, Operand, operands};
use super::page_tables::{PageTables, WalkEnd};

/// Most pages that are considered of one operand. The largest operand, XSAVE's area with all of
/// AMX, has 11,008 bytes.
const MAX_OPERAND_PAGES: u64 = 4;
/// Bytes of the stack, below its pointer, that a call or the delivery of an interrupt may write.
const STACK_BYTES: u64 = 64;
/// Offsets in a 64-bit task state segment: the stack pointer of ring 0, and the first of seven
/// interrupt stacks.
const TSS_RSP0: u64 = 4;
const TSS_IST1: u64 = 36;

/// General and special registers of a vCPU.
pub(crate) type Registers = (kvm_regs, kvm_sregs);

/// Reads guest-physical memory.
pub(crate) trait PhysicalMemory {
    /// Reads bytes within one page; `None` if they cannot be read.
    fn read<const N: usize>(&self, address: u64) -> Option<[u8; N]>;

    /// Reads an entry of a page table.
    fn entry(&self, address: u64) -> Option<u64> {
        self.read(address).map(u64::from_le_bytes)
    }

    /// Reads bytes at a linear address. Each page is translated: the next page of linear addresses
    /// may be anywhere.
    fn read_linear<const N: usize>(&self, linear: u64, tables: PageTables) -> Option<[u8; N]> {
        if linear % PAGE_SIZE + N as u64 > PAGE_SIZE {
            let mut bytes = [0; N];
            for (at, byte) in (0..).zip(&mut bytes) {
                [*byte] = self.read_linear(linear.wrapping_add(at), tables)?;
            }
            return Some(bytes);
        }
        let WalkEnd::Mapped { address, .. } = tables.walk(linear, |at| self.entry(at)).end else {
            return None;
        };
        self.read(address)
    }

    /// Reads the bytes of the instruction at an address; fewer if it continues in a page that
    /// cannot be read.
    fn code(&self, rip: u64, tables: PageTables) -> Vec<u8> {
        if let Some(bytes) = self.read_linear::<MAX_INSTRUCTION>(rip, tables) {
            return bytes.into();
        }
        let bytes = (0..MAX_INSTRUCTION as u64)
            .map_while(|at| self.read_linear(rip.wrapping_add(at), tables).map(|[byte]| byte));
        bytes.collect()
    }
}

/// An address in each page of an operand.
fn pages(operand: Operand) -> impl Iterator<Item = u64> {
    let Operand { address, len, .. } = operand;
    let starts =
        (0..MAX_OPERAND_PAGES).map(|page| page * PAGE_SIZE).take_while(move |from| *from < len);
    starts.chain([len - 1]).map(move |from| address.wrapping_add(from))
}

/// What the instruction at the instruction pointer writes, the stack included.
pub(crate) fn written_by_instruction(
    registers: &Registers,
    tables: PageTables,
    memory: &impl PhysicalMemory,
) -> Vec<u64> {
    let (regs, sregs) = registers;
    let operands = operands(&memory.code(regs.rip, tables), regs, sregs);
    operands.into_iter().filter(|operand| operand.write).flat_map(pages).collect()
}

/// What the instruction at the instruction pointer accesses: its own bytes, its operands, the
/// stack.
pub(crate) fn accessed_by_instruction(
    registers: &Registers,
    tables: PageTables,
    memory: &impl PhysicalMemory,
) -> Vec<u64> {
    let (regs, sregs) = registers;
    let mut found = vec![regs.rip, regs.rip.wrapping_add(MAX_INSTRUCTION as u64 - 1)];
    let operands = operands(&memory.code(regs.rip, tables), regs, sregs);
    found.extend(operands.into_iter().flat_map(pages));
    found
}

/// What the delivery of an interrupt or an exception accesses: descriptor tables, task state,
/// stacks.
pub(crate) fn accessed_by_delivery(
    registers: &Registers,
    tables: PageTables,
    memory: &impl PhysicalMemory,
) -> Vec<u64> {
    let (regs, sregs) = registers;
    let mut found = vec![regs.rsp.wrapping_sub(STACK_BYTES), regs.rsp.wrapping_sub(8), regs.rsp];
    for table in [&sregs.idt, &sregs.gdt] {
        found.extend([table.base, table.base.wrapping_add(table.limit.into())]);
    }
    for segment in [&sregs.tr, &sregs.ldt].into_iter().filter(|segment| segment.unusable == 0) {
        found.extend([segment.base, segment.base.wrapping_add(segment.limit.into())]);
    }
    let task = sregs.tr.base;
    let stacks = (0..7).map(|stack| TSS_IST1 + 8 * stack);
    for offset in [TSS_RSP0].into_iter().chain(stacks) {
        let stack = memory.read_linear(task.wrapping_add(offset), tables).map(u64::from_le_bytes);
        found.extend(stack.map(|stack| stack.wrapping_sub(8)));
    }
    found
}

#[cfg(test)]
#[path = "addresses_tests.rs"]
mod tests;
