//! Who touches guest memory, seen from the vCPU: the recorder's [`Witness`] for a microVM of one vCPU.
//!
//! When the vCPU touches a page that is not there, its thread sleeps in KVM, the instruction not executed. The witness
//! interrupts it, has its registers read in its own thread, and looks for the page among what the instruction at its
//! instruction pointer touches: the instruction itself, its operands, the stack, the tables of the processor, and the
//! page tables on the way to each. A thread that cannot be interrupted is in a copy of KVM's own.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use firn_base::PAGE_SIZE;
use firn_memory::Leaf;
use firn_memory::recorders::{Seen, Sighting, Witness};
use firn_memory::trace::Toucher;
use thiserror::Error;

use crate::guest_time::{GuestTime, GuestTimeError, GuestTimeTotals};
use crate::microvm::Microvm;
use crate::paging::{PageTables, WalkEnd};
use crate::touches::{Physical, Registers, of_delivery, of_instruction};
use crate::vcpu::VcpuThreadError;
use crate::vcpu::observer::{Observer, StoppedVcpu, VcpuThread};

/// How long a vCPU may take from the signal to its own code. One that KVM keeps longer waits in a copy of KVM's.
const STOP_LIMIT: Duration = Duration::from_millis(100);
/// Bytes of the instruction HLT.
const HLT: [u8; 1] = [0xf4];

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

/// Whether a vCPU that stands at an address halted there: the instruction before it is HLT.
fn halted(rip: u64, tables: PageTables, seen: &Seen<'_>) -> bool {
    seen.read_linear(rip.wrapping_sub(1), tables) == Some(HLT)
}

impl Physical for Seen<'_> {
    fn read<const N: usize>(&self, address: u64) -> Option<[u8; N]> {
        Seen::read(self, address)
    }
}
