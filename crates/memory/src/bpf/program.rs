//! The BPF program, assembled from instructions.

use std::os::fd::RawFd;

use super::Hook;
use super::kernel_types::AddFolio;
use super::tracepoint::{Queued, Tracepoint};

/// The low bits of a map entry, which hold the folio's order. The others are ns of CLOCK_MONOTONIC,
/// enough for nine years.
pub(super) const ORDER_BITS: u8 = 6;

// Helper functions of the kernel (linux/bpf.h).
const BPF_FUNC_MAP_LOOKUP_ELEM: i32 = 1;
const BPF_FUNC_KTIME_GET_NS: i32 = 5;

/// One instruction (linux/bpf.h, `struct bpf_insn`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Insn {
    pub(super) code: u8,
    /// Destination in the low four bits, source in the high ones.
    pub(super) registers: u8,
    pub(super) offset: i16,
    immediate: i32,
}

const fn insn(code: u8, dst: u8, src: u8, offset: i16, immediate: i32) -> Insn {
    Insn { code, registers: src << 4 | dst, offset, immediate }
}

/// A load of a 64-bit constant: two instructions.
fn load_immediate(dst: u8, src: u8, value: u64) -> [Insn; 2] {
    let half = |bytes: [u8; 4]| i32::from_le_bytes(bytes);
    let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
    [insn(0x18, dst, src, 0, half([a, b, c, d])), insn(0, 0, 0, 0, half([e, f, g, h]))]
}

// Registers: 0 is the result, 1 to 5 are arguments, 6 to 9 are preserved over calls, 10 is the
// frame pointer.
const LDX_U8: u8 = 0x71;
const LDX_U32: u8 = 0x61;
const LDX_U64: u8 = 0x79;
const STX_U32: u8 = 0x63;
const STX_U64: u8 = 0x7b;
const ATOMIC_U64: u8 = 0xdb;
const EXCHANGE: i32 = 0xe1;
const MOV_REG: u8 = 0xbf;
const MOV: u8 = 0xb7;
const ADD: u8 = 0x07;
const ADD_REG: u8 = 0x0f;
const MUL: u8 = 0x27;
const AND: u8 = 0x57;
const LSH: u8 = 0x67;
const RSH: u8 = 0x77;
const OR_REG: u8 = 0x4f;
const JEQ: u8 = 0x15;
const JNE: u8 = 0x55;
const JNE_U32: u8 = 0x56;
const JNE_REG: u8 = 0x5d;
const JGE: u8 = 0x35;
const JGE_REG: u8 = 0x3d;
const JLE: u8 = 0xb5;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
const PSEUDO_MAP_FD: u8 = 1;
const PSEUDO_KERNEL_FUNCTION: u8 = 2;
/// The most turns of a loop that waits. The kernel checks each turn, and gives up after some 8,000.
const TURNS: i32 = 6_000;
/// Looks at the clock in a turn, of 20 ns and more each.
const LOOKS: usize = 8;
/// A placeholder for the offset of the end of the program.
const END: i16 = i16::MAX;

/// Continues only for the file, with the page's index in register 7 and the folio's order in
/// register 8.
fn at_function(at: &AddFolio, device: u32, inode: u64) -> Vec<Insn> {
    let mut program = of_file(at, device, inode);
    program.extend([
        insn(LDX_U64, 7, 1, AddFolio::INDEX, 0),
        insn(MOV, 8, 0, 0, 0),
        insn(LDX_U64, 2, 1, AddFolio::FOLIO, 0),
        insn(LDX_U64, 3, 2, at.flags, 0),
        insn(RSH, 3, 0, 0, at.large),
        insn(AND, 3, 0, 0, 1),
        insn(JEQ, 3, 0, 1, 0),
        insn(LDX_U8, 8, 2, at.order, 0),
    ]);
    program
}

/// Continues only if a page of the file was added, with its `address_space` in register 6.
fn of_file(at: &AddFolio, device: u32, inode: u64) -> Vec<Insn> {
    let mut program = vec![
        insn(LDX_U64, 2, 1, AddFolio::RETURNED, 0),
        insn(JNE_U32, 2, 0, END, 0),
        insn(LDX_U64, 6, 1, AddFolio::MAPPING, 0),
        insn(LDX_U64, 2, 6, at.inode, 0),
        insn(LDX_U64, 4, 2, at.number, 0),
    ];
    program.extend(load_immediate(3, 0, inode));
    program.extend([
        insn(JNE_REG, 4, 3, END, 0),
        insn(LDX_U64, 2, 2, at.superblock, 0),
        insn(LDX_U32, 4, 2, at.device, 0),
    ]);
    program.extend(load_immediate(3, 0, u64::from(device)));
    program.push(insn(JNE_REG, 4, 3, END, 0));
    program
}

/// As [`at_function`], from the tracepoint's record.
fn at_tracepoint(at: &Tracepoint, device: u32, inode: u64) -> Vec<Insn> {
    let order = at.order.map_or(insn(MOV, 8, 0, 0, 0), |order| insn(LDX_U8, 8, 1, order, 0));
    let mut program = vec![insn(LDX_U32, 2, 1, at.device, 0)];
    program.extend(load_immediate(3, 0, u64::from(device)));
    program.extend([insn(JNE_REG, 2, 3, END, 0), insn(LDX_U64, 2, 1, at.inode, 0)]);
    program.extend(load_immediate(3, 0, inode));
    program.extend([insn(JNE_REG, 2, 3, END, 0), insn(LDX_U64, 7, 1, at.index, 0), order]);
    program
}

/// `if (page is of the file && index < pages) { entry = &map[index]; if (!*entry) *entry = now << 6
/// | order; }`
pub(super) fn program(hook: &Hook, device: u32, inode: u64, pages: u32, map: RawFd) -> Vec<Insn> {
    let mut program = match hook {
        Hook::Function(function) => at_function(function, device, inode),
        Hook::Tracepoint(tracepoint) => at_tracepoint(tracepoint, device, inode),
    };
    program.extend([
        // Below 2^31: `Capture::start` limits it.
        insn(JGE, 7, 0, END, i32::try_from(pages).unwrap_or(i32::MAX)),
        insn(AND, 8, 0, 0, (1 << ORDER_BITS) - 1),
        insn(CALL, 0, 0, 0, BPF_FUNC_KTIME_GET_NS),
        insn(LSH, 0, 0, 0, i32::from(ORDER_BITS)),
        insn(OR_REG, 0, 8, 0, 0),
        insn(MOV_REG, 9, 0, 0, 0),
    ]);
    program.extend(entry(7, map));
    program.extend([
        insn(LDX_U64, 1, 0, 0, 0),
        insn(JNE, 1, 0, END, 0),
        insn(STX_U64, 0, 9, 0, 0),
        insn(MOV, 0, 0, 0, 0),
        insn(EXIT, 0, 0, 0, 0),
    ]);
    to_end(program)
}

/// Sets the jumps to the end, which is the last two instructions.
fn to_end(mut program: Vec<Insn>) -> Vec<Insn> {
    let end = program.len() - 2;
    for (at, insn) in program.iter_mut().enumerate().filter(|(_, insn)| insn.offset == END) {
        insn.offset = i16::try_from(end - at - 1).unwrap_or(0);
    }
    program
}

/// The entry of the map whose index is in a register, in register 0.
fn entry(index: u8, map: RawFd) -> Vec<Insn> {
    let mut program = vec![insn(STX_U32, 10, index, -4, 0)];
    program.extend(load_immediate(1, PSEUDO_MAP_FD, u64::from(map.unsigned_abs())));
    program.extend([
        insn(MOV_REG, 2, 10, 0, 0),
        insn(ADD, 2, 0, 0, -4),
        insn(CALL, 0, 0, 0, BPF_FUNC_MAP_LOOKUP_ELEM),
        insn(JEQ, 0, 0, END, 0),
    ]);
    program
}

/// `if (page is of the file && !exchange(&map[0], 1)) for (i = 1; i <= ranges; i++)
/// function(mapping, map[i] >> 32, map[i] & 0xffffffff)`. The function, a BTF id, is of the first
/// module that the program is loaded with.
pub(super) fn prefetching(
    at: &AddFolio,
    device: u32,
    inode: u64,
    ranges: u32,
    map: RawFd,
    function: u32,
) -> Vec<Insn> {
    let mut program = of_file(at, device, inode);
    program.push(insn(MOV, 7, 0, 0, 0));
    program.extend(entry(7, map));
    program.extend([
        insn(MOV, 1, 0, 0, 1),
        insn(ATOMIC_U64, 0, 1, 0, EXCHANGE),
        insn(JNE, 1, 0, END, 0),
        insn(MOV, 7, 0, 0, 1),
    ]);
    let turn = program.len();
    program.extend(entry(7, map));
    program.extend([
        insn(LDX_U64, 2, 0, 0, 0),
        insn(MOV_REG, 3, 2, 0, 0),
        insn(RSH, 2, 0, 0, 32),
        insn(LSH, 3, 0, 0, 32),
        insn(RSH, 3, 0, 0, 32),
        insn(MOV_REG, 1, 6, 0, 0),
        insn(CALL, 0, PSEUDO_KERNEL_FUNCTION, 1, function.cast_signed()),
        insn(ADD, 7, 0, 0, 1),
    ]);
    let back = i16::try_from(program.len() + 1 - turn).map_or(0, i16::wrapping_neg);
    let ranges = i32::try_from(ranges).unwrap_or(i32::MAX);
    program.extend([insn(JLE, 7, 0, back, ranges), insn(MOV, 0, 0, 0, 0), insn(EXIT, 0, 0, 0, 0)]);
    to_end(program)
}

/// `if (the device is read) for (end = now() + delay_ns + sectors * sector_ns; now() < end;) {}`
pub(super) fn delaying(at: &Queued, device: u32, delay_ns: i64, sector_ns: i32) -> Vec<Insn> {
    let look = insn(CALL, 0, 0, 0, BPF_FUNC_KTIME_GET_NS);
    let mut program = vec![insn(LDX_U32, 2, 1, at.device, 0)];
    program.extend(load_immediate(3, 0, u64::from(device)));
    program.extend([
        insn(JNE_REG, 2, 3, END, 0),
        insn(LDX_U8, 2, 1, at.operation, 0),
        insn(JNE, 2, 0, END, i32::from(b'R')),
        insn(LDX_U32, 6, 1, at.sectors, 0),
        insn(MUL, 6, 0, 0, sector_ns),
        look,
        insn(ADD_REG, 6, 0, 0, 0),
    ]);
    program.extend(load_immediate(2, 0, delay_ns.cast_unsigned()));
    program.extend([insn(ADD_REG, 6, 2, 0, 0), insn(MOV, 7, 0, 0, TURNS)]);
    let turn = program.len();
    program.extend([look; LOOKS]);
    program.extend([insn(JGE_REG, 0, 6, END, 0), insn(ADD, 7, 0, 0, -1)]);
    let back = i16::try_from(program.len() + 1 - turn).map_or(0, i16::wrapping_neg);
    program.extend([insn(JNE, 7, 0, back, 0), insn(MOV, 0, 0, 0, 0), insn(EXIT, 0, 0, 0, 0)]);
    to_end(program)
}
