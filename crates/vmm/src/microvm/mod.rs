//! One microVM: its parts put together, its event loop, its end.

mod freeze;
mod handle;
mod parts;
mod prepared;
mod start;
mod virtio_set;
mod watchdog;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use event_manager::{EventManager, EventOps, EventSet, Events, MutEventSubscriber};
use thiserror::Error;
use uuid::Uuid;
use vm_superio::serial::Error as SerialError;
use vmm_sys_util::eventfd::EventFd;

use firn_memory::{ChunkCopies, GuestMemory, MemoryUsage, UsageError};
use firn_snapshot::PageSet;

use crate::arch::cpu_model::CpuModel;
use crate::bus::{Bus, PowerRequest};
use crate::console::Console;
use crate::stats::{KvmCounters, KvmStats};
use crate::vcpu::observer::{Observer, VcpuThread};
use crate::vcpu::{EndNotice, Vcpu, VcpuEnd, VcpuFailure, VcpuThreadError};
use crate::vm::{Vm, VmError};
use handle::Inbox;
use virtio_set::VirtioSet;

pub use freeze::{Destination, FreezeError, FreezeReport, FreezeRequest};
pub use handle::{GoneError, Handle};
pub use parts::AssembleError;
pub use prepared::{Argument, PrepareError, UserRegisters};
pub use start::{
    BootError, FrozenMachine, GenerationError, IncompatibleError, RenewError, RestoreError,
    RestoreReport,
};
pub use virtio_set::{DiskError, WireError, open_root_disk};

/// A subscriber of a microVM's event loop.
type Subscriber = Arc<Mutex<dyn MutEventSubscriber + Send>>;

/// How a microVM came to its end.
#[derive(Debug)]
pub enum End {
    /// The guest powered itself off.
    Shutdown,
    /// The guest reset itself, which Linux also does when it panics. The console tells.
    Reset,
    /// The guest triple-faulted.
    TripleFault,
    /// KVM could not run a vCPU any further.
    Failure(VcpuFailure),
    /// [`Microvm::stop`] was called.
    Stopped,
}

/// Why the event loop broke.
#[derive(Debug, Error)]
pub enum RunError {
    /// The event loop itself failed.
    #[error("waiting for the microVM's events")]
    Events(#[source] event_manager::Error),
    /// A vCPU could not be started.
    #[error("running the microVM")]
    Vcpu(#[from] VcpuThreadError),
}

/// Why it is not known what was written.
#[derive(Debug, Error)]
pub enum WrittenError {
    /// A vCPU did not stop.
    #[error("pausing the microVM")]
    Pause(#[from] VcpuThreadError),
    /// KVM does not tell.
    #[error(transparent)]
    Vm(#[from] VmError),
}

/// A microVM. Its guest runs between [`Microvm::resume`] and [`Microvm::pause`]; its devices are
/// served by [`Microvm::run`]. Dropping it ends the guest and removes what it made.
pub struct Microvm {
    // Fields drop in this order: vCPUs stop before the memory under them goes away.
    vcpus: Vec<Vcpu>,
    events: EventManager<Subscriber>,
    devices: VirtioSet,
    bus: Arc<Bus>,
    generation_irq: EventFd,
    counters: Arc<KvmCounters>,
    vm: Vm,
    kvm: kvm_ioctls::Kvm,
    notice: Arc<EndNotice>,
    inbox: Inbox,
    console: Console,
    /// The snapshot that this microVM was restored from.
    parent: Option<Uuid>,
    /// What its guest was told at its boot.
    cpu: Option<CpuModel>,
    stopped: bool,
}

impl Microvm {
    /// Lets the guest run.
    ///
    /// # Errors
    /// A vCPU's thread died.
    pub fn resume(&mut self) -> Result<(), VcpuThreadError> {
        self.vcpus.iter_mut().try_for_each(Vcpu::run)
    }

    /// Brings all vCPUs out of guest mode. Devices keep their state, requests in flight included.
    ///
    /// # Errors
    /// A vCPU's thread died.
    pub fn pause(&mut self) -> Result<(), VcpuThreadError> {
        // All at once first, so that the pauses overlap.
        self.vcpus.iter().for_each(Vcpu::kick);
        self.vcpus.iter_mut().try_for_each(Vcpu::pause)
    }

    /// Shows an observer every interruption of the vCPUs from now on; the guest does not run. Returns the vCPUs' threads,
    /// in order.
    ///
    /// # Errors
    /// A vCPU's thread died.
    pub fn observe(
        &mut self,
        observer: &Arc<dyn Observer>,
    ) -> Result<Vec<VcpuThread>, VcpuThreadError> {
        self.vcpus.iter().map(|vcpu| vcpu.observe(observer.clone())).collect()
    }

    /// Makes [`Microvm::run`] return [`End::Stopped`].
    pub fn stop(&mut self) {
        self.stopped = true;
    }

    /// A way to reach this microVM from other threads while it runs.
    #[must_use]
    pub fn handle(&self) -> Handle {
        self.inbox.handle()
    }

    /// The processor that the guest of a boot was told of; `None` where the microVM was not booted.
    #[must_use]
    pub fn cpu_model(&self) -> Option<CpuModel> {
        self.cpu
    }

    /// The guest's console.
    #[must_use]
    pub fn console(&self) -> &Console {
        &self.console
    }

    /// Gives the guest bytes on its serial port; returns how many it took. The rest did not fit: the guest has to read
    /// first.
    ///
    /// # Errors
    /// The guest could not be interrupted.
    pub fn type_in(&self, bytes: &[u8]) -> std::io::Result<usize> {
        match self.bus.serial().enqueue_raw_bytes(bytes) {
            Ok(taken) => Ok(taken),
            Err(SerialError::Trigger(error) | SerialError::IOError(error)) => Err(error),
            Err(SerialError::FullFifo) => Ok(0),
        }
    }

    /// The guest's memory.
    #[must_use]
    pub fn memory(&self) -> &GuestMemory {
        &self.vm.memory
    }

    /// The guest's memory, for work on it in other threads while the guest runs.
    #[must_use]
    pub fn shared_memory(&self) -> Arc<GuestMemory> {
        self.vm.memory.clone()
    }

    /// What the guest's memory costs the host now.
    ///
    /// # Errors
    /// /proc/self/smaps cannot be read.
    pub fn memory_usage(&self) -> Result<MemoryUsage, UsageError> {
        self.vm.memory.usage()
    }

    /// Pauses the guest, and says which image pages were written since it was restored: by the guest, by KVM or by the monitor;
    /// `None` where memory does not [track writes](GuestMemory::track_writes).
    ///
    /// # Errors
    /// See [`WrittenError`].
    pub fn written(&mut self) -> Result<Option<PageSet>, WrittenError> {
        self.pause()?;
        Ok(self.vm.written()?)
    }

    /// Why devices stopped serving the guest, of those that did: it broke their rules.
    #[must_use]
    pub fn device_errors(&self) -> Vec<String> {
        self.devices.errors()
    }

    /// What KVM counted since the start.
    ///
    /// # Errors
    /// A statistics file of KVM's cannot be read.
    pub fn kvm_stats(&self) -> std::io::Result<KvmStats> {
        self.counters.read()
    }

    /// What writing to sealed memory took so far; nothing where no memory is sealed.
    #[must_use]
    pub fn chunk_copies(&self) -> ChunkCopies {
        self.vm.memory.vm_memory().chunk_copies()
    }

    /// KVM's counters, to be read in other threads.
    #[must_use]
    pub fn kvm_counters(&self) -> Arc<KvmCounters> {
        self.counters.clone()
    }

    /// Serves the devices and requests until the microVM ends.
    ///
    /// # Errors
    /// See [`RunError`].
    pub fn run(&mut self) -> Result<End, RunError> {
        loop {
            while let Some(request) = self.inbox.next() {
                request(self);
            }
            if self.stopped {
                return Ok(End::Stopped);
            }
            if let Some(end) = self.take_end() {
                return Ok(end);
            }
            self.events.run().map_err(RunError::Events)?;
        }
    }

    fn end(&self) -> MutexGuard<'_, Option<VcpuEnd>> {
        self.notice.end.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a vCPU cannot go on. Certain only while paused.
    fn has_ended(&self) -> bool {
        self.end().is_some()
    }

    fn take_end(&self) -> Option<End> {
        Some(match self.end().take()? {
            VcpuEnd::Power(PowerRequest::Off) => End::Shutdown,
            VcpuEnd::Power(PowerRequest::Reset) => self.unless_lost(End::Reset),
            VcpuEnd::TripleFault => self.unless_lost(End::TripleFault),
            VcpuEnd::Failure(VcpuFailure::Memory { address, .. }) => {
                let source = self.memory().lost(address);
                End::Failure(VcpuFailure::Memory { address, source })
            }
            VcpuEnd::Failure(failure) => self.unless_lost(End::Failure(failure)),
        })
    }

    /// A guest whose memory is lost may end in any way: KVM with software page tables takes a page table that it cannot read for
    /// an empty one, and kernels before 6.8 do not say which page a processor could not have.
    fn unless_lost(&self, end: End) -> End {
        match self.memory().lost(None) {
            Some(lost) => End::Failure(VcpuFailure::Memory { address: None, source: Some(lost) }),
            None => end,
        }
    }
}

/// Wakes the event loop: what woke it is looked at by [`Microvm::run`].
struct Waker(Arc<EventFd>);

impl MutEventSubscriber for Waker {
    fn process(&mut self, _: Events, _: &mut EventOps<'_>) {
        // An empty counter means that somebody else took the event.
        let _ = self.0.read();
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        let _ = ops.add(Events::new(&*self.0, EventSet::IN));
    }
}

#[cfg(test)]
mod sealed_tests;
#[cfg(test)]
mod tests;
