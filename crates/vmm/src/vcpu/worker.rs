//! The thread of a vCPU.

use std::ops::AddAssign;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::Instant;

use kvm_bindings::CpuId;
use kvm_ioctls::{VcpuExit, VcpuFd};
use parking_lot::Mutex;

use super::Notices;
use super::failure::{VcpuEnd, VcpuFailure};
use super::interrupt::ImmediateExit;
use super::observer::{Observer, StoppedVcpu, VcpuThread};
use super::state::{self, RestoreVcpuError, SaveVcpuError, Timers, VcpuState};
use crate::bus::Bus;
use crate::counters::Timed;
use crate::cow::{CowMemory, WriteFaultError};

/// What a vCPU's thread is to do.
pub(super) enum Command {
    Run,
    Save { msr_indices: Arc<[u32]>, xsave_size: i32 },
    Observe(Arc<dyn Observer>),
    SetTimers(Timers),
}

/// The answer to a [`Command`].
pub(super) enum Answer {
    /// The vCPU is out of `KVM_RUN` with every exit completed.
    Paused,
    Saved(Box<Result<VcpuState, SaveVcpuError>>),
    Observed(VcpuThread),
    TimersSet(Result<(), RestoreVcpuError>),
}

pub(super) struct Worker {
    pub(super) id: u8,
    pub(super) fd: VcpuFd,
    pub(super) cpuid: CpuId,
    pub(super) bus: Arc<Bus>,
    pub(super) memory: CowMemory,
    pub(super) notices: Arc<Notices>,
    pub(super) immediate_exit: Arc<Mutex<Option<ImmediateExit>>>,
    pub(super) observer: Option<Arc<dyn Observer>>,
    pub(super) exits: Arc<Mutex<ExitCounters>>,
}

/// The guest's accesses to devices, by port and in memory, as far as they leave KVM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExitCounters {
    /// Reads of a port.
    pub port_reads: Timed,
    /// Writes to a port.
    pub port_writes: Timed,
    /// Reads of an address without memory.
    pub mmio_reads: Timed,
    /// Writes to an address without memory, or to memory that is copied at the first write.
    pub mmio_writes: Timed,
    /// Failures of vCPUs.
    pub failures: u64,
}

impl AddAssign for ExitCounters {
    fn add_assign(&mut self, other: Self) {
        self.port_reads += other.port_reads;
        self.port_writes += other.port_writes;
        self.mmio_reads += other.mmio_reads;
        self.mmio_writes += other.mmio_writes;
        self.failures += other.failures;
    }
}

impl Worker {
    pub(super) fn serve(&mut self, commands: &Receiver<Command>, answers: &Sender<Answer>) {
        while let Ok(command) = commands.recv() {
            let answer = match command {
                Command::Run => {
                    self.notices.first_run.is_now();
                    if let Some(end) = self.run() {
                        self.notices.give(end);
                    }
                    Answer::Paused
                }
                Command::Save { msr_indices, xsave_size } => {
                    let state =
                        state::save(&self.fd, self.id, &self.cpuid, &msr_indices, xsave_size);
                    Answer::Saved(Box::new(state))
                }
                Command::Observe(observer) => {
                    self.observer = Some(observer);
                    Answer::Observed(VcpuThread::current())
                }
                Command::SetTimers(timers) => Answer::TimersSet(timers.set(&self.fd, self.id)),
            };
            if answers.send(answer).is_err() {
                break;
            }
        }
    }

    /// Runs the guest until it is interrupted for a pause (`None`) or cannot continue. At a pause
    /// KVM has completed the last exit: it does so on entry, before it checks the flag.
    fn run(&mut self) -> Option<VcpuEnd> {
        let vcpu = self.id;
        let failure = loop {
            let exit = self.fd.run();
            let begin = Instant::now();
            match exit {
                Ok(VcpuExit::IoIn(port, data)) => {
                    self.bus.port_read(port, data);
                    self.exits.lock().port_reads += Timed::once(begin.elapsed());
                }
                Ok(VcpuExit::IoOut(port, data)) => {
                    let request = self.bus.port_write(port, data);
                    self.exits.lock().port_writes += Timed::once(begin.elapsed());
                    if let Some(request) = request {
                        return Some(VcpuEnd::Power(request));
                    }
                }
                Ok(VcpuExit::MmioRead(address, data)) => {
                    self.bus.mmio_read(address, data);
                    self.exits.lock().mmio_reads += Timed::once(begin.elapsed());
                }
                Ok(VcpuExit::MmioWrite(address, data)) => {
                    match self.memory.write(address, data) {
                        Ok(true) => {}
                        Ok(false) => self.bus.mmio_write(address, data),
                        Err(error) => break VcpuFailure::of_write_fault(vcpu, error),
                    }
                    self.exits.lock().mmio_writes += Timed::once(begin.elapsed());
                }
                Ok(VcpuExit::Intr) => {}
                Ok(VcpuExit::Shutdown) => return Some(VcpuEnd::TripleFault),
                Ok(VcpuExit::FailEntry(reason, _)) => break VcpuFailure::Entry { vcpu, reason },
                Ok(VcpuExit::InternalError) => {
                    break VcpuFailure::Internal { vcpu, rip: self.rip() };
                }
                Ok(VcpuExit::MemoryFault { gpa, .. }) if self.memory.is_sealed() => {
                    if let Err(error) = self.resolve(Some(gpa)) {
                        break VcpuFailure::of_write_fault(vcpu, error);
                    }
                }
                Ok(VcpuExit::MemoryFault { gpa, .. }) => {
                    break VcpuFailure::Memory { address: Some(gpa), source: None };
                }
                Ok(exit) => {
                    break VcpuFailure::UnknownExit { vcpu, reason: format!("{exit:?}") };
                }
                Err(error) if error.errno() == libc::EINTR => {
                    if let Some(observer) = &self.observer {
                        observer.interrupted(&StoppedVcpu { fd: &self.fd });
                    }
                    if self.is_paused() {
                        // The guest's watchdogs do not count the pause. Fails where the guest does
                        // not use kvmclock.
                        let _ = self.fd.kvmclock_ctrl();
                        return None;
                    }
                }
                Err(error) if error.errno() == libc::EAGAIN => {}
                Err(error) if error.errno() == libc::EFAULT && self.memory.is_sealed() => {
                    if let Err(error) = self.resolve(None) {
                        break VcpuFailure::of_write_fault(vcpu, error);
                    }
                }
                Err(source) => break VcpuFailure::Run { vcpu, rip: self.rip(), source },
            }
        };
        self.exits.lock().failures += 1;
        Some(VcpuEnd::Failure(failure))
    }

    fn resolve(&mut self, address: Option<u64>) -> Result<(), WriteFaultError> {
        self.memory.resolve(&self.fd, address)
    }

    /// Whether the interruption was for a pause.
    fn is_paused(&self) -> bool {
        self.immediate_exit.lock().as_ref().is_some_and(ImmediateExit::is_set)
    }

    fn rip(&self) -> u64 {
        self.fd.get_regs().map_or(0, |regs| regs.rip)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // The mapping of the flag is dropped with `fd`, after this, also when the thread panics.
        *self.immediate_exit.lock() = None;
    }
}
