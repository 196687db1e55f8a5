//! The parts of a microVM, created and connected but not yet running.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use event_manager::{EventManager, SubscriberOps};
use kvm_bindings::CpuId;
use kvm_ioctls::VcpuFd;
use parking_lot::Mutex;
use thiserror::Error;
use uuid::Uuid;
use vmm_sys_util::eventfd::EventFd;

use firn_memory::GuestMemory;
use firn_snapshot::DiskInfo;

use super::console_input::ConsoleInput;
use super::frame::Frame;
use super::handle::Inbox;
use super::standby::{Ready, Standby};
use super::virtio_set::{Connected, VirtioSet, WireError};
use super::{Microvm, event};
use crate::arch::layout;
use crate::bus::{Bus, OverlapError};
use crate::config::{Devices, HostConfig};
use crate::console::{Console, SerialRegisters, SerialStateError};
use crate::cow::CowMemory;
use crate::i8042::{Keyboard, KeyboardState, KeyboardStateError};
use crate::kvm::{KvmCounters, OpenKvm, StatsFile, Vm, VmError};
use crate::subscriber::Subscriber;
use crate::vcpu::state::Fresh;
use crate::vcpu::{IdleThread, Notices, VcpuThreadError};

/// Why the parts of a microVM cannot be assembled.
#[derive(Debug, Error)]
pub enum AssembleError {
    /// The virtual machine cannot be created.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// A vCPU cannot be created.
    #[error("cannot create vCPU {vcpu}")]
    Vcpu {
        /// Number of the vCPU.
        vcpu: u8,
        /// KVM's error.
        source: kvm_ioctls::Error,
    },
    /// A vCPU's thread cannot be started.
    #[error(transparent)]
    Thread(#[from] VcpuThreadError),
    /// An event descriptor cannot be created.
    #[error("cannot create an event descriptor")]
    EventFd(#[source] io::Error),
    /// The serial port's registers are invalid.
    #[error(transparent)]
    Serial(#[from] SerialStateError),
    /// The keyboard controller's registers are invalid.
    #[error(transparent)]
    Keyboard(#[from] KeyboardStateError),
    /// A virtio device cannot be created or connected.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// Two register windows overlap.
    #[error(transparent)]
    Overlap(#[from] OverlapError),
    /// The event loop cannot be created.
    #[error("cannot create the event loop")]
    Events(#[source] event_manager::Error),
    /// KVM's statistics cannot be opened.
    #[error("cannot open KVM's statistics")]
    Stats(#[source] io::Error),
}

/// The devices of a microVM, with what they are at the start.
#[derive(Default)]
pub(super) struct Machine<'a> {
    pub(super) serial: SerialRegisters,
    /// The keyboard controller; with it comes the interval timer. `None` for a guest without them.
    pub(super) keyboard: Option<KeyboardState>,
    pub(super) devices: Devices,
    /// The images that the microVM's snapshot names.
    pub(super) known: &'a [DiskInfo],
}

/// A microVM whose vCPUs have no state yet.
pub(super) struct Parts {
    // Fields drop in this order: every view of guest memory before the memory itself.
    pub(super) vcpus: Vec<VcpuFd>,
    threads: Vec<IdleThread>,
    /// What the vCPUs have already, where a standby made them.
    pub(super) fresh: Vec<Fresh>,
    /// Whether they were made before the request.
    pub(super) in_advance: bool,
    events: EventManager<Subscriber>,
    pub(super) devices: VirtioSet,
    bus: Bus,
    serial_irq: EventFd,
    keyboard_irq: Option<EventFd>,
    pub(super) generation_irq: EventFd,
    pub(super) vm: Vm,
    pub(super) kvm: OpenKvm,
    console: Console,
    /// The console's input, and the event of the port that it has room.
    input: Option<(OwnedFd, EventFd)>,
    inbox: Inbox,
}

impl Parts {
    /// Assembles them, of what a standby has ready if that fits.
    pub(super) fn assemble(
        host: HostConfig,
        standby: impl Into<Standby>,
        memory: GuestMemory,
        vcpus: u8,
        machine: Machine<'_>,
    ) -> Result<Self, AssembleError> {
        let Machine { serial, keyboard, devices, known } = machine;
        let mut standby = standby.into();
        let (frame, fresh, in_advance) = match standby.take_ready(&memory, vcpus) {
            Some(ready) => {
                let Ready { frame, vcpus, in_advance } = *ready;
                (frame, vcpus, in_advance)
            }
            None => {
                let (slots, logs_writes) = (memory.slots(), memory.tracks_writes());
                // SAFETY: `memory` owns these mappings and lives as long as the VM.
                let frame = unsafe { Frame::create(&standby.kvm, slots, logs_writes, vcpus) }?;
                (frame, Vec::new(), false)
            }
        };
        let Frame { vcpus, threads, vm, mut events, inbox, serial_irq, generation_irq, .. } = frame;
        let vm = Vm { fd: vm, memory: Arc::new(memory) };

        let port_irq = serial_irq.try_clone().map_err(AssembleError::EventFd)?;
        let input = match host.console_input {
            Some(input) => Some((input, event().map_err(AssembleError::EventFd)?)),
            None => None,
        };
        let room = input.as_ref().map(|(_, room)| room.try_clone()).transpose();
        let room = room.map_err(AssembleError::EventFd)?;
        let serial = serial.into_port(port_irq, host.console.clone(), room)?;
        let mut keyboard_irq = None;
        let keyboard = match keyboard {
            Some(state) => {
                vm.create_pit()?;
                let irq = keyboard_irq.insert(event().map_err(AssembleError::EventFd)?);
                let irq = irq.try_clone().map_err(AssembleError::EventFd)?;
                Some(Keyboard::new(state, irq)?)
            }
            None => None,
        };
        let mut bus = Bus::new(serial, keyboard);
        vm.interrupt(&generation_irq, layout::GENERATION_GSI)?;
        let HostConfig { drives, vsock, entropy_limiter, balloon_period, networks, .. } = host;
        let connected = Connected { drives, vsock, entropy_limiter, balloon_period, networks };
        let devices = VirtioSet::wire(devices, connected, known, &vm, &mut bus, &mut events)?;
        for window in host.windows {
            bus.add(window.start, window.len, Arc::new(Mutex::new(window.device)))?;
        }
        Ok(Self {
            vcpus,
            threads,
            fresh,
            in_advance,
            events,
            devices,
            bus,
            serial_irq,
            keyboard_irq,
            generation_irq,
            vm,
            kvm: standby.kvm,
            console: host.console,
            input,
            inbox,
        })
    }

    /// Passes the vCPUs, paused, to their threads.
    ///
    /// `cpuids` are the CPUID lists of the vCPUs, in order.
    pub(super) fn start(
        mut self,
        cpuids: Vec<CpuId>,
        parent: Option<Uuid>,
    ) -> Result<Microvm, AssembleError> {
        // Restored ports raise their pending interrupts again. They are connected only now, so that
        // restoring the interrupt controllers does not discard the interrupts.
        self.vm.interrupt(&self.serial_irq, layout::SERIAL_GSI)?;
        if let Some(irq) = &self.keyboard_irq {
            self.vm.interrupt(irq, layout::KEYBOARD_GSI)?;
        }
        let mut stats = vec![StatsFile::open(&self.vm.fd).map_err(AssembleError::Stats)?];
        let bus = Arc::new(self.bus);
        if let Some((input, room)) = self.input {
            let input = ConsoleInput::new(input, room, bus.clone());
            self.events.add_subscriber(Subscriber::new(Arc::new(Mutex::new(input))));
        }
        let notices = Arc::new(Notices::new(self.inbox.doorbell.clone()));
        let mut vcpus = Vec::with_capacity(self.vcpus.len());
        for ((thread, fd), cpuid) in self.threads.into_iter().zip(self.vcpus).zip(cpuids) {
            stats.push(StatsFile::open(&fd).map_err(AssembleError::Stats)?);
            let memory = CowMemory::new(self.vm.memory.vm_memory());
            vcpus.push(thread.take(fd, cpuid, bus.clone(), memory, notices.clone()));
        }
        let counters = Arc::new(KvmCounters::new(stats));
        Ok(Microvm {
            vcpus,
            events: self.events,
            devices: self.devices,
            bus,
            generation_irq: self.generation_irq,
            counters,
            vm: self.vm,
            kvm: self.kvm.kvm,
            notices,
            inbox: self.inbox,
            console: self.console,
            parent,
            cpu: None,
            stopped: false,
            watched: false,
            held: None,
            freezing: None,
            note: Vec::new(),
            handled: 0,
        })
    }
}
