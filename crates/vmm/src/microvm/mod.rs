//! One microVM: its parts, its event loop, its end.

mod boot;
mod console_input;
mod disks;
mod frame;
mod freeze;
mod frozen;
mod generation;
mod handle;
mod held;
mod parts;
mod prepared;
mod restore;
mod standby;
mod virtio_set;
mod watchdog;

use std::sync::Arc;
use std::time::Duration;

use event_manager::{EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberOps};
use parking_lot::Mutex;
use thiserror::Error;
use uuid::Uuid;
use vm_superio::serial::Error as SerialError;
use vmm_sys_util::eventfd::EventFd;

use firn_base::num::u64_of;
use firn_memory::{ChunkCopies, GuestMemory, MemoryUsage, UsageError};
use firn_snapshot::PageSet;

use crate::arch::cpu_model::CpuModel;
use crate::bus::{Bus, PowerRequest};
use crate::console::Console;
use crate::counters::Counters;
use crate::i8042::CtrlAltDelError;
use crate::kvm::{KvmCounters, KvmStats, Vm, VmError};
use crate::open_file::OpenFile;
use crate::subscriber::Subscriber;
use crate::vcpu::observer::{Observer, VcpuThread};
use crate::vcpu::{ExitCounters, FirstRun, Notices, Vcpu, VcpuEnd, VcpuFailure, VcpuThreadError};
use crate::virtio::{BalloonStatistics, RateLimit};
use handle::Inbox;
use virtio_set::VirtioSet;
use watchdog::Watchdog;

pub use boot::BootError;
pub use disks::{DiskError, open_root_disk};
pub use freeze::FreezeError;
pub use frozen::{FrozenMachine, IncompatibleError, note_of};
pub use generation::{GenerationError, RenewError};
pub use handle::{GoneError, Handle};
pub use held::ReleaseError;
pub use parts::AssembleError;
pub use prepared::{Argument, PrepareError, UserRegisters};
pub use restore::{RestoreError, RestoreReport};
pub use standby::{Shape, Standby, StandbyError};
pub use virtio_set::{Names, UpdateDeviceError, WireError};

/// How a microVM ended.
#[derive(Debug)]
pub enum End {
    /// The guest powered itself off.
    Shutdown,
    /// The guest reset itself. Linux also does so when it panics, and then writes to the console.
    Reset,
    /// The guest triple-faulted.
    TripleFault,
    /// KVM cannot run a vCPU any further.
    Failure(VcpuFailure),
    /// [`Microvm::stop`] was called.
    Stopped,
}

/// Why the event loop failed.
#[derive(Debug, Error)]
pub enum RunError {
    /// The event loop itself failed.
    #[error("cannot wait for the microVM's events")]
    Events(#[source] event_manager::Error),
    /// A vCPU cannot be started.
    #[error("cannot run the microVM")]
    Vcpu(#[from] VcpuThreadError),
    /// The timer of the watchdog cannot be set.
    #[error("cannot start the watchdog")]
    Watchdog(#[source] vmm_sys_util::errno::Error),
}

/// Why the written pages cannot be reported.
#[derive(Debug, Error)]
pub enum WrittenError {
    /// A vCPU did not stop.
    #[error("cannot pause the microVM")]
    Pause(#[from] VcpuThreadError),
    /// KVM does not report them.
    #[error(transparent)]
    Vm(#[from] VmError),
}

/// A microVM. Its guest runs between [`Microvm::resume`] and [`Microvm::pause`]; [`Microvm::run`]
/// serves its devices. Dropping it ends the guest and removes what it created.
///
/// A thaw plans and lays out guest memory, restores the machine over it, and runs it:
///
/// ```no_run
/// use firn_memory::planners::{parse, plan};
/// use firn_memory::{Sources, execute};
/// use firn_snapshot::Snapshot;
/// use firn_vmm::{FrozenMachine, HostConfig, KVM_DEVICE, Microvm, OpenKvm, VsockListener};
/// use firn_vmm::{Drive, OverlayBase, open_root_disk};
///
/// let snapshot = Snapshot::open("snapshots/hello")?;
/// let plan = plan(&snapshot, None, &*parse("firecracker")?)?;
/// let memory = execute(&plan, &Sources::of(&snapshot, None)?)?.memory;
///
/// let root = open_root_disk(snapshot.manifest(), None)?.ok_or("the guest has no disks")?;
/// let base = OverlayBase::of_snapshot(&snapshot)?.ok_or("the guest has no disks")?;
/// let host = HostConfig {
///     drives: Drive::of_firn(root, base, 0, None),
///     vsock: Some(VsockListener::bind("hello.vsock".as_ref())?),
///     generation: Some(uuid::Uuid::new_v4()),
///     ..HostConfig::default()
/// };
/// let kvm = OpenKvm::open(KVM_DEVICE.as_ref())?;
/// let frozen = FrozenMachine::open_on(&snapshot, kvm)?;
/// let (mut microvm, _report) = Microvm::restore(frozen, memory, host)?;
/// microvm.resume()?;
/// let end = microvm.run()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Microvm {
    // Fields drop in this order: the vCPUs stop before their memory is unmapped.
    vcpus: Vec<Vcpu>,
    events: EventManager<Subscriber>,
    devices: VirtioSet,
    bus: Arc<Bus>,
    generation_irq: EventFd,
    counters: Arc<KvmCounters>,
    vm: Vm,
    kvm: Arc<kvm_ioctls::Kvm>,
    notices: Arc<Notices>,
    inbox: Inbox,
    console: Console,
    /// The snapshot that this microVM was restored from.
    parent: Option<Uuid>,
    /// The processor model of a boot.
    cpu: Option<CpuModel>,
    stopped: bool,
    /// Whether the watchdog was started.
    watched: bool,
    /// What is left to be set before the resume, of a machine that was held.
    held: Option<held::Held>,
    freezing: Option<freeze::Freezing>,
    /// What its caller has noted, for snapshots.
    note: Vec<u8>,
    /// Events that the loop has handled.
    handled: u64,
}

impl Microvm {
    /// Runs the guest.
    ///
    /// # Errors
    /// A vCPU's thread ended.
    pub fn resume(&mut self) -> Result<(), VcpuThreadError> {
        self.freezing = None;
        self.vcpus.iter_mut().try_for_each(Vcpu::run)
    }

    /// When the first vCPU began to run. The thread that called [`Microvm::resume`] may continue
    /// later, where the vCPU's thread took its processor.
    #[must_use]
    pub fn first_run(&self) -> FirstRun {
        self.notices.first_run.clone()
    }

    /// Brings all vCPUs out of guest mode. Devices keep their state, including requests in flight.
    ///
    /// # Errors
    /// A vCPU's thread ended.
    pub fn pause(&mut self) -> Result<(), VcpuThreadError> {
        // All vCPUs are kicked first, so that their pauses overlap.
        self.vcpus.iter().for_each(Vcpu::kick);
        self.vcpus.iter_mut().try_for_each(Vcpu::pause)
    }

    /// Calls an observer at every interruption of a vCPU from now on. The guest does not run yet.
    /// Returns the vCPUs' threads, in order.
    pub(crate) fn observe(
        &mut self,
        observer: &Arc<dyn Observer>,
    ) -> Result<Vec<VcpuThread>, VcpuThreadError> {
        self.vcpus.iter().map(|vcpu| vcpu.observe(observer.clone())).collect()
    }

    /// Makes [`Microvm::run`] return [`End::Stopped`].
    pub fn stop(&mut self) {
        self.stopped = true;
    }

    /// Sends requests to this microVM from other threads while it runs.
    #[must_use]
    pub fn handle(&self) -> Handle {
        self.inbox.handle()
    }

    /// The processor model of a microVM that was booted; `None` for any other.
    #[must_use]
    pub fn cpu_model(&self) -> Option<CpuModel> {
        self.cpu
    }

    /// The guest's console.
    #[must_use]
    pub fn console(&self) -> &Console {
        &self.console
    }

    /// Sends bytes to the guest's serial port; returns how many fit. The guest must read before the
    /// rest fits.
    ///
    /// # Errors
    /// The interrupt cannot be raised.
    pub fn write_serial(&self, bytes: &[u8]) -> std::io::Result<usize> {
        match self.bus.serial().enqueue_raw_bytes(bytes) {
            Ok(taken) => Ok(taken),
            Err(SerialError::Trigger(error) | SerialError::IOError(error)) => Err(error),
            Err(SerialError::FullFifo) => Ok(0),
        }
    }

    /// Presses Ctrl, Alt and Delete on the guest's keyboard. What follows is the guest's decision:
    /// Linux restarts, by way of its first process.
    ///
    /// # Errors
    /// See [`CtrlAltDelError`].
    pub fn send_ctrl_alt_del(&self) -> Result<(), CtrlAltDelError> {
        let mut keyboard = self.bus.keyboard().ok_or(CtrlAltDelError::NoKeyboard)?;
        keyboard.press_ctrl_alt_del()
    }

    /// Exchanges the file of a drive that is a [file](crate::DriveDisk::File) of the caller's, and
    /// tells the guest, which finds the new size. The new one is used as the old one was: written,
    /// flushed.
    ///
    /// # Errors
    /// See [`UpdateDeviceError`]. The drive then keeps its file.
    pub fn replace_drive(&self, id: &str, file: OpenFile) -> Result<(), UpdateDeviceError> {
        self.devices.replace_drive(id, file)
    }

    /// Changes the limit of a drive that has a limiter.
    ///
    /// # Errors
    /// See [`UpdateDeviceError`].
    pub fn limit_drive(&self, id: &str, limit: RateLimit) -> Result<(), UpdateDeviceError> {
        self.devices.limit_drive(id, limit)
    }

    /// Makes each device look at its queues, as after a notification.
    pub fn kick_devices(&self) {
        self.devices.kick();
    }

    /// Changes the size of the balloon that the host wants, in pages of 4096 bytes. The guest
    /// follows as far as it can.
    ///
    /// # Errors
    /// See [`UpdateDeviceError`].
    pub fn set_balloon_target(&self, target: u32) -> Result<(), UpdateDeviceError> {
        self.devices.set_balloon_target(target)
    }

    /// What a guest whose balloon has statistics has told of its memory.
    ///
    /// # Errors
    /// See [`UpdateDeviceError`].
    pub fn balloon_statistics(&self) -> Result<BalloonStatistics, UpdateDeviceError> {
        self.devices.balloon_statistics()
    }

    /// Changes the time after which a guest whose balloon has statistics tells again; `None` for
    /// never.
    ///
    /// # Errors
    /// See [`UpdateDeviceError`].
    pub fn set_balloon_period(&self, period: Option<Duration>) -> Result<(), UpdateDeviceError> {
        self.devices.set_balloon_period(period)
    }

    /// Changes the limits of a network device that has limiters: of frames to the guest, and of
    /// frames from it; `None` leaves a limit as it is.
    ///
    /// # Errors
    /// See [`UpdateDeviceError`].
    pub fn limit_network(
        &self,
        id: &str,
        to_guest: Option<RateLimit>,
        from_guest: Option<RateLimit>,
    ) -> Result<(), UpdateDeviceError> {
        self.devices.limit_network(id, to_guest, from_guest)
    }

    /// Notes bytes that every snapshot of this microVM contains, in place of earlier ones. A
    /// restored microVM has those of its snapshot.
    pub fn set_note(&mut self, note: Vec<u8>) {
        self.note = note;
    }

    /// The guest's memory.
    #[must_use]
    pub fn memory(&self) -> &GuestMemory {
        &self.vm.memory
    }

    /// The guest's memory, for other threads that work on it while the guest runs.
    #[must_use]
    pub fn shared_memory(&self) -> Arc<GuestMemory> {
        self.vm.memory.clone()
    }

    /// Size of the largest file that this microVM writes, bytes: its memory at a freeze, or its
    /// writable disk.
    #[must_use]
    pub fn largest_file(&self) -> u64 {
        self.memory().layout().total_bytes().max(self.devices.written_disk_size())
    }

    /// The most sockets of the host that the guest's network has at once.
    #[must_use]
    pub const fn most_sockets(&self) -> usize {
        self.devices.most_sockets()
    }

    /// The host memory that the guest's memory uses now.
    ///
    /// # Errors
    /// /proc/self/smaps cannot be read.
    pub fn memory_usage(&self) -> Result<MemoryUsage, UsageError> {
        self.vm.memory.usage()
    }

    /// Pauses the guest, and returns the image pages that the guest, KVM or the monitor wrote since
    /// the restore; `None` if the memory does not [track writes](GuestMemory::track_writes).
    ///
    /// # Errors
    /// See [`WrittenError`].
    pub fn written(&mut self) -> Result<Option<PageSet>, WrittenError> {
        self.pause()?;
        Ok(self.vm.written()?)
    }

    /// The errors of devices that stopped because the guest violated the virtio specification.
    #[must_use]
    pub fn device_errors(&self) -> Vec<String> {
        self.devices.errors()
    }

    /// What its devices and vCPUs have done since the start.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let mut exits = ExitCounters::default();
        self.vcpus.iter().for_each(|vcpu| exits += vcpu.exits());
        let serial = self.bus.serial_counters();
        let keyboard = self.bus.keyboard().map(|keyboard| keyboard.counters);
        Counters { serial, keyboard, exits, events: self.handled, ..self.devices.counters() }
    }

    /// KVM's counters since the start.
    ///
    /// # Errors
    /// A statistics file of KVM cannot be read.
    pub fn kvm_stats(&self) -> std::io::Result<KvmStats> {
        self.counters.read()
    }

    /// The copies of sealed memory so far; none if no memory is sealed.
    #[must_use]
    pub fn chunk_copies(&self) -> ChunkCopies {
        self.vm.memory.vm_memory().chunk_copies()
    }

    /// KVM's counters, for other threads.
    #[must_use]
    pub fn kvm_counters(&self) -> Arc<KvmCounters> {
        self.counters.clone()
    }

    /// Serves devices and requests until the microVM ends.
    ///
    /// # Errors
    /// See [`RunError`].
    pub fn run(&mut self) -> Result<End, RunError> {
        // Not before the resume, which it would delay.
        if !self.watched {
            let watchdog = Watchdog::start(self.counters.clone(), self.notices.clone());
            let watchdog = Arc::new(Mutex::new(watchdog.map_err(RunError::Watchdog)?));
            self.events.add_subscriber(Subscriber::new(watchdog));
            self.watched = true;
        }
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
            let events = self.events.run().map_err(RunError::Events)?;
            self.handled += u64_of(events);
        }
    }

    /// Whether a vCPU has ended. Reliable only while the microVM is paused.
    fn has_ended(&self) -> bool {
        self.notices.end.lock().is_some()
    }

    fn take_end(&self) -> Option<End> {
        Some(match self.notices.end.lock().take()? {
            VcpuEnd::Power(PowerRequest::Off) => End::Shutdown,
            VcpuEnd::Power(PowerRequest::Reset) => self.unless_lost(End::Reset),
            VcpuEnd::TripleFault => self.unless_lost(End::TripleFault),
            VcpuEnd::Failure(VcpuFailure::Memory { address, .. }) => {
                let source = self.memory().lost_backing(address);
                End::Failure(VcpuFailure::Memory { address, source })
            }
            VcpuEnd::Failure(failure) => self.unless_lost(End::Failure(failure)),
        })
    }

    /// Replaces the end of a guest whose memory is lost, which may end in any way: KVM with
    /// software page tables treats a page table that it cannot read as empty, and kernels before
    /// 6.8 do not report the page that a vCPU faulted on.
    fn unless_lost(&self, end: End) -> End {
        match self.memory().lost_backing(None) {
            Some(lost) => End::Failure(VcpuFailure::Memory { address: None, source: Some(lost) }),
            None => end,
        }
    }
}

/// Wakes the event loop; [`Microvm::run`] then checks for requests and the end.
struct Waker(Arc<EventFd>);

impl MutEventSubscriber for Waker {
    fn process(&mut self, _: Events, _: &mut EventOps<'_>) {
        // The counter is empty if the event was already read.
        let _ = self.0.read();
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        let _ = ops.add(Events::new(&*self.0, EventSet::IN));
    }
}

/// An event descriptor for an interrupt or a notification.
fn event() -> std::io::Result<EventFd> {
    EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)
}

#[cfg(test)]
mod cow_tests;
#[cfg(test)]
mod network_cost_tests;
#[cfg(test)]
mod tests;
