//! Who touches guest memory, seen from the vCPU: the recorder's [`Witness`] for a microVM of one vCPU.
//!
//! When the vCPU touches a page that is not there, its thread sleeps in KVM, the instruction not executed. The witness
//! interrupts it, has its registers read in its own thread, and looks for the page among what the instruction at its
//! instruction pointer touches: the instruction itself, its operands, the stack, the tables of the processor, and the
//! page tables on the way to each. A thread that cannot be interrupted is in a copy of KVM's own.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use firn_memory::Leaf;
use firn_memory::recorders::{Seen, Sighting, Witness};
use firn_memory::trace::Toucher;
use firn_snapshot::PAGE_SIZE;
use kvm_bindings::{kvm_regs, kvm_sregs};
use thiserror::Error;

use crate::guest_time::{GuestTime, GuestTimeError, GuestTimeTotals};
use crate::microvm::Microvm;
use crate::operands::{MAX_INSTRUCTION, Operand, operands};
use crate::paging::{PageTables, WalkEnd};
use crate::vcpu::VcpuThreadError;
use crate::vcpu::observer::{Observer, StoppedVcpu, VcpuThread};

/// How long a vCPU may take from the signal to its own code. One that KVM keeps longer waits in a copy of KVM's.
const STOP_LIMIT: Duration = Duration::from_millis(100);
/// Pages that are looked at of one operand.
const MOST_PAGES: u64 = 4;
/// Bytes of the stack, below its pointer, that the delivery of an interrupt or a call may write.
const STACK: u64 = 64;
/// Bytes of the instruction HLT.
const HLT: [u8; 1] = [0xf4];
/// Offsets in a 64-bit task state segment: the stack pointer of ring 0, and the first of seven interrupt stacks.
const RSP0: u64 = 4;
const IST1: u64 = 36;

/// Why a microVM cannot be watched.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WatchError {
    /// The vCPU's thread is gone.
    #[error(transparent)]
    Thread(#[from] VcpuThreadError),
    /// The order of touches is that of one vCPU.
    #[error("a microVM of {0} vCPUs cannot be watched: freeze the function on one vCPU")]
    Vcpus(usize),
    /// What the guest works cannot be measured.
    #[error(transparent)]
    GuestTime(#[from] GuestTimeError),
    /// The vCPU's registers cannot be read.
    #[error("reading the registers of the vCPU")]
    Registers(#[from] kvm_ioctls::Error),
}

type Registers = (kvm_regs, kvm_sregs);

/// Where the vCPU's thread is, as far as the witness has brought it.
#[derive(Default)]
enum Stop {
    /// On its way; nobody asks.
    #[default]
    None,
    /// It is to stop.
    Wanted,
    /// It stands, at these registers.
    Stands(Box<Registers>),
}

#[derive(Default)]
struct State {
    stop: Stop,
    thread: Option<VcpuThread>,
    time: Option<GuestTime>,
    tables: Option<PageTables>,
    failed: Option<WatchError>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Observer for Shared {
    fn interrupted(&self, vcpu: &StoppedVcpu<'_>) {
        let mut state = self.lock();
        if !matches!(state.stop, Stop::Wanted) {
            return;
        }
        match vcpu.registers() {
            Ok(registers) => state.stop = Stop::Stands(Box::new(registers)),
            Err(error) => {
                state.failed.get_or_insert(error.into());
                state.stop = Stop::None;
            }
        }
        self.changed.notify_all();
        while matches!(state.stop, Stop::Stands(_)) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// The witness of a microVM with one vCPU. Until [`Watch::attach`] every touch is the monitor's.
pub struct VcpuWitness {
    shared: Arc<Shared>,
}

/// The other end of a [`VcpuWitness`]: joins it to a microVM, and tells what it measured.
pub struct Watch {
    shared: Arc<Shared>,
}

/// A witness, to be given to the recorder, and what joins it to the microVM.
#[must_use]
pub fn witness() -> (VcpuWitness, Watch) {
    let shared = Arc::new(Shared::default());
    (VcpuWitness { shared: shared.clone() }, Watch { shared })
}

impl Watch {
    /// Watches the vCPU of a microVM that does not run yet, and measures what it works.
    ///
    /// # Errors
    /// See [`WatchError`].
    pub fn attach(&self, microvm: &mut Microvm) -> Result<(), WatchError> {
        let observer: Arc<dyn Observer> = self.shared.clone();
        let threads = microvm.observe(&observer)?;
        let [thread] = threads[..] else { return Err(WatchError::Vcpus(threads.len())) };
        let time = GuestTime::of_thread(thread.id())?;
        let mut state = self.shared.lock();
        state.thread = Some(thread);
        state.time = Some(time);
        Ok(())
    }

    /// What the vCPU worked in all, up to the last touch.
    ///
    /// # Errors
    /// What went wrong meanwhile: the gaps or leaves of the recording are wrong then.
    pub fn finish(self) -> Result<GuestTimeTotals, WatchError> {
        let mut state = self.shared.lock();
        match state.failed.take() {
            Some(error) => Err(error),
            None => Ok(state.time.as_ref().map(GuestTime::totals).unwrap_or_default()),
        }
    }
}

impl Witness for VcpuWitness {
    fn look(&mut self, page: u64, thread: u32, seen: &Seen<'_>) -> Sighting {
        let mut state = self.shared.lock();
        let mut sighting = Sighting { by: Toucher::Device, leaf: None, gap: 0 };
        if let Some(vcpu) = state.thread.filter(|vcpu| vcpu.id() == thread) {
            state.stop = Stop::Wanted;
            vcpu.interrupt();
            let begin = Instant::now();
            while matches!(state.stop, Stop::Wanted) {
                let Some(rest) = STOP_LIMIT.checked_sub(begin.elapsed()) else { break };
                let waited = self.shared.changed.wait_timeout(state, rest);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
            let stands = match &state.stop {
                Stop::Stands(registers) => Some(registers.clone()),
                _ => None,
            };
            if let Some(registers) = stands {
                (sighting.by, sighting.leaf) = toucher(page, &registers, seen);
                state.tables = PageTables::of(&registers.1);
            } else {
                state.stop = Stop::None;
            }
        }
        let State { time, tables, failed, .. } = &mut *state;
        if let Some(time) = time {
            match time.take(|rip| tables.is_some_and(|tables| halted(rip, tables, seen))) {
                Ok(gap) => sighting.gap = gap,
                Err(error) => drop(failed.get_or_insert(error.into())),
            }
        }
        sighting
    }

    fn release(&mut self) {
        self.shared.lock().stop = Stop::None;
        self.shared.changed.notify_all();
    }
}

impl Drop for VcpuWitness {
    fn drop(&mut self) {
        self.release();
    }
}

/// Who touches a page, of all that the vCPU is about to do, and through which leaf.
fn toucher(page: u64, registers: &Registers, seen: &Seen<'_>) -> (Toucher, Option<Leaf>) {
    let unknown = (Toucher::Instruction, None);
    let Some(tables) = PageTables::of(&registers.1) else { return unknown };
    let instruction = of_instruction(registers, tables, seen);
    find(page, instruction, tables, seen)
        .or_else(|| find(page, of_delivery(registers, tables, seen), tables, seen))
        .map_or(unknown, |(toucher, leaf)| (toucher, Some(leaf)))
}

/// Looks for a page among those at linear addresses, and then among the tables on the way to them.
fn find(
    page: u64,
    addresses: Vec<u64>,
    tables: PageTables,
    seen: &Seen<'_>,
) -> Option<(Toucher, Leaf)> {
    let mut walked = None;
    for address in addresses {
        let walk = tables.walk(address, |address| seen.read(address).map(u64::from_le_bytes));
        match walk.end {
            WalkEnd::Mapped { address, leaf } if address / PAGE_SIZE == page => {
                return Some((Toucher::Instruction, leaf));
            }
            _ if walk.tables().iter().any(|table| table / PAGE_SIZE == page) => {
                walked = Some((Toucher::Walk, Leaf::Size4K));
            }
            _ => {}
        }
    }
    walked
}

/// Linear addresses that the instruction at the vCPU's instruction pointer touches: its own, its operands', the stack's.
fn of_instruction(registers: &Registers, tables: PageTables, seen: &Seen<'_>) -> Vec<u64> {
    let (regs, sregs) = registers;
    let mut found = vec![regs.rip, regs.rip.wrapping_add(MAX_INSTRUCTION as u64 - 1)];
    for Operand { address, len, .. } in operands(&code(regs.rip, tables, seen), regs, sregs) {
        let pages = (0..MOST_PAGES).map(|page| page * PAGE_SIZE).take_while(|from| *from < len);
        found.extend(pages.map(|from| address.wrapping_add(from)));
        found.push(address.wrapping_add(len - 1));
    }
    found
}

/// Linear addresses that the delivery of an interrupt or an exception touches: descriptor tables, task state, stacks.
fn of_delivery(registers: &Registers, tables: PageTables, seen: &Seen<'_>) -> Vec<u64> {
    let (regs, sregs) = registers;
    let mut found = vec![regs.rsp.wrapping_sub(STACK), regs.rsp.wrapping_sub(8), regs.rsp];
    for table in [&sregs.idt, &sregs.gdt] {
        found.extend([table.base, table.base.wrapping_add(table.limit.into())]);
    }
    let task = sregs.tr.base;
    found.extend([task, task.wrapping_add(sregs.tr.limit.into())]);
    for offset in (0..8).map(|stack| if stack == 0 { RSP0 } else { IST1 + 8 * (stack - 1) }) {
        let stack = read_linear(task.wrapping_add(offset), tables, seen).map(u64::from_le_bytes);
        found.extend(stack.map(|stack| stack.wrapping_sub(8)));
    }
    found
}

/// The bytes of the instruction at an address; fewer where they go on in a page that is not there.
fn code(rip: u64, tables: PageTables, seen: &Seen<'_>) -> Vec<u8> {
    if let Some(bytes) = read_linear::<MAX_INSTRUCTION>(rip, tables, seen) {
        return bytes.into();
    }
    let bytes = (0..MAX_INSTRUCTION as u64)
        .map_while(|at| read_linear(rip.wrapping_add(at), tables, seen).map(|[byte]| byte));
    bytes.collect()
}

/// Whether a vCPU that stands at an address halted there: the instruction before it is HLT.
fn halted(rip: u64, tables: PageTables, seen: &Seen<'_>) -> bool {
    read_linear(rip.wrapping_sub(1), tables, seen) == Some(HLT)
}

/// Reads bytes at a linear address, where they lie in one page that was touched.
fn read_linear<const N: usize>(
    linear: u64,
    tables: PageTables,
    seen: &Seen<'_>,
) -> Option<[u8; N]> {
    let walk = tables.walk(linear, |address| seen.read(address).map(u64::from_le_bytes));
    let WalkEnd::Mapped { address, .. } = walk.end else { return None };
    seen.read(address)
}
