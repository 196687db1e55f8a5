//! A guest in ring 3 runs natively on any KVM, with hardware or software page tables. It reads all
//! its pages in rounds and reports their sum: the sequence continues without a gap over freezes and
//! thaws.

use std::arch::global_asm;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use kvm_bindings::KVM_CLOCK_REALTIME;
use uuid::Uuid;
use vm_memory::{Bytes, GuestAddress};

use firn_memory::planners::{self, parse};
use firn_memory::{GuestMemory, GuestView, Sources, execute, execute_in};
use firn_snapshot::{Destination, FreezeReport, FreezeRequest, MemoryLayout, NotFrozen, Snapshot};

use super::{
    End, FreezeError, FrozenMachine, Microvm, RestoreError, Shape, Standby, UserRegisters,
};
use crate::bus::MmioDevice;
use crate::config::{HostConfig, MmioWindow};
use crate::kvm::{KVM_DEVICE, OpenKvm};

/// Guest-physical addresses, identical to the virtual ones.
const CODE: u64 = 0x20_0000;
const PAGE_TABLES: u64 = 0x30_0000;
const DATA: u64 = 0x40_0000;
const DATA_PAGES: u64 = 512;
pub(super) const REPORT: u64 = 0xd800_0000;
const PAGE: u64 = 4096;

const PRESENT_WRITABLE_USER: u64 = 0b111;
const HUGE: u64 = 1 << 7;

// rdi: first page, rsi: number of pages, rcx: address of the report, r8: round.
global_asm!(
    ".globl firn_test_guest",
    ".globl firn_test_guest_end",
    "firn_test_guest:",
    "xor eax, eax",
    "mov rdx, rdi",
    "mov rbx, rsi",
    "2: add rax, [rdx]",
    "add rdx, 4096",
    "dec rbx",
    "jnz 2b",
    "add rax, r8",
    "inc qword ptr [rdi]",
    "mov [rcx], rax",
    "inc r8",
    "jmp firn_test_guest",
    "firn_test_guest_end:",
);

unsafe extern "C" {
    static firn_test_guest: u8;
    static firn_test_guest_end: u8;
}

fn guest_code() -> Vec<u8> {
    let (start, end) = (&raw const firn_test_guest, &raw const firn_test_guest_end);
    let len = end.addr() - start.addr();
    // SAFETY: the labels enclose the instructions above, which are constant data of this program.
    unsafe { std::slice::from_raw_parts(start, len) }.to_vec()
}

struct Reports(Sender<(u64, u64)>);

impl MmioDevice for Reports {
    fn read(&mut self, _: u64, _: &mut [u8]) {}

    fn write(&mut self, offset: u64, data: &[u8]) {
        let value = u64::from_le_bytes(data.try_into().unwrap());
        // The receiver may be dropped before the guest stops.
        let _ = self.0.send((offset / PAGE, value));
    }
}

pub(super) fn host() -> (HostConfig, Receiver<(u64, u64)>) {
    let (sender, receiver) = channel();
    let host = HostConfig {
        generation: Some(Uuid::new_v4()),
        windows: vec![MmioWindow {
            start: REPORT,
            len: 4 * PAGE,
            device: Box::new(Reports(sender)),
        }],
        ..HostConfig::default()
    };
    (host, receiver)
}

/// Maps the first 4 MiB and the reports at 2 MiB leaves, `DATA` at 4 KiB, all for ring 3.
fn write_page_tables(memory: &GuestView) {
    let entry = |table: u64, index: u64, value: u64| {
        memory.write_obj(value, GuestAddress(table + index * 8)).unwrap();
    };
    let (pml4, pdpt) = (PAGE_TABLES, PAGE_TABLES + PAGE);
    let (low, high, leaves) = (pdpt + PAGE, pdpt + 2 * PAGE, pdpt + 3 * PAGE);
    entry(pml4, 0, pdpt | PRESENT_WRITABLE_USER);
    entry(pdpt, 0, low | PRESENT_WRITABLE_USER);
    entry(pdpt, REPORT >> 30, high | PRESENT_WRITABLE_USER);
    for index in 0..DATA >> 21 {
        entry(low, index, index << 21 | PRESENT_WRITABLE_USER | HUGE);
    }
    entry(low, DATA >> 21, leaves | PRESENT_WRITABLE_USER);
    for page in 0..DATA_PAGES {
        entry(leaves, page, (DATA + page * PAGE) | PRESENT_WRITABLE_USER);
    }
    entry(high, REPORT >> 21 & 511, REPORT | PRESENT_WRITABLE_USER | HUGE);
}

/// The initial value of a page's first word.
fn word(page: u64) -> u64 {
    page.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// The share of the data that a vCPU reads.
fn share(vcpu: u8, vcpus: u8) -> std::ops::Range<u64> {
    let pages = DATA_PAGES / u64::from(vcpus);
    u64::from(vcpu) * pages..(u64::from(vcpu) + 1) * pages
}

/// What vCPU `vcpu` reports in a round: each round increments the first word of its first page.
fn expected(vcpu: u8, vcpus: u8, round: u64) -> u64 {
    let sum = share(vcpu, vcpus).fold(0u64, |sum, page| sum.wrapping_add(word(page)));
    sum.wrapping_add(2 * round)
}

fn kvm() -> OpenKvm {
    OpenKvm::open(KVM_DEVICE.as_ref()).unwrap()
}

pub(super) fn boot(host: HostConfig, vcpus: u8, memory: u64) -> Microvm {
    let memory = GuestMemory::anonymous(MemoryLayout::for_size(memory).unwrap()).unwrap();
    let guest = memory.vm_memory();
    write_page_tables(&guest);
    guest.write_slice(&guest_code(), GuestAddress(CODE)).unwrap();
    for page in 0..DATA_PAGES {
        guest.write_obj(word(page), GuestAddress(DATA + page * PAGE)).unwrap();
    }
    drop(guest);
    let registers = |vcpu| {
        let share = share(vcpu, vcpus);
        UserRegisters {
            page_tables: PAGE_TABLES,
            instruction: CODE,
            stack: 0,
            arguments: [
                DATA + share.start * PAGE,
                share.end - share.start,
                0,
                REPORT + u64::from(vcpu) * PAGE,
            ],
        }
    };
    let registers: Vec<_> = (0..vcpus).map(registers).collect();
    Microvm::prepare(memory, &registers, kvm(), host).unwrap()
}

fn thaw(snapshot: &Snapshot, planner: &str, host: HostConfig) -> Microvm {
    let plan = planners::plan(snapshot, None, &*parse(planner).unwrap()).unwrap();
    let executed = execute(&plan, &Sources::of(snapshot, None).unwrap()).unwrap();
    let frozen = FrozenMachine::open_on(snapshot, kvm()).unwrap();
    Microvm::restore(frozen, executed.memory, host).unwrap().0
}

/// Checks the next `each` reports of every vCPU, and updates their rounds.
pub(super) fn follow(reports: &Receiver<(u64, u64)>, vcpus: u8, rounds: &mut [u64], each: u64) {
    let goal: Vec<u64> = rounds.iter().map(|round| round + each).collect();
    while rounds.iter().zip(&goal).any(|(round, goal)| round < goal) {
        let (vcpu, value) = reports.recv_timeout(Duration::from_secs(60)).unwrap();
        check(vcpu, value, vcpus, rounds);
    }
}

pub(super) fn check(vcpu: u64, value: u64, vcpus: u8, rounds: &mut [u64]) {
    let vcpu = u8::try_from(vcpu).unwrap();
    let round = &mut rounds[usize::from(vcpu)];
    assert_eq!(value, expected(vcpu, vcpus, *round), "vCPU {vcpu} in round {round}");
    *round += 1;
}

pub(super) fn to_directory(path: &Path) -> FreezeRequest {
    let destination = Destination::Directory(path.to_owned());
    FreezeRequest { destination, dense: false, function: None }
}

fn freeze(microvm: &mut Microvm, destination: &Path) -> FreezeReport {
    firn_snapshot::freeze(microvm, to_directory(destination)).unwrap()
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

pub(super) fn names(dir: &Path) -> BTreeSet<std::ffi::OsString> {
    std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect()
}

/// Boots, freezes while the guest runs, and thaws `times` times.
fn freeze_and_thaw(vcpus: u8, planners: &[&str], times: usize) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("snapshot");
    let mut frozen = vec![0; usize::from(vcpus)];
    {
        let (host, reports) = host();
        let mut microvm = boot(host, vcpus, 64 << 20);
        microvm.resume().unwrap();
        follow(&reports, vcpus, &mut frozen, 5);
        let report = freeze(&mut microvm, &path);
        // Reports up to the pause belong to the time before the freeze.
        for (vcpu, value) in reports.try_iter() {
            check(vcpu, value, vcpus, &mut frozen);
        }
        // Code, page tables, data and the generation id; zero pages are not stored.
        assert!(report.stored_pages < DATA_PAGES + 16, "{report:?}");
        assert_eq!(report.stored_pages + report.zero_pages, (64 << 20) / PAGE);
    }
    let before = names(dir.path());
    let snapshot = Snapshot::open(&path).unwrap();
    let files = open_files();
    for time in 0..times {
        let (host, reports) = host();
        let mut microvm = thaw(&snapshot, planners[time % planners.len()], host);
        microvm.resume().unwrap();
        let mut rounds = frozen.clone();
        follow(&reports, vcpus, &mut rounds, 20);
    }
    assert_eq!(open_files(), files);
    assert_eq!(names(dir.path()), before);
}

// It runs in its own process, because it counts the process's open files.
#[test]
fn fifty_thaws_continue_the_frozen_guest_and_leave_nothing_behind() {
    const ALONE: &str = "FIRN_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let name = "fifty_thaws_continue_the_frozen_guest_and_leave_nothing_behind";
        let run = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &format!("microvm::tests::{name}")])
            .env(ALONE, "1")
            .output()
            .unwrap();
        let output = String::from_utf8_lossy(&run.stdout);
        assert!(run.status.success() && output.contains("1 passed"), "{output}");
        return;
    }
    let planners = ["firecracker", "firecracker:readahead=off", "dram_cached"];
    freeze_and_thaw(1, &planners, 50);
    freeze_and_thaw(2, &planners, 6);
}

#[test]
fn a_standby_of_the_same_shape_becomes_the_microvm() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("snapshot");
    let mut rounds = [0; 2];
    {
        let (host, reports) = host();
        let mut microvm = boot(host, 2, 64 << 20);
        microvm.resume().unwrap();
        follow(&reports, 2, &mut rounds, 5);
        freeze(&mut microvm, &path);
        for (vcpu, value) in reports.try_iter() {
            check(vcpu, value, 2, &mut rounds);
        }
    }
    let snapshot = Snapshot::open(&path).unwrap();
    let plan = planners::plan(&snapshot, None, &*parse("firecracker").unwrap()).unwrap();
    let machine = FrozenMachine::open_on(&snapshot, kvm()).unwrap();
    let shape = machine.shape(plan.largest_leaf());
    let one_vcpu = Shape { cpuids: shape.cpuids[..1].to_vec(), ..shape.clone() };
    let larger = Shape { layout: MemoryLayout::for_size(128 << 20).unwrap(), ..shape.clone() };
    let mut other_cpu = shape.clone();
    other_cpu.cpuids[1].pop();
    let made = [
        (vec![], false),
        (vec![&shape], true),
        (vec![&one_vcpu], false),
        (vec![&larger], false),
        // Its CPUID is set again.
        (vec![&other_cpu], true),
        (vec![&larger, &shape], true),
        (vec![&shape, &larger], false),
    ];
    for ((shapes, fits), beside) in made.iter().flat_map(|made| [(made, false), (made, true)]) {
        let mut standby = Standby::from(kvm());
        for shape in shapes {
            standby.make(shape).unwrap();
        }
        let mut machine = FrozenMachine::open_on(&snapshot, standby).unwrap();
        if beside {
            machine.make_beside(plan.largest_leaf());
        }
        let reserved = machine.take_reservation();
        let sources = Sources::of(&snapshot, None).unwrap();
        let memory = execute_in(&plan, &sources, reserved).unwrap().memory;
        let is_ready = *fits || beside && shapes.is_empty();
        assert_eq!(machine.is_ready_for(&memory), is_ready, "{beside}, {shapes:?}");
        let (host, reports) = host();
        let (mut microvm, report) = Microvm::restore(machine, memory, host).unwrap();
        assert_eq!(report.standby, *fits, "{beside}, {shapes:?}");
        microvm.resume().unwrap();
        follow(&reports, 2, &mut rounds.clone(), 20);
    }
}

#[test]
fn a_thawed_microvm_can_be_frozen_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("snapshot");
    let mut rounds = [0];
    for generation in 0..4 {
        let (host, reports) = host();
        let snapshot = (generation > 0).then(|| Snapshot::open(&path).unwrap());
        let mut microvm = match &snapshot {
            None => boot(host, 1, 16 << 20),
            Some(snapshot) => thaw(snapshot, "firecracker", host),
        };
        microvm.resume().unwrap();
        follow(&reports, 1, &mut rounds, 3);
        // The snapshot that the microVM uses is replaced.
        freeze(&mut microvm, &path);
        for (vcpu, value) in reports.try_iter() {
            check(vcpu, value, 1, &mut rounds);
        }
        // The frozen microVM also continues.
        let mut own = rounds;
        microvm.resume().unwrap();
        follow(&reports, 1, &mut own, 3);
    }
    assert!(Snapshot::open(&path).unwrap().manifest().description.parent.is_some());
}

#[test]
fn other_threads_send_requests_to_a_running_microvm() {
    let (host, reports) = host();
    let mut microvm = boot(host, 1, 16 << 20);
    microvm.resume().unwrap();
    let handle = microvm.handle();
    let other = std::thread::spawn(move || {
        let stats = handle.call(|microvm| microvm.kvm_stats().unwrap()).unwrap();
        handle.call(Microvm::stop).unwrap();
        (handle, stats)
    });
    follow(&reports, 1, &mut [0], 3);
    assert!(matches!(microvm.run().unwrap(), End::Stopped));
    drop(microvm);
    let (handle, stats) = other.join().unwrap();
    assert!(stats.exits > 0);
    assert!(stats.page_faults > 0);
    assert!(handle.call(|_| ()).is_err());
}

/// An invalid instruction. The guest has no handler, so it triple-faults.
const UNDEFINED: [u8; 2] = [0x0f, 0x0b];

#[test]
fn a_guest_that_has_ended_is_not_frozen() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _reports) = host();
    let mut microvm = boot(host, 1, 16 << 20);
    microvm.memory().vm_memory().write_slice(&UNDEFINED, GuestAddress(CODE)).unwrap();
    microvm.resume().unwrap();
    while !microvm.has_ended() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let before = names(dir.path());
    let error = firn_snapshot::freeze(&mut microvm, to_directory(&dir.path().join("snapshot")));
    let error = error.unwrap_err().source;
    assert!(matches!(error, NotFrozen::Machine(FreezeError::Ended)), "{error:?}");
    assert_eq!(names(dir.path()), before);
    assert!(matches!(microvm.run().unwrap(), End::TripleFault));
}

/// The vCPUs' threads may not have started yet when they are paused.
#[test]
fn a_microvm_can_be_paused_and_dropped_right_after_its_start() {
    for _ in 0..20 {
        let mut microvm = boot(host().0, 2, 16 << 20);
        microvm.resume().unwrap();
        microvm.pause().unwrap();
        microvm.resume().unwrap();
    }
    let (host, reports) = host();
    let mut microvm = boot(host, 2, 16 << 20);
    microvm.resume().unwrap();
    microvm.pause().unwrap();
    microvm.resume().unwrap();
    follow(&reports, 2, &mut [0, 0], 3);
}

/// Whether KVM gives vCPUs the time-stamp counters that are set. Without hardware virtualisation a
/// guest reads the processor's own.
fn kvm_sets_counters() -> bool {
    const FAR: u64 = 1 << 60;
    let vm = kvm_ioctls::Kvm::new().unwrap().create_vm().unwrap();
    let vcpu = vm.create_vcpu(0).unwrap();
    let entry = kvm_bindings::kvm_msr_entry { index: 0x10, data: FAR, ..Default::default() };
    let mut msrs = kvm_bindings::Msrs::from_entries(&[entry]).unwrap();
    assert_eq!(vcpu.set_msrs(&msrs).unwrap(), 1);
    assert_eq!(vcpu.get_msrs(&mut msrs).unwrap(), 1);
    msrs.as_slice()[0].data >= FAR
}

#[test]
fn a_held_machine_finds_the_time_of_the_freeze_when_it_is_released() {
    const MSR_TSC: u32 = 0x10;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("snapshot");
    let mut rounds = [0; 2];
    {
        let (host, reports) = host();
        let mut microvm = boot(host, 2, 64 << 20);
        microvm.resume().unwrap();
        follow(&reports, 2, &mut rounds, 5);
        freeze(&mut microvm, &path);
        for (vcpu, value) in reports.try_iter() {
            check(vcpu, value, 2, &mut rounds);
        }
    }
    let snapshot = Snapshot::open(&path).unwrap();
    let plan = planners::plan(&snapshot, None, &*parse("firecracker").unwrap()).unwrap();
    let executed = execute(&plan, &Sources::of(&snapshot, None).unwrap()).unwrap();
    let mut frozen = FrozenMachine::open_on(&snapshot, kvm()).unwrap();
    frozen.hold();
    let tsc = |msrs: &[kvm_bindings::kvm_msr_entry]| {
        msrs.iter().find(|msr| msr.index == MSR_TSC).unwrap().data
    };
    let frozen_tsc: Vec<u64> = frozen.state.vcpus.iter().map(|vcpu| tsc(&vcpu.msrs)).collect();
    let frozen_clock = frozen.state.vm.clock.clock;
    let khz = frozen.tsc_khz();
    let (host, reports) = host();
    let (mut microvm, _) = Microvm::restore(frozen, executed.memory, host).unwrap();
    let written = |microvm: &Microvm| {
        let memory = microvm.memory().vm_memory();
        memory.read_obj::<u128>(GuestAddress(crate::arch::layout::GENERATION_ID)).unwrap()
    };
    let before = written(&microvm);
    // It waits for longer than what follows.
    std::thread::sleep(Duration::from_millis(300));
    let generation = Uuid::new_v4();
    let begin = std::time::Instant::now();
    microvm.release(Some(generation)).unwrap();
    let clock = microvm.vm.fd.get_clock().unwrap().clock;
    let states = microvm.vcpus.iter().map(|vcpu| vcpu.save(&[MSR_TSC].into(), 4096));
    let states: Vec<_> = states.map(|state| state.unwrap().unwrap()).collect();
    let passed = begin.elapsed();
    assert!(clock >= frozen_clock, "{clock} {frozen_clock}");
    assert!(u128::from(clock - frozen_clock) <= passed.as_nanos(), "{clock} {frozen_clock}");
    for (state, frozen) in states.iter().zip(frozen_tsc).filter(|_| kvm_sets_counters()) {
        let ticks = u128::from(tsc(&state.msrs) - frozen);
        // A thousandth more, because the frequency is a measurement.
        let at_most = passed.as_nanos() * u128::from(khz) * 1001 / 1_000_000_000;
        assert!(ticks <= at_most, "{ticks} ticks in {passed:?}");
    }
    assert_ne!(before, written(&microvm));
    assert_eq!(written(&microvm).to_le_bytes(), *generation.as_bytes());
    // The second time it does nothing.
    microvm.release(Some(Uuid::new_v4())).unwrap();
    assert_eq!(written(&microvm).to_le_bytes(), *generation.as_bytes());
    microvm.resume().unwrap();
    follow(&reports, 2, &mut rounds, 20);
}

#[test]
fn the_clock_advances_by_the_time_since_the_freeze_if_it_shall() {
    const WAIT: Duration = Duration::from_millis(300);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("snapshot");
    freeze(&mut boot(host().0, 1, 64 << 20), &path);
    let snapshot = Snapshot::open(&path).unwrap();
    let plan = planners::plan(&snapshot, None, &*parse("firecracker").unwrap()).unwrap();
    std::thread::sleep(WAIT);
    let restored = |advance_clock, has_wall_clock: bool| {
        let executed = execute(&plan, &Sources::of(&snapshot, None).unwrap()).unwrap();
        let mut frozen = FrozenMachine::open_on(&snapshot, kvm()).unwrap();
        let clock = &mut frozen.state.vm.clock;
        let saved = clock.clock;
        if !has_wall_clock {
            clock.flags = 0;
        } else if clock.flags & KVM_CLOCK_REALTIME == 0 {
            return None;
        }
        let host = HostConfig { advance_clock, ..host().0 };
        let restored = Microvm::restore(frozen, executed.memory, host).map(|(microvm, _)| microvm);
        Some(restored.map(|microvm| microvm.vm.fd.get_clock().unwrap().clock - saved))
    };
    assert!(matches!(restored(true, false), Some(Err(RestoreError::NoWallClock))));
    // This host may not save it.
    if let Some(advanced) = restored(true, true) {
        assert!(u128::from(advanced.unwrap()) >= WAIT.as_nanos());
    }
}

#[test]
fn a_paused_guest_stands_still_and_finds_out_that_it_was_stopped() {
    const MSR_KVM_SYSTEM_TIME: u32 = 0x4b56_4d01;
    /// A page that the guest does not use, and the flags in it (`pvclock_vcpu_time_info`).
    const CLOCK: u64 = 0x70_0000;
    const FLAGS: GuestAddress = GuestAddress(CLOCK + 29);
    const GUEST_STOPPED: u8 = 1 << 1;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("snapshot");
    {
        let (host, _reports) = host();
        freeze(&mut boot(host, 1, 16 << 20), &path);
    }
    let snapshot = Snapshot::open(&path).unwrap();
    let plan = planners::plan(&snapshot, None, &*parse("firecracker").unwrap()).unwrap();
    let memory = execute(&plan, &Sources::of(&snapshot, None).unwrap()).unwrap().memory;
    let mut frozen = FrozenMachine::open_on(&snapshot, kvm()).unwrap();
    let msrs = &mut frozen.state.vcpus[0].msrs;
    msrs.retain(|msr| msr.index != MSR_KVM_SYSTEM_TIME);
    let (index, data) = (MSR_KVM_SYSTEM_TIME, CLOCK | 1);
    msrs.push(kvm_bindings::kvm_msr_entry { index, data, ..Default::default() });
    let (host, reports) = host();
    let mut microvm = Microvm::restore(frozen, memory, host).unwrap().0;
    let (handle, guest) = (microvm.handle(), microvm.memory().vm_memory());
    microvm.resume().unwrap();
    let run = std::thread::spawn(move || microvm.run().unwrap());
    let flags = || guest.read_obj::<u8>(FLAGS).unwrap();
    let mut rounds = [0];
    follow(&reports, 1, &mut rounds, 3);
    for _ in 0..2 {
        assert_eq!(flags() & GUEST_STOPPED, GUEST_STOPPED);
        handle.call(Microvm::pause).unwrap().unwrap();
        for (vcpu, value) in reports.try_iter() {
            check(vcpu, value, 1, &mut rounds);
        }
        guest.write_obj(flags() & !GUEST_STOPPED, FLAGS).unwrap();
        assert!(reports.recv_timeout(Duration::from_millis(20)).is_err());
        assert_eq!(flags() & GUEST_STOPPED, 0);
        // Without waiting, in this order.
        handle.post(|microvm| microvm.pause().unwrap()).unwrap();
        handle.post(|microvm| microvm.resume().unwrap()).unwrap();
        follow(&reports, 1, &mut rounds, 3);
    }
    handle.call(Microvm::stop).unwrap();
    assert!(matches!(run.join().unwrap(), End::Stopped));
}
