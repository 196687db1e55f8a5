//! The part of a microVM that needs no guest memory: what a standby monitor makes before it knows
//! the snapshot.

use std::sync::Arc;

use event_manager::{EventManager, SubscriberOps};
use kvm_ioctls::{VcpuFd, VmFd};
use parking_lot::Mutex;
use vmm_sys_util::eventfd::EventFd;

use firn_memory::{GuestMemory, Slot};

use super::handle::Inbox;
use super::parts::AssembleError;
use super::{Waker, event};
use crate::kvm::{OpenKvm, create_vm};
use crate::subscriber::Subscriber;
use crate::vcpu::IdleThread;

/// A virtual machine with its slots, interrupt controllers and vCPUs, their threads, and the event
/// loop. No vCPU has a state yet.
pub(super) struct Frame {
    // Fields drop in this order: the vCPUs before the machine.
    pub(super) vcpus: Vec<VcpuFd>,
    pub(super) threads: Vec<IdleThread>,
    pub(super) vm: VmFd,
    pub(super) events: EventManager<Subscriber>,
    pub(super) inbox: Inbox,
    pub(super) serial_irq: EventFd,
    pub(super) generation_irq: EventFd,
    slots: Vec<Slot>,
    logs_writes: bool,
}

impl Frame {
    /// Creates it for slots over address space of this process.
    ///
    /// # Safety
    /// While a vCPU runs, the addresses of `slots` are guest memory.
    pub(super) unsafe fn create(
        kvm: &OpenKvm,
        slots: &[Slot],
        logs_writes: bool,
        vcpus: u8,
    ) -> Result<Self, AssembleError> {
        // SAFETY: as the caller's.
        let vm = unsafe { create_vm(kvm, slots, logs_writes) }?;
        let create = |vcpu: u8| {
            let created = vm.create_vcpu(u64::from(vcpu));
            created.map_err(|source| AssembleError::Vcpu { vcpu, source })
        };
        // The threads first: they start while the rest is made.
        let threads = (0..vcpus).map(IdleThread::start).collect::<Result<_, _>>()?;
        let vcpus = (0..vcpus).map(create).collect::<Result<_, _>>()?;
        let inbox = Inbox::new().map_err(AssembleError::EventFd)?;
        let mut events: EventManager<Subscriber> =
            EventManager::new().map_err(AssembleError::Events)?;
        let waker = Arc::new(Mutex::new(Waker(inbox.doorbell.clone())));
        events.add_subscriber(Subscriber::new(waker));
        Ok(Self {
            vcpus,
            threads,
            vm,
            events,
            inbox,
            serial_irq: event().map_err(AssembleError::EventFd)?,
            generation_irq: event().map_err(AssembleError::EventFd)?,
            slots: slots.to_vec(),
            logs_writes,
        })
    }

    /// Whether it is one for this memory and this number of vCPUs.
    pub(super) fn fits(&self, memory: &GuestMemory, vcpus: u8) -> bool {
        self.slots == memory.slots()
            && self.logs_writes == memory.tracks_writes()
            && self.vcpus.len() == usize::from(vcpus)
    }
}
