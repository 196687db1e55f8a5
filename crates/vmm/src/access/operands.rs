//! The memory operands of a guest instruction: decoded, with their linear addresses.
//!
//! The code may be any bytes. Bytes that do not decode have no operands.

use iced_x86::{
    Decoder, DecoderOptions, InstructionInfoFactory, InstructionInfoOptions, OpAccess, Register,
    UsedMemory,
};
use kvm_bindings::{kvm_regs, kvm_sregs};

/// Most bytes of an instruction.
pub(super) const MAX_INSTRUCTION: usize = 15;
/// Length in bytes that is assumed for an operand whose size depends on the processor: XSAVE's area
/// has 11,008 bytes with all of AMX.
const UNKNOWN_SIZE: u64 = 3 * 4096;

/// Memory that an instruction accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Operand {
    /// Linear address of the first byte.
    pub(super) address: u64,
    /// Length in bytes, at least 1.
    pub(super) len: u64,
    /// Whether the instruction writes it, or may write it.
    pub(super) write: bool,
}

/// The memory operands, the stack included, of the instruction in `code`, which may be truncated.
/// The registers are those before its execution. Of a repeated instruction only the next iteration
/// counts. Vector registers are not evaluated, so gathers and scatters have no operands.
pub(super) fn operands(code: &[u8], regs: &kvm_regs, sregs: &kvm_sregs) -> Vec<Operand> {
    let bits = match (sregs.cs.l, sregs.cs.db) {
        (1, _) => 64,
        (_, 1) => 32,
        _ => 16,
    };
    let mut decoder = Decoder::with_ip(bits, code, regs.rip, DecoderOptions::NONE);
    let instruction = decoder.decode();
    if instruction.is_invalid() {
        return Vec::new();
    }
    let mut factory = InstructionInfoFactory::new();
    let info = factory.info_options(&instruction, InstructionInfoOptions::NO_REGISTER_USAGE);
    // The operands of a repeated string instruction have no size of their own.
    let element =
        if instruction.is_string_instruction() { instruction.memory_size().size() } else { 0 };
    let operand = |memory| operand(memory, element, regs, sregs);
    info.used_memory().iter().filter_map(operand).collect()
}

fn operand(
    memory: &UsedMemory,
    element: usize,
    regs: &kvm_regs,
    sregs: &kvm_sregs,
) -> Option<Operand> {
    let write = match memory.access() {
        // LEA and prefetch hints compute an address without accessing it.
        OpAccess::None | OpAccess::NoMemAccess => return None,
        OpAccess::Read | OpAccess::CondRead => false,
        _ => true,
    };
    let address = memory.virtual_address(0, |register, _, _| value(register, regs, sregs))?;
    let len = match (memory.memory_size().size(), element) {
        (0, 0) => UNKNOWN_SIZE,
        (0, size) | (size, _) => size as u64,
    };
    Some(Operand { address, len, write })
}

/// The value of a register, or the base address of a segment register.
fn value(register: Register, regs: &kvm_regs, sregs: &kvm_sregs) -> Option<u64> {
    if register.is_segment_register() {
        return Some(match register {
            Register::CS => sregs.cs.base,
            Register::DS => sregs.ds.base,
            Register::ES => sregs.es.base,
            Register::SS => sregs.ss.base,
            Register::FS => sregs.fs.base,
            _ => sregs.gs.base,
        });
    }
    let whole = match register.full_register() {
        Register::RAX => regs.rax,
        Register::RBX => regs.rbx,
        Register::RCX => regs.rcx,
        Register::RDX => regs.rdx,
        Register::RSI => regs.rsi,
        Register::RDI => regs.rdi,
        Register::RSP => regs.rsp,
        Register::RBP => regs.rbp,
        Register::R8 => regs.r8,
        Register::R9 => regs.r9,
        Register::R10 => regs.r10,
        Register::R11 => regs.r11,
        Register::R12 => regs.r12,
        Register::R13 => regs.r13,
        Register::R14 => regs.r14,
        Register::R15 => regs.r15,
        _ => return None,
    };
    // XLAT adds AL; addresses of 32 and 16 bits use the low part of the register.
    Some(match register.size() {
        1 => whole & 0xff,
        2 => whole & 0xffff,
        4 => whole & 0xffff_ffff,
        _ => whole,
    })
}

#[cfg(test)]
#[path = "operands_tests.rs"]
mod tests;
