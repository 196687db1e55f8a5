use kvm_bindings::{kvm_regs, kvm_segment, kvm_sregs};
use proptest::prelude::{any, proptest};

use super::{MAX_INSTRUCTION, Operand, UNKNOWN_SIZE, operands};

/// Registers with distinct values.
fn registers() -> (kvm_regs, kvm_sregs) {
    let regs = kvm_regs {
        rax: 0xa000,
        rbx: 0xb_0000_0010,
        rcx: 3,
        rsi: 0x5000,
        rdi: 0xd000,
        rsp: 0xf008,
        rbp: 0xbb00,
        r12: 0x1_2000,
        rip: 0x40_0000,
        ..Default::default()
    };
    let segment = |base| kvm_segment { base, ..Default::default() };
    let cs = kvm_segment { l: 1, ..Default::default() };
    (regs, kvm_sregs { cs, gs: segment(0x7_0000), fs: segment(0x6_0000), ..Default::default() })
}

#[track_caller]
fn check(text: &str, code: &[u8], expected: &[(u64, u64, bool)]) {
    let (regs, sregs) = registers();
    let found = operands(code, &regs, &sregs);
    let expected: Vec<Operand> =
        expected.iter().map(|&(address, len, write)| Operand { address, len, write }).collect();
    assert_eq!(found, expected, "{text}");
}

#[test]
fn explicit_memory_operands_are_found() {
    check("mov rax, [rsi+0x10]", &[0x48, 0x8b, 0x46, 0x10], &[(0x5010, 8, false)]);
    check("mov [rdi], eax", &[0x89, 0x07], &[(0xd000, 4, true)]);
    check("mov byte [rdi+rcx*8-1], 1", &[0xc6, 0x44, 0xcf, 0xff, 1], &[(0xd017, 1, true)]);
    check("add qword [r12], 1", &[0x49, 0x83, 0x04, 0x24, 1], &[(0x1_2000, 8, true)]);
    check("lock cmpxchg [rdi], rcx", &[0xf0, 0x48, 0x0f, 0xb1, 0x0f], &[(0xd000, 8, true)]);
    check("mov rax, [rip+0x20]", &[0x48, 0x8b, 0x05, 0x20, 0, 0, 0], &[(0x40_0027, 8, false)]);
    check(
        "mov rax, gs:[0x30]",
        &[0x65, 0x48, 0x8b, 4, 0x25, 0x30, 0, 0, 0],
        &[(0x7_0030, 8, false)],
    );
    check("mov eax, fs:[rsi]", &[0x64, 0x8b, 0x06], &[(0x6_5000, 4, false)]);
    check("mov eax, [ebx]", &[0x67, 0x8b, 0x03], &[(0x10, 4, false)]);
    check("movups [rbp], xmm0", &[0x0f, 0x11, 0x45, 0], &[(0xbb00, 16, true)]);
    check("vmovdqu64 [rdi], zmm0", &[0x62, 0xf1, 0xfe, 0x48, 0x7f, 0x07], &[(0xd000, 64, true)]);
    check(
        "mov rax, [0x1122334455667788]",
        &[0x48, 0xa1, 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11],
        &[(0x1122_3344_5566_7788, 8, false)],
    );
}

#[test]
fn stack_and_string_operands_are_found() {
    check("push rax", &[0x50], &[(0xf000, 8, true)]);
    check("pop rax", &[0x58], &[(0xf008, 8, false)]);
    check("call +0", &[0xe8, 0, 0, 0, 0], &[(0xf000, 8, true)]);
    check("call [rax]", &[0xff, 0x10], &[(0xa000, 8, false), (0xf000, 8, true)]);
    check("ret", &[0xc3], &[(0xf008, 8, false)]);
    check("movsb", &[0xa4], &[(0xd000, 1, true), (0x5000, 1, false)]);
    check("rep movsq", &[0xf3, 0x48, 0xa5], &[(0xd000, 8, true), (0x5000, 8, false)]);
    check("rep stosb", &[0xf3, 0xaa], &[(0xd000, 1, true)]);
    check("xsave [rdi]", &[0x0f, 0xae, 0x27], &[(0xd000, 3 * 4096, true)]);
}

#[test]
fn instructions_without_memory_access_have_no_operands() {
    check("nop", &[0x90], &[]);
    check("lea rax, [rsi+8]", &[0x48, 0x8d, 0x46, 8], &[]);
    check("nop [rax]", &[0x0f, 0x1f, 0], &[]);
    check("vpgatherdd ymm0, [rax+ymm1*4], ymm2", &[0xc4, 0xe2, 0x6d, 0x90, 0x04, 0x88], &[]);
    check("invalid opcode", &[0x06], &[]);
    check("truncated instruction", &[0x48, 0x8b], &[]);
    check("no bytes", &[], &[]);
}

#[test]
fn compatibility_mode_is_decoded_as_32_bit_code() {
    let (regs, mut sregs) = registers();
    (sregs.cs.l, sregs.cs.db) = (0, 1);
    // inc eax in 32-bit code, a prefix in 64-bit code; then mov eax, [esi].
    assert_eq!(operands(&[0x40, 0x8b, 0x06], &regs, &sregs), []);
    let read = Operand { address: 0x5000, len: 4, write: false };
    assert_eq!(operands(&[0x8b, 0x06], &regs, &sregs), [read]);
}

proptest! {
    #[test]
    fn arbitrary_code_and_registers_never_panic(
        code in proptest::collection::vec(any::<u8>(), 0..=MAX_INSTRUCTION),
        value in any::<u64>(),
        mode in any::<(bool, bool)>(),
    ) {
        let regs = kvm_regs { rax: value, rsp: value, rsi: value, rdi: value, rip: value, ..Default::default() };
        let (mut regs, mut sregs) = (regs, kvm_sregs::default());
        regs.rbx = value;
        (sregs.cs.l, sregs.cs.db) = (u8::from(mode.0), u8::from(mode.1));
        for operand in operands(&code, &regs, &sregs) {
            assert!((1..=UNKNOWN_SIZE).contains(&operand.len), "{operand:?}");
        }
    }
}
