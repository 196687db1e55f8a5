//! Attribution of faults on guest memory, for a microVM with one vCPU: whether the guest's
//! instruction, the processor's page walk or a device accesses the missing page.
//!
//! When the vCPU accesses a page that is not present, its thread sleeps in KVM with the instruction
//! not executed. [`FaultAttribution`] interrupts the thread, reads the registers in it, and
//! searches for the page among what the next instruction accesses: its own bytes, its operands, the
//! stack, the processor's tables, and the page tables on the way to each. A thread that cannot be
//! interrupted is in a copy operation of KVM.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_base::PAGE_SIZE;
use firn_memory::Leaf;
use firn_memory::recorders::{FaultObserver, FaultOrigin, TouchedPages};
use firn_memory::trace::Toucher;
use parking_lot::{Condvar, Mutex, MutexGuard};
use thiserror::Error;

use super::guest_time::{GuestTime, GuestTimeError, GuestTimeTotals, TracepointFormat};
use crate::access::{
    PageTables, PhysicalMemory, Registers, WalkEnd, accessed_by_delivery, accessed_by_instruction,
};
use crate::microvm::Microvm;
use crate::vcpu::VcpuThreadError;
use crate::vcpu::observer::{Observer, StoppedVcpu, VcpuThread};

/// Time that a vCPU may take from the signal to its observer. A vCPU that takes longer waits in a
/// copy operation of KVM.
const STOP_LIMIT: Duration = Duration::from_millis(100);
/// Bytes of the instruction HLT.
const HLT: [u8; 1] = [0xf4];

/// Why faults of a microVM cannot be attributed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AttributionError {
    /// The vCPU's thread ended.
    #[error(transparent)]
    Thread(#[from] VcpuThreadError),
    /// Only the faults of a single vCPU have an order.
    #[error("cannot attribute faults of a microVM with {0} vCPUs: freeze the function on one vCPU")]
    Vcpus(usize),
    /// The vCPU's time in guest mode cannot be measured.
    #[error(transparent)]
    GuestTime(#[from] GuestTimeError),
    /// The vCPU's registers cannot be read.
    #[error("cannot read the registers of the vCPU")]
    Registers(#[from] kvm_ioctls::Error),
}

/// The vCPU's thread, as far as this module stops it.
#[derive(Default)]
enum Stop {
    /// The thread runs.
    #[default]
    None,
    /// A stop of the thread is requested.
    Requested,
    /// The thread is stopped with these registers.
    Stopped(Box<Registers>),
}

#[derive(Default)]
struct State {
    stop: Stop,
    thread: Option<VcpuThread>,
    time: Option<GuestTime>,
    tables: Option<PageTables>,
    /// By page, the instruction that touched it first.
    instructions: HashMap<u64, u64>,
    error: Option<AttributionError>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Observer for Shared {
    fn interrupted(&self, vcpu: &StoppedVcpu<'_>) {
        let mut state = self.state.lock();
        if !matches!(state.stop, Stop::Requested) {
            return;
        }
        match vcpu.registers() {
            Ok(registers) => state.stop = Stop::Stopped(Box::new(registers)),
            Err(error) => {
                state.error.get_or_insert(error.into());
                state.stop = Stop::None;
            }
        }
        self.changed.notify_all();
        self.changed.wait_while(&mut state, |state| matches!(state.stop, Stop::Stopped(_)));
    }
}

/// Attributes the faults of a microVM with one vCPU. Until [`AttributionControl::attach`] every
/// fault is attributed to the monitor.
pub struct FaultAttribution {
    shared: Arc<Shared>,
}

/// Controls a [`FaultAttribution`] that a recorder owns.
pub struct AttributionControl {
    shared: Arc<Shared>,
}

/// A [`FaultAttribution`] for the recorder, and the control that attaches it to a microVM.
#[must_use]
pub fn fault_attribution() -> (FaultAttribution, AttributionControl) {
    let shared = Arc::new(Shared::default());
    (FaultAttribution { shared: shared.clone() }, AttributionControl { shared })
}

impl AttributionControl {
    /// Observes the vCPU of a microVM that does not run yet, and measures its time in guest mode.
    /// `tracepoints` returns those of a thread of this process
    /// ([`Tracepoints`](super::Tracepoints)), open.
    ///
    /// # Errors
    /// See [`AttributionError`]; or that of `tracepoints`.
    pub fn attach<E: From<AttributionError>>(
        &self,
        microvm: &mut Microvm,
        tracepoints: impl FnOnce(u32) -> Result<(TracepointFormat, [OwnedFd; 2]), E>,
    ) -> Result<(), E> {
        let observer: Arc<dyn Observer> = self.shared.clone();
        let threads = microvm.observe(&observer).map_err(AttributionError::from)?;
        let [thread] = threads[..] else {
            return Err(AttributionError::Vcpus(threads.len()).into());
        };
        let (format, events) = tracepoints(thread.id())?;
        let time = GuestTime::new(format, events).map_err(AttributionError::from)?;
        let mut state = self.shared.state.lock();
        state.thread = Some(thread);
        state.time = Some(time);
        Ok(())
    }

    /// The vCPU's total time in guest mode, up to the last fault; and by guest page the linear
    /// address of the guest's instruction that touched it first, or was next when the processor
    /// did.
    ///
    /// # Errors
    /// The first error of the recording. Its gaps or leaves are wrong then.
    pub fn finish(self) -> Result<(GuestTimeTotals, HashMap<u64, u64>), AttributionError> {
        let mut state = self.shared.state.lock();
        match state.error.take() {
            Some(error) => Err(error),
            None => Ok((
                state.time.as_ref().map(GuestTime::totals).unwrap_or_default(),
                std::mem::take(&mut state.instructions),
            )),
        }
    }
}

impl FaultAttribution {
    /// Stops the vCPU before its next instruction, and returns its registers; `None` for a vCPU
    /// that does not stop.
    fn stop(&self, state: &mut MutexGuard<'_, State>, vcpu: VcpuThread) -> Option<Box<Registers>> {
        state.stop = Stop::Requested;
        vcpu.interrupt();
        let limit = Instant::now() + STOP_LIMIT;
        let requested = |state: &mut State| matches!(state.stop, Stop::Requested);
        self.shared.changed.wait_while_until(state, requested, limit);
        let Stop::Stopped(registers) = &state.stop else {
            state.stop = Stop::None;
            return None;
        };
        let registers = registers.clone();
        state.tables = PageTables::of(&registers.1);
        Some(registers)
    }
}

impl State {
    /// The guest's work since the last call.
    fn take_work(&mut self, seen: &TouchedPages<'_>) -> u64 {
        let Self { time, tables, error, .. } = self;
        let Some(time) = time else { return 0 };
        time.take(|rip| tables.is_some_and(|tables| halted(rip, tables, seen))).unwrap_or_else(
            |first| {
                error.get_or_insert(first.into());
                0
            },
        )
    }
}

impl FaultObserver for FaultAttribution {
    fn observe(&mut self, page: u64, thread: u32, seen: &TouchedPages<'_>) -> FaultOrigin {
        let mut state = self.shared.state.lock();
        let mut origin = FaultOrigin { by: Toucher::Device, leaf: None, gap: 0 };
        let vcpu = state.thread.filter(|vcpu| vcpu.id() == thread);
        if let Some(registers) = vcpu.and_then(|vcpu| self.stop(&mut state, vcpu)) {
            (origin.by, origin.leaf) = attribute(page, &registers, seen);
            state.instructions.entry(page).or_insert(registers.0.rip);
        }
        origin.gap = state.take_work(seen);
        origin
    }

    fn pause(&mut self, seen: &TouchedPages<'_>) -> u64 {
        let mut state = self.shared.state.lock();
        if let Some(vcpu) = state.thread {
            self.stop(&mut state, vcpu);
        }
        state.take_work(seen)
    }

    fn release(&mut self) {
        self.shared.state.lock().stop = Stop::None;
        self.shared.changed.notify_all();
    }
}

impl Drop for FaultAttribution {
    fn drop(&mut self) {
        self.release();
    }
}

/// The part of the next instruction or interrupt delivery that accesses a page, and the leaf that
/// maps the page.
fn attribute(page: u64, registers: &Registers, seen: &TouchedPages<'_>) -> (Toucher, Option<Leaf>) {
    let unknown = (Toucher::Instruction, None);
    let Some(tables) = PageTables::of(&registers.1) else { return unknown };
    let instruction = accessed_by_instruction(registers, tables, seen);
    find(page, instruction, tables, seen)
        .or_else(|| find(page, accessed_by_delivery(registers, tables, seen), tables, seen))
        .map_or(unknown, |(toucher, leaf)| (toucher, Some(leaf)))
}

/// Searches for a page among those at linear addresses, then among the tables on the way to them.
fn find(
    page: u64,
    addresses: Vec<u64>,
    tables: PageTables,
    seen: &TouchedPages<'_>,
) -> Option<(Toucher, Leaf)> {
    let mut walked = None;
    for address in addresses {
        let walk = tables.walk(address, |address| seen.entry(address));
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

/// Whether a vCPU at this instruction pointer has halted: the instruction before it is HLT.
fn halted(rip: u64, tables: PageTables, seen: &TouchedPages<'_>) -> bool {
    seen.read_linear(rip.wrapping_sub(1), tables) == Some(HLT)
}

impl PhysicalMemory for TouchedPages<'_> {
    fn read<const N: usize>(&self, address: u64) -> Option<[u8; N]> {
        TouchedPages::read(self, address)
    }
}
