//! The machine of a snapshot, before its restore.

use firn_memory::{GuestMemory, Leaf, Reservation};
use firn_snapshot::{CpuRequirement, Snapshot};
use kvm_bindings::kvm_cpuid_entry2;
use thiserror::Error;

use super::Argument;
use super::standby::{Shape, Standby};
use crate::arch::cpu_features::{describe_all, missing};
use crate::arch::cpu_model::CpuModel;
use crate::arch::cpuid;
use crate::config::Devices;
use crate::kvm::{FaultHandling, OpenKvmError};
use crate::state::{DecodeStateError, MachineState};

/// The MSR with which a guest enables asynchronous page faults
/// (`Documentation/virt/kvm/x86/msr.rst`).
const MSR_KVM_ASYNC_PF_EN: u32 = 0x4b56_4d02;

/// Why this host cannot restore a snapshot. Nothing was started.
#[derive(Debug, Error)]
pub enum IncompatibleError {
    /// KVM cannot be used.
    #[error(transparent)]
    Kvm(#[from] OpenKvmError),
    /// The machine state cannot be read.
    #[error(transparent)]
    State(#[from] DecodeStateError),
    /// The host's processor lacks features that the guest uses.
    #[error(
        "this host's processor or KVM lacks features that the snapshot's guest uses ({missing}): \
         it was frozen on {brand}; thaw on such a host, or freeze the function again here"
    )]
    CpuFeatures {
        /// The processor at the freeze.
        brand: String,
        /// The missing features.
        missing: String,
    },
    /// The processor has another vendor.
    #[error(
        "the snapshot was frozen on a processor of {snapshot}, and this host's processor is of {host}: \
         thaw on a host with a processor of {snapshot}, or freeze the function again here"
    )]
    CpuVendor {
        /// The vendor at the freeze.
        snapshot: String,
        /// The vendor of this host's processor.
        host: String,
    },
}

/// The machine of a snapshot, parsed and compatible with this host.
pub struct FrozenMachine<'a> {
    pub(super) snapshot: &'a Snapshot,
    pub(super) state: MachineState,
    pub(super) standby: Standby,
    pub(super) held: bool,
}

impl<'a> FrozenMachine<'a> {
    /// Parses the machine state of a snapshot, and checks that this host has the processor features
    /// that its guest uses. Nothing is created yet.
    ///
    /// # Errors
    /// See [`IncompatibleError`].
    pub fn open_on(
        snapshot: &'a Snapshot,
        kvm: impl Into<Standby>,
    ) -> Result<Self, IncompatibleError> {
        let standby = kvm.into();
        let kvm = &standby.kvm;
        let (version, bytes) = snapshot.machine_state();
        let state = MachineState::decode(version, bytes)?;
        let offered = cpuid::for_vcpu(&kvm.cpuid, CpuModel::Host, 0, 1, kvm.has_tsc_deadline());
        check_cpu(&snapshot.manifest().description.cpu, offered.as_slice())?;
        Ok(Self { snapshot, state, standby, held: false })
    }
}

impl FrozenMachine<'_> {
    /// The shape of a microVM that is restored by a plan with these leaves.
    #[must_use]
    pub fn shape(&self, leaf: Leaf) -> Shape {
        let layout = self.snapshot.manifest().layout.clone();
        let cpuids = self.state.vcpus.iter().map(|vcpu| vcpu.cpuid.clone()).collect();
        Shape { layout, leaf, cpuids }
    }

    /// The guest's virtio devices.
    #[must_use]
    pub fn devices(&self) -> Devices {
        self.state.devices()
    }

    /// What was [noted](super::Microvm::set_note) with the machine.
    #[must_use]
    pub fn note(&self) -> &[u8] {
        &self.state.note
    }

    /// Begins to make the VM and its vCPUs in a thread, for a plan with these leaves, unless they
    /// were [made in advance](Standby::make).
    pub fn make_beside(&mut self, leaf: Leaf) {
        if !self.standby.has_begun() {
            let shape = self.shape(leaf);
            self.standby.make_beside(shape);
        }
    }

    /// The address space of the VM that is made, for the plan to be executed in.
    pub fn take_reservation(&mut self) -> Option<Reservation> {
        self.standby.take_reservation()
    }

    /// Whether the VM that was [made in advance](Standby::make) or [beside](Self::make_beside) is
    /// one for this memory, so that [`Microvm::restore`](super::Microvm::restore) makes no other.
    pub fn is_ready_for(&mut self, memory: &GuestMemory) -> bool {
        let vcpus = u8::try_from(self.state.vcpus.len());
        vcpus.is_ok_and(|vcpus| self.standby.is_ready_for(memory, vcpus))
    }

    /// Leaves everything that depends on the moment of the resume, and the generation id, to
    /// [`Microvm::release`](super::Microvm::release): for a microVM that is restored in advance.
    pub fn hold(&mut self) {
        self.held = true;
    }

    /// Changes an argument of the first instruction, in the registers of the first vCPU. This is
    /// for a guest that was [prepared](super::Microvm::prepare) and frozen before its first
    /// instruction. Its memory is unchanged.
    pub fn set_argument(&mut self, argument: Argument, value: u64) {
        if let Some(vcpu) = self.state.vcpus.first_mut() {
            let registers = &mut vcpu.regs;
            *match argument {
                Argument::First => &mut registers.rdi,
                Argument::Second => &mut registers.rsi,
                Argument::Third => &mut registers.rdx,
                Argument::Fourth => &mut registers.rcx,
            } = value;
        }
    }

    /// The frequency of the guest's time-stamp counter, kHz.
    #[must_use]
    pub fn tsc_khz(&self) -> u32 {
        self.state.vcpus.first().map_or(0, |vcpu| vcpu.tsc_khz)
    }

    /// Makes the vCPU's own thread wait for every missing page of guest memory. By default a kernel
    /// thread may wait, while KVM halts the vCPU or lets the guest run another task.
    ///
    /// KVM has no option for this, but it does so if the guest's halts do not exit: HLT then stays
    /// in guest mode.
    pub fn fault_in_vcpu_threads(&mut self) {
        // It is chosen when the VM is made.
        self.standby.discard();
        self.standby.kvm.fault_handling = FaultHandling::InVcpuThreads;
        let msrs = self.state.vcpus.iter_mut().flat_map(|vcpu| &mut vcpu.msrs);
        msrs.filter(|msr| msr.index == MSR_KVM_ASYNC_PF_EN).for_each(|msr| msr.data = 0);
    }
}

/// What was [noted](super::Microvm::set_note) with the machine of a snapshot, before a KVM is
/// opened for it.
///
/// # Errors
/// The machine state cannot be read.
pub fn note_of(snapshot: &Snapshot) -> Result<Vec<u8>, DecodeStateError> {
    let (version, bytes) = snapshot.machine_state();
    Ok(MachineState::decode(version, bytes)?.note)
}

fn check_cpu(
    required: &CpuRequirement,
    offered: &[kvm_cpuid_entry2],
) -> Result<(), IncompatibleError> {
    let (vendor, _) = cpuid::vendor_and_brand(offered);
    if vendor != required.vendor {
        let snapshot = required.vendor.clone();
        return Err(IncompatibleError::CpuVendor { snapshot, host: vendor });
    }
    let missing = missing(&required.features, offered);
    if missing.is_empty() {
        return Ok(());
    }
    let missing = describe_all(&missing);
    Err(IncompatibleError::CpuFeatures { brand: required.brand.clone(), missing })
}
