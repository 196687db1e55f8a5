//! Guests in ring 3 that write to sealed memory with every kind of store.

use std::arch::global_asm;
use std::time::Duration;

use kvm_bindings::{Msrs, kvm_msr_entry, kvm_xcrs};
use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress};

use super::parts::{Machine, Parts};
use super::prepared::set;
use super::tests::{REPORT, host};
use super::{End, Microvm, UserRegisters};
use crate::arch::cpu_model::CpuModel;
use crate::arch::cpuid;
use crate::config::HostConfig;
use crate::cow::copy_ahead::copy_for_vcpu;
use crate::cow::testing::Sealed;
use crate::kvm::{KVM_DEVICE, OpenKvm};
use crate::vcpu::VcpuFailure;

/// Guest-physical addresses, identical to the virtual ones. All memory that the tests write is
/// sealed at first, except for the chunk with the page tables.
const MEMORY: u64 = 16 << 20;
const CHUNK: u64 = 2 << 20;
const PAGE_TABLES: u64 = 0;
const CODE: u64 = CHUNK;
const STACK: u64 = 2 * CHUNK;
const DATA: u64 = 3 * CHUNK;
const PAGE: u64 = 4096;

const PRESENT_WRITABLE_USER: u64 = 0b111;
const CR4_OSXSAVE: u64 = 1 << 18;

/// Programs. Each starts with DATA in rdi and the address of the report in rcx, and reports rax
/// repeatedly.
macro_rules! program {
    ($name:ident, $($line:literal),+ $(,)?) => {
        global_asm!(
            concat!(".globl ", stringify!($name)),
            concat!(stringify!($name), ":"),
            $($line,)+
            "2: mov [rcx], rax",
            "jmp 2b",
            concat!(".globl ", stringify!($name), "_end"),
            concat!(stringify!($name), "_end:"),
        );
        fn $name() -> Vec<u8> {
            unsafe extern "C" {
                #[link_name = stringify!($name)]
                static START: u8;
                #[link_name = concat!(stringify!($name), "_end")]
                static END: u8;
            }
            let (start, end) = (&raw const START, &raw const END);
            // SAFETY: the labels enclose the instructions above, which are constant data of this
            // program.
            unsafe { std::slice::from_raw_parts(start, end.addr() - start.addr()) }.to_vec()
        }
    };
}

program!(
    firn_cow_plain,
    "mov byte ptr [rdi], 1",
    "mov qword ptr [rdi + 0x200000], 2",
    "add dword ptr [rdi + 0x400008], 3",
    "mov rax, [rdi + 0x400008]",
    "add rax, [rdi + 0x200000]",
);
program!(
    firn_cow_vector,
    "vpcmpeqd ymm0, ymm0, ymm0",
    "vmovdqu [rdi + 1], ymm0",
    "movups [rdi + 0x200000], xmm0",
    "movq [rdi + 0x400000], xmm0",
    "mov rax, [rdi + 25]",
);
program!(
    firn_cow_xsave,
    "vpcmpeqd ymm0, ymm0, ymm0",
    "mov eax, 7",
    "xor edx, edx",
    "xsave [rdi]",
    "fxsave [rdi + 0x200000]",
    "mov rax, [rdi + 160]",
);
program!(
    firn_cow_locked,
    "mov rsi, rdi",
    "lock add qword ptr [rdi], 5",
    "lock dec dword ptr [rdi + 0x200000]",
    "mov eax, 0",
    "mov edx, 7",
    "lock cmpxchg [rdi + 0x400000], rdx",
    "mov ebx, 9",
    "xor eax, eax",
    "xor edx, edx",
    "mov r8, rcx",
    "xor ecx, ecx",
    "lock cmpxchg16b [rdi + 0x600000]",
    "mov rcx, r8",
    "mov rax, [rdi]",
    "add rax, [rdi + 0x400000]",
    "add rax, [rdi + 0x600000]",
);
program!(
    firn_cow_straddling,
    "mov rax, 0x1122334455667788",
    "mov [rdi + 0x1ffffc], rax",
    "mov [rdi + 0x400ffd], rax",
    "xadd [rdi + 0x5ffffd], rax",
    "mov rax, [rdi + 0x1ffffc]",
);
program!(
    firn_cow_repeated,
    "mov rdx, rcx",
    "mov r9, rdi",
    "lea rdi, [r9 + 0x1fff00]",
    "mov ecx, 512",
    "mov eax, 0x5a",
    "rep stosb",
    "lea rsi, [r9 + 0x1fff80]",
    "lea rdi, [r9 + 0x5fffc0]",
    "mov ecx, 128",
    "rep movsb",
    "mov rcx, rdx",
    "mov rax, [r9 + 0x600000]",
);
program!(
    firn_cow_stack,
    "mov eax, 41",
    "lea rsp, [rdi + 0x200010]",
    "call 3f",
    "jmp 4f",
    "3: push rax",
    "add qword ptr [rsp], 1",
    "pop rax",
    "ret",
    "4: nop",
);
program!(
    firn_cow_counter,
    "mov edx, 200000",
    "mov eax, 1",
    "5: mov eax, 1",
    "lock xadd [rdi], rax",
    "dec edx",
    "jnz 5b",
);

/// All of guest memory and the reports, at 4 KiB leaves, for ring 3.
fn page_tables(image: &mut [u8]) {
    let mut entry = |table: u64, index: u64, value: u64| {
        let at = usize::try_from(table + index * 8).unwrap();
        image[at..at + 8].copy_from_slice(&value.to_le_bytes());
    };
    let (pml4, pdpt) = (PAGE_TABLES, PAGE_TABLES + PAGE);
    let (low, high, leaves) = (pdpt + PAGE, pdpt + 2 * PAGE, pdpt + 3 * PAGE);
    entry(pml4, 0, pdpt | PRESENT_WRITABLE_USER);
    entry(pdpt, 0, low | PRESENT_WRITABLE_USER);
    entry(pdpt, REPORT >> 30, high | PRESENT_WRITABLE_USER);
    for chunk in 0..MEMORY / CHUNK {
        entry(low, chunk, (leaves + chunk * PAGE) | PRESENT_WRITABLE_USER);
        for page in 0..512 {
            let address = chunk * CHUNK + page * PAGE;
            entry(leaves + chunk * PAGE, page, address | PRESENT_WRITABLE_USER);
        }
    }
    let reports = leaves + MEMORY / CHUNK * PAGE;
    entry(high, REPORT >> 21 & 511, reports | PRESENT_WRITABLE_USER);
    entry(reports, 0, REPORT | PRESENT_WRITABLE_USER);
    entry(reports, 1, (REPORT + PAGE) | PRESENT_WRITABLE_USER);
}

fn sealed(code: &[u8]) -> Sealed {
    let mut image = vec![0; usize::try_from(MEMORY).unwrap()];
    page_tables(&mut image);
    let at = usize::try_from(CODE).unwrap();
    image[at..at + code.len()].copy_from_slice(code);
    Sealed::new(image)
}

/// A microVM whose guest may use AVX.
fn prepare(sealed: &Sealed, vcpus: u8, host: HostConfig) -> Microvm {
    prepare_with(sealed, vcpus, host, |_| ())
}

/// The same, with more of each vCPU's state set after the copies ahead.
fn prepare_with(
    sealed: &Sealed,
    vcpus: u8,
    host: HostConfig,
    set_late: impl Fn(&VcpuFd),
) -> Microvm {
    let kvm = OpenKvm::open(KVM_DEVICE.as_ref()).unwrap();
    let parts = Parts::assemble(host, kvm, sealed.share(), vcpus, Machine::default()).unwrap();
    let mut cpuids = Vec::new();
    for (vcpu, fd) in (0u8..).zip(&parts.vcpus) {
        let list = cpuid::for_vcpu(
            &parts.kvm.cpuid,
            CpuModel::Host,
            vcpu,
            vcpus,
            parts.kvm.has_tsc_deadline(),
        );
        fd.set_cpuid2(&list).unwrap();
        let registers = UserRegisters {
            page_tables: PAGE_TABLES,
            instruction: CODE,
            stack: STACK + 0x1000,
            arguments: [DATA, 0, 0, REPORT + u64::from(vcpu) * PAGE],
        };
        set(fd, &registers).unwrap();
        let mut sregs = fd.get_sregs().unwrap();
        sregs.cr4 |= CR4_OSXSAVE;
        fd.set_sregs(&sregs).unwrap();
        let mut xcrs = kvm_xcrs { nr_xcrs: 1, ..Default::default() };
        xcrs.xcrs[0].value = 7;
        fd.set_xcrs(&xcrs).unwrap();
        let registers = (fd.get_regs().unwrap(), sregs);
        copy_for_vcpu(&parts.vm.memory.vm_memory(), &registers, &[]).unwrap();
        set_late(fd);
        cpuids.push(list);
    }
    parts.start(cpuids, None).unwrap()
}

/// Runs a program on one vCPU until it reports; returns the microVM and the report.
fn run(sealed: &Sealed) -> (Microvm, u64) {
    let (host, reports) = host();
    let mut microvm = prepare(sealed, 1, host);
    let copied_ahead = microvm.chunk_copies();
    // The chunk of the page tables, and the chunk of the stack, which contains a descriptor table.
    assert_eq!((copied_ahead.write_faults, copied_ahead.chunks), (0, 2));
    microvm.resume().unwrap();
    let report = reports.recv_timeout(Duration::from_secs(20));
    microvm.pause().unwrap();
    let report = report.unwrap_or_else(|_| panic!("{:?}", microvm.take_end()));
    (microvm, report.1)
}

/// Runs a program twice in sequence on the same sealed bytes, and checks its report and the number
/// of its copies.
fn check(code: &[u8], report: u64, chunks: u64) {
    let sealed = sealed(code);
    for _ in 0..2 {
        let (microvm, reported) = run(&sealed);
        assert_eq!(reported, report);
        let writes = microvm.chunk_copies();
        // Printed by --nocapture, for docs/concepts/devdax-sharing.md.
        println!("{} ns for each of {} copies", writes.ns / writes.chunks, writes.chunks);
        assert_eq!(writes.chunks, 2 + chunks, "{writes:?}");
        assert!((1..=2 * chunks + 2).contains(&writes.write_faults), "{writes:?}");
        assert_eq!(microvm.memory_usage().unwrap().private, (2 + chunks) * CHUNK);
        drop(microvm);
        sealed.check();
    }
}

#[test]
fn plain_stores_write_to_copies() {
    check(&firn_cow_plain(), 5, 3);
}

#[test]
fn vector_stores_write_to_copies() {
    check(&firn_cow_vector(), u64::MAX, 3);
}

#[test]
fn xsave_and_fxsave_write_to_copies() {
    check(&firn_cow_xsave(), u64::MAX, 2);
}

#[test]
fn locked_stores_write_to_copies() {
    check(&firn_cow_locked(), 5 + 7 + 9, 4);
}

#[test]
fn stores_across_pages_and_chunks_write_to_copies() {
    check(&firn_cow_straddling(), 0x1122_3344_5566_7788, 4);
}

#[test]
fn repeated_stores_across_chunks_write_to_copies() {
    check(&firn_cow_repeated(), 0x5a5a_5a5a_5a5a_5a5a, 4);
}

#[test]
fn pushes_and_calls_write_to_copies() {
    check(&firn_cow_stack(), 42, 1);
}

/// The second page of the code is not the physically next page, and the physically next page has
/// bytes with which the same instruction writes to a chunk that is already copied.
#[test]
fn an_instruction_across_pages_is_fetched_by_its_linear_address() {
    let at = |address: u64| usize::try_from(address).unwrap();
    let mut image = vec![0; at(MEMORY)];
    page_tables(&mut image);
    let mut put = |address: u64, bytes: &[u8]| {
        image[at(address)..at(address) + bytes.len()].copy_from_slice(bytes);
    };
    let (second, physical) = (CODE + PAGE, CODE + 3 * PAGE);
    let leaves = PAGE_TABLES + 4 * PAGE;
    let leaf = leaves + CODE / CHUNK * PAGE + 8 * (second / PAGE % 512);
    put(leaf, &(physical | PRESENT_WRITABLE_USER).to_le_bytes());
    // jmp to 3 bytes before the second page, then mov dword ptr [rdi + 0x200000], 5
    put(CODE, &[0xe9, 0xf8, 0x0f, 0, 0]);
    put(second - 3, &[0xc7, 0x87, 0]);
    put(physical, &[0, 0x20, 0, 5, 0, 0, 0]);
    // mov eax, [rdi + 0x200000]; mov [rcx], rax; jmp back to the last one
    put(physical + 7, &[0x8b, 0x87, 0, 0, 0x20, 0, 0x48, 0x89, 0x01, 0xeb, 0xfb]);
    // mov dword ptr [rdi - DATA], 5
    put(second, &[0, 0xa0, 0xff, 5, 0, 0, 0]);
    let sealed = Sealed::new(image);
    let (microvm, report) = run(&sealed);
    assert_eq!(report, 5);
    assert_eq!(microvm.chunk_copies().chunks, 2 + 1);
    drop(microvm);
    sealed.check();
}

#[test]
fn two_vcpus_increment_one_counter() {
    let sealed = sealed(&firn_cow_counter());
    for _ in 0..5 {
        let (host, reports) = host();
        let mut microvm = prepare(&sealed, 2, host);
        microvm.resume().unwrap();
        let mut done = [false; 2];
        while done != [true; 2] {
            let (vcpu, _) = reports.recv_timeout(Duration::from_secs(20)).unwrap();
            done[usize::try_from(vcpu).unwrap()] = true;
        }
        microvm.pause().unwrap();
        let sum: u64 = microvm.memory().vm_memory().read_obj(GuestAddress(DATA)).unwrap();
        assert_eq!(sum, 400_000);
        assert_eq!(microvm.chunk_copies().chunks, 3);
        drop(microvm);
        sealed.check();
    }
}

/// The MSRs with which a guest registers a page that KVM writes
/// (`Documentation/virt/kvm/x86/msr.rst`), and the bit that enables it.
const KVM_PAGES: [(u32, u64); 5] = [
    // Wall clock, system time, asynchronous page faults, steal time, end of interrupt
    (0x4b56_4d00, 0),
    (0x4b56_4d01, 1),
    (0x4b56_4d02, 1),
    (0x4b56_4d03, 1),
    (0x4b56_4d04, 1),
];

#[test]
fn pages_that_kvm_writes_may_be_registered_after_the_start() {
    let sealed = sealed(&firn_cow_plain());
    // Chunks that the guest writes, and one that it does not.
    for chunk in [DATA, DATA + CHUNK, DATA + 3 * CHUNK] {
        let (host, reports) = host();
        // As if the guest set the MSRs after the resume: nothing is copied ahead for them.
        let mut microvm = prepare_with(&sealed, 1, host, |fd| {
            let accepted = KVM_PAGES.into_iter().zip(1..).filter(|((index, enabled), place)| {
                let data = (chunk + PAGE * place) | enabled;
                let msr = kvm_msr_entry { index: *index, data, ..Default::default() };
                // A host may lack an MSR. It must accept a sealed page for every MSR that it
                // supports.
                fd.set_msrs(&Msrs::from_entries(&[msr]).unwrap()).unwrap() == 1
            });
            assert!(accepted.count() >= 2);
        });
        microvm.resume().unwrap();
        let report = reports.recv_timeout(Duration::from_secs(20));
        // KVM writes its clocks and the steal time when a vCPU is loaded again.
        for _ in 0..3 {
            microvm.pause().unwrap();
            microvm.resume().unwrap();
        }
        microvm.pause().unwrap();
        let report = report.unwrap_or_else(|_| panic!("{:?}", microvm.take_end()));
        assert_eq!(report.1, 5);
        assert_eq!(microvm.chunk_copies().chunks, 2 + 3);
        drop(microvm);
        sealed.check();
    }
}

#[test]
fn a_write_fault_that_cannot_be_resolved_ends_the_microvm_with_a_report() {
    let sealed = sealed(&firn_cow_plain());
    let (host, _reports) = host();
    let mut microvm = prepare(&sealed, 1, host);
    // The host write-protects a page that is no longer sealed.
    let view = microvm.memory().vm_memory();
    view.write_obj(0_u8, GuestAddress(DATA)).unwrap();
    let page = microvm.memory().slots()[0].host_addr + DATA;
    let page = std::ptr::without_provenance_mut(usize::try_from(page).unwrap());
    // SAFETY: the page is guest memory, and no reference to it exists.
    assert_eq!(unsafe { libc::mprotect(page, 4096, libc::PROT_READ) }, 0);
    microvm.resume().unwrap();
    let End::Failure(failure @ VcpuFailure::WriteFault { vcpu: 0, rip: CODE, .. }) =
        microvm.run().unwrap()
    else {
        panic!("the guest continued");
    };
    let report = failure.to_string();
    assert!(report.contains("0x200000 (bytes c6 07 01 48"), "{report}");
    drop(view);
    drop(microvm);
    sealed.check();
}
