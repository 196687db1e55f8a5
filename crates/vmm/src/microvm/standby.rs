//! What is made of a microVM before its snapshot is known.

use std::io;
use std::thread::JoinHandle;

use firn_base::move_away;
use firn_memory::{GuestMemory, Leaf, Reservation, Slot};
use firn_snapshot::MemoryLayout;
use kvm_bindings::{CpuId, kvm_cpuid_entry2};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::frame::Frame;
use super::parts::AssembleError;
use crate::kvm::OpenKvm;
use crate::vcpu::state::Fresh;

/// What decides whether a [`Standby`] can become a microVM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Shape {
    /// Guest memory.
    pub layout: MemoryLayout,
    /// The alignment of host and guest addresses to each other.
    pub leaf: Leaf,
    /// The CPUID list of each vCPU, in order.
    pub(super) cpuids: Vec<Vec<kvm_cpuid_entry2>>,
}

impl Shape {
    /// Address space for its slots.
    fn reserve(&self) -> Result<Reservation, StandbyError> {
        Reservation::in_advance(self.layout.clone(), self.leaf).map_err(StandbyError::Reserve)
    }
}

/// Why nothing was made in advance.
#[derive(Debug, Error)]
pub enum StandbyError {
    /// There is no address space.
    #[error("cannot reserve address space for guest memory")]
    Reserve(#[source] io::Error),
    /// The shape has more vCPUs than a microVM can have.
    #[error("a microVM cannot have {0} vCPUs")]
    Vcpus(usize),
    /// The virtual machine cannot be made.
    #[error(transparent)]
    Assemble(#[from] AssembleError),
    /// KVM refuses the CPUID of a vCPU.
    #[error("cannot set up a vCPU in advance")]
    Vcpu(#[source] kvm_ioctls::Error),
    /// The CPUID list is longer than KVM accepts.
    #[error("a CPUID list of {0} entries is longer than KVM accepts")]
    Cpuid(usize),
}

/// An open KVM and, for a [`Shape`], the part of a microVM that can be made on it in advance: a VM
/// whose slots lie in reserved address space, its vCPUs with their CPUID, their threads.
pub struct Standby {
    pub(super) kvm: OpenKvm,
    ready: Option<Made>,
    reservation: Option<Reservation>,
}

/// What there is of a microVM.
enum Made {
    /// All of a shape.
    Ready(Box<Ready>),
    /// A thread makes it beside the start.
    Beside(JoinHandle<Result<Box<Ready>, StandbyError>>),
}

/// A frame, and the state that its vCPUs have.
pub(super) struct Ready {
    pub(super) frame: Frame,
    pub(super) vcpus: Vec<Fresh>,
    /// Whether it was made before the request.
    pub(super) in_advance: bool,
}

impl Ready {
    /// Makes it for slots over chosen address space.
    fn make(
        kvm: &OpenKvm,
        slots: &[Slot],
        cpuids: &[Vec<kvm_cpuid_entry2>],
        in_advance: bool,
    ) -> Result<Box<Self>, StandbyError> {
        let count = cpuids.len();
        let vcpus = u8::try_from(count).map_err(|_| StandbyError::Vcpus(count))?;
        // SAFETY: no vCPU runs before `Frame::fits` has found guest memory at the slots' addresses.
        let frame = unsafe { Frame::create(kvm, slots, false, vcpus) }?;
        let set_up = |(fd, entries): (_, &Vec<_>)| {
            let cpuid =
                CpuId::from_entries(entries).map_err(|_| StandbyError::Cpuid(entries.len()))?;
            Fresh::set_up(&kvm.kvm, fd, cpuid).map_err(StandbyError::Vcpu)
        };
        let vcpus = frame.vcpus.iter().zip(cpuids).map(set_up).collect::<Result<_, _>>()?;
        Ok(Box::new(Self { frame, vcpus, in_advance }))
    }
}

impl From<OpenKvm> for Standby {
    /// Nothing is made in advance.
    fn from(kvm: OpenKvm) -> Self {
        Self { kvm, ready: None, reservation: None }
    }
}

impl Standby {
    /// See [`OpenKvm::create_in_advance`].
    pub fn create_in_advance(&self) {
        self.kvm.create_in_advance();
    }

    /// Makes what a microVM of a shape needs, instead of what was made before.
    ///
    /// # Errors
    /// [`StandbyError`]; then nothing is kept.
    pub fn make(&mut self, shape: &Shape) -> Result<(), StandbyError> {
        (self.ready, self.reservation) = (None, None);
        let reservation = shape.reserve()?;
        let ready = Ready::make(&self.kvm, reservation.slots(), &shape.cpuids, true)?;
        self.ready = Some(Made::Ready(ready));
        self.reservation = Some(reservation);
        Ok(())
    }

    /// Whether something was made, or is being made.
    pub(super) fn has_begun(&self) -> bool {
        self.ready.is_some()
    }

    /// Begins to make it in a thread beside this one. If that fails, the start makes it again, and
    /// has the error.
    pub(super) fn make_beside(&mut self, shape: Shape) {
        let Ok(reservation) = shape.reserve() else { return };
        let (kvm, slots) = (self.kvm.share(), reservation.slots().to_vec());
        let thread = std::thread::Builder::new().name("make-vm".into());
        let thread = thread.spawn(move || Ready::make(&kvm, &slots, &shape.cpuids, false));
        if let Ok(thread) = thread {
            move_away(&thread);
            (self.ready, self.reservation) = (Some(Made::Beside(thread)), Some(reservation));
        }
    }

    /// The address space of the slots, for a plan to be executed in.
    pub(super) fn take_reservation(&mut self) -> Option<Reservation> {
        self.reservation.take()
    }

    /// Whether what was made is for this memory and this number of vCPUs. Waits for what is being
    /// made.
    pub(super) fn is_ready_for(&mut self, memory: &GuestMemory, vcpus: u8) -> bool {
        let ready = self.take_ready(memory, vcpus);
        self.ready = ready.map(Made::Ready);
        self.ready.is_some()
    }

    /// What was made, if it is for this memory and this number of vCPUs.
    pub(super) fn take_ready(&mut self, memory: &GuestMemory, vcpus: u8) -> Option<Box<Ready>> {
        let ready = match self.ready.take()? {
            Made::Ready(ready) => ready,
            Made::Beside(thread) => thread.join().ok()?.ok()?,
        };
        Some(ready).filter(|ready| ready.frame.fits(memory, vcpus))
    }

    /// Drops what was made.
    pub(super) fn discard(&mut self) {
        self.ready = None;
    }
}
