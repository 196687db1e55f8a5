//! The lab's emulated processor delivers each interrupt to a guest once.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

use std::arch::global_asm;
use std::process::Command;

use kvm_bindings::{kvm_pit_config, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

/// The address of the guest's code.
const CODE: u64 = 0x1000;
/// The entry of the interrupt table for vector 0x20: offset and segment.
const VECTOR: u64 = 0x20 * 4;
const MEMORY: usize = 1 << 20;
/// Offsets in the local APIC's page.
const SPURIOUS_VECTOR: usize = 0xf0;
const LINT0: usize = 0x350;
/// The port for the guest's report: the number of handled interrupts, and the number of interrupts
/// that were delivered while interrupts were disabled.
const REPORT: u16 = 0x99;
const HANDLED: u16 = 400;

// A guest in real mode. A timer (PIT) interrupts it every 0.73 ms (871 of its ticks, vector 0x20),
// and each handler runs for 0.2 ms with interrupts disabled and without exits from
// guest mode. So the emulator's timers, about a hundred per second, often expire during a handler.
global_asm!(
    ".code16",
    ".globl firn_test_interrupts",
    ".globl firn_test_interrupts_handler",
    ".globl firn_test_interrupts_end",
    "firn_test_interrupts:",
    "xor ax, ax",
    "mov ds, ax",
    "mov ss, ax",
    "mov sp, 0x7000",
    // The PIC: edge-triggered, vectors from 0x20, a second PIC at 2, 8086 mode, only the timer
    // unmasked.
    "mov al, 0x11",
    "out 0x20, al",
    "mov al, 0x20",
    "out 0x21, al",
    "mov al, 4",
    "out 0x21, al",
    "mov al, 1",
    "out 0x21, al",
    "mov al, 0xfe",
    "out 0x21, al",
    // The PIT's channel 0: a rate generator.
    "mov al, 0x34",
    "out 0x43, al",
    "mov al, 0x67",
    "out 0x40, al",
    "mov al, 3",
    "out 0x40, al",
    // esi: active handlers; ebx: handled interrupts; edi: handlers that started within another one.
    "xor esi, esi",
    "xor ebx, ebx",
    "xor edi, edi",
    "sti",
    "2: jmp 2b",
    "firn_test_interrupts_handler:",
    "push ecx",
    "inc esi",
    "cmp esi, 1",
    "je 3f",
    "inc edi",
    "3: mov ecx, 100000",
    "4: dec ecx",
    "jnz 4b",
    "dec esi",
    "inc ebx",
    "mov al, 0x20",
    "out 0x20, al",
    "cmp ebx, 400",
    "jb 6f",
    "mov ax, bx",
    "out 0x99, ax",
    "mov ax, di",
    "out 0x99, ax",
    "6: pop ecx",
    "iret",
    "firn_test_interrupts_end:",
    ".code64",
);

unsafe extern "C" {
    static firn_test_interrupts: u8;
    static firn_test_interrupts_handler: u8;
    static firn_test_interrupts_end: u8;
}

/// The guest's code, and the offset of the handler.
fn code() -> (&'static [u8], u64) {
    let (start, end) = (&raw const firn_test_interrupts, &raw const firn_test_interrupts_end);
    let handler = (&raw const firn_test_interrupts_handler).addr() - start.addr();
    // SAFETY: both labels frame the instructions above, which are constant data of this program.
    (unsafe { std::slice::from_raw_parts(start, end.addr() - start.addr()) }, handler as u64)
}

/// Runs the guest until it has reported both numbers.
fn guest() -> [u16; 2] {
    let kvm = Kvm::new().unwrap();
    let vm = kvm.create_vm().unwrap();
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap();
    let (code, handler) = code();
    memory.write_slice(code, GuestAddress(CODE)).unwrap();
    memory.write_obj(u32::try_from(CODE + handler).unwrap(), GuestAddress(VECTOR)).unwrap();
    let slot = kvm_userspace_memory_region {
        memory_size: u64::try_from(MEMORY).unwrap(),
        userspace_addr: memory.get_host_address(GuestAddress(0)).unwrap().addr() as u64,
        ..Default::default()
    };
    // SAFETY: the memory outlives the VM, and no reference points into it.
    unsafe { vm.set_user_memory_region(slot) }.unwrap();
    vm.create_irq_chip().unwrap();
    vm.create_pit2(kvm_pit_config::default()).unwrap();
    let mut vcpu = vm.create_vcpu(0).unwrap();

    // The PIC reaches the processor through its local APIC: enabled, its first input an external
    // interrupt.
    let mut apic = vcpu.get_lapic().unwrap();
    apic.regs[SPURIOUS_VECTOR + 1] |= 1;
    apic.regs[LINT0..LINT0 + 4].copy_from_slice(&[0, 7, 0, 0]);
    vcpu.set_lapic(&apic).unwrap();
    let mut sregs = vcpu.get_sregs().unwrap();
    (sregs.cs.base, sregs.cs.selector) = (0, 0);
    vcpu.set_sregs(&sregs).unwrap();
    let mut regs = vcpu.get_regs().unwrap();
    regs.rip = CODE;
    vcpu.set_regs(&regs).unwrap();

    let mut reported = [0; 2];
    for value in &mut reported {
        match vcpu.run().unwrap() {
            VcpuExit::IoOut(REPORT, data) => *value = u16::from_le_bytes(data.try_into().unwrap()),
            exit => panic!("{exit:?}"),
        }
    }
    reported
}

/// Unpatched QEMU delivers some interrupts twice, the second time even if the guest has disabled
/// interrupts (`crates/lab/src/build/qemu.rs`). In the lab this test is the guest's monitor.
#[test]
#[ignore = "needs the lab: make lab-tests"]
fn an_interrupt_that_kvm_injects_is_delivered_once() {
    if std::env::var_os("FIRN_LAB").is_some() {
        assert_eq!(guest(), [HANDLED, 0], "handled interrupts, and interrupts during a handler");
        return;
    }
    let this = std::env::current_exe().unwrap();
    let ran = Command::new(env!("CARGO_BIN_EXE_firn"))
        .args(["lab", "run", "--icount", "--timeout", "900", "--in"])
        .arg(&this)
        .arg("--")
        .arg(format!("/in/{}", this.file_name().unwrap().to_str().unwrap()))
        .arg("--ignored")
        .output()
        .unwrap();
    let [stdout, stderr] = [&ran.stdout, &ran.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(ran.status.success(), "{stdout}{stderr}");
}
