//! What is made of a microVM before its snapshot is known.

use std::io;

use firn_memory::{GuestMemory, Leaf, Reservation};
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
    ready: Option<Box<Ready>>,
    reservation: Option<Reservation>,
}

/// A frame, and the state that its vCPUs have.
pub(super) struct Ready {
    pub(super) frame: Frame,
    pub(super) vcpus: Vec<Fresh>,
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
        let count = shape.cpuids.len();
        let vcpus = u8::try_from(count).map_err(|_| StandbyError::Vcpus(count))?;
        let reservation = Reservation::in_advance(shape.layout.clone(), shape.leaf)
            .map_err(StandbyError::Reserve)?;
        // SAFETY: no vCPU runs before `Frame::fits` has found guest memory at the slots' addresses.
        let frame = unsafe { Frame::create(&self.kvm, reservation.slots(), false, vcpus) }?;
        let mut fresh = Vec::new();
        for (fd, entries) in frame.vcpus.iter().zip(&shape.cpuids) {
            let cpuid =
                CpuId::from_entries(entries).map_err(|_| StandbyError::Cpuid(entries.len()))?;
            fresh.push(Fresh::set_up(&self.kvm.kvm, fd, cpuid).map_err(StandbyError::Vcpu)?);
        }
        self.ready = Some(Box::new(Ready { frame, vcpus: fresh }));
        self.reservation = Some(reservation);
        Ok(())
    }

    /// The address space of the slots, for a plan to be executed in.
    pub(super) fn take_reservation(&mut self) -> Option<Reservation> {
        self.reservation.take()
    }

    /// Whether what was made is for this memory and this number of vCPUs.
    pub(super) fn is_ready_for(&self, memory: &GuestMemory, vcpus: u8) -> bool {
        self.ready.as_ref().is_some_and(|ready| ready.frame.fits(memory, vcpus))
    }

    /// What was made, if it is for this memory and this number of vCPUs.
    pub(super) fn take_ready(&mut self, memory: &GuestMemory, vcpus: u8) -> Option<Box<Ready>> {
        let fits = self.is_ready_for(memory, vcpus);
        self.ready.take().filter(|_| fits)
    }

    /// Drops what was made.
    pub(super) fn discard(&mut self) {
        self.ready = None;
    }
}
