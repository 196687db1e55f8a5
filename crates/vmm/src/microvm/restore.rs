//! A microVM that continues from a snapshot.

use std::time::Instant;

use firn_base::nanoseconds;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use firn_memory::{CopyChunkError, GuestMemory};

use super::Microvm;
use super::frozen::FrozenMachine;
use super::generation::GenerationError;
use super::held::Held;
use super::parts::{AssembleError, Machine, Parts};
use crate::config::HostConfig;
use crate::cow::copy_ahead::{copy_for_devices, copy_for_vcpu};
use crate::kvm::{KvmIndex, VmError};
use crate::vcpu;
use crate::vcpu::state::{RestoreVcpuError, Timers};
use crate::virtio::RestoreDeviceError;

/// Why a snapshot was not restored. Everything that the attempt created is removed.
#[derive(Debug, Error)]
pub enum RestoreError {
    /// The parts of the snapshot contradict each other: a defect of the writer.
    #[error("the snapshot contradicts itself: {0}")]
    Contradiction(&'static str),
    /// The clock cannot advance.
    #[error(
        "the guest's clock cannot advance: its host saved no wall clock with it (that takes Linux \
         5.16, and the time-stamp counter as its clock)"
    )]
    NoWallClock,
    /// The parts cannot be assembled.
    #[error(transparent)]
    Assemble(#[from] AssembleError),
    /// Sealed memory cannot be copied.
    #[error("cannot copy sealed memory before the start")]
    Copy(#[from] CopyChunkError),
    /// The virtual machine's state cannot be set.
    #[error("cannot restore the virtual machine")]
    Vm(#[from] VmError),
    /// A vCPU's state cannot be set.
    #[error("cannot restore a vCPU")]
    Vcpu(#[from] RestoreVcpuError),
    /// A device's state is invalid.
    #[error("cannot restore the devices")]
    Device(#[from] RestoreDeviceError),
    /// The guest has no new generation id.
    #[error("cannot tell the guest that it is a clone")]
    Generation(#[from] GenerationError),
}

/// The work and the durations of a restore of machine state.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RestoreReport {
    /// Whether the VM and its vCPUs were made before the request.
    #[serde(default)]
    pub standby: bool,
    /// Creating the VM, its slots, irqchip, devices and vCPUs, ns.
    pub assemble_ns: u64,
    /// Copying the part of sealed memory that is certainly written, ns.
    pub copy_ahead_ns: u64,
    /// Bytes of these copies, in chunks of 2 MiB; 0 if no memory is sealed.
    pub copied_ahead_bytes: u64,
    /// Setting the state of all parts, ns.
    pub state_ns: u64,
    /// KVM's own tables, if the plan has a complete index.
    pub kvm_index: KvmIndex,
    /// MSRs that this host's KVM refuses to set and that already have the right value, by vCPU.
    pub kept_msrs: Vec<(u8, u32)>,
}

impl Microvm {
    /// Makes a microVM from a frozen machine and the memory that a plan laid out;
    /// [`Microvm::resume`] starts it. The guest finds a new generation id and its old vsock
    /// connections reset. `host` has a side for each of the machine's
    /// [devices](FrozenMachine::devices).
    ///
    /// # Errors
    /// See [`RestoreError`].
    pub fn restore(
        frozen: FrozenMachine<'_>,
        memory: GuestMemory,
        host: HostConfig,
    ) -> Result<(Self, RestoreReport), RestoreError> {
        let begin = Instant::now();
        let FrozenMachine { snapshot, mut state, standby, held } = frozen;
        let description = &snapshot.manifest().description;
        let vcpus = u8::try_from(state.vcpus.len())
            .ok()
            .filter(|vcpus| u32::from(*vcpus) == description.vcpus)
            .ok_or(RestoreError::Contradiction("its manifest has another number of vCPUs"))?;
        if !state.vm.advance_clock(host.advance_clock) {
            return Err(RestoreError::NoWallClock);
        }
        let generation = host.generation;
        let machine = Machine {
            devices: state.devices(),
            serial: state.serial,
            keyboard: state.legacy.as_ref().map(|legacy| legacy.keyboard.clone()),
            known: &description.disks,
        };
        let mut parts = Parts::assemble(host, standby, memory, vcpus, machine)?;
        let assembled = Instant::now();

        let timers = held.then(|| state.vcpus.iter_mut().map(Timers::take).collect());

        // Before the MSRs are set that make KVM write to guest memory.
        let memory = parts.vm.memory.vm_memory();
        for vcpu in &state.vcpus {
            copy_for_vcpu(&memory, &(vcpu.regs, vcpu.sregs), &vcpu.msrs)?;
        }
        copy_for_devices(&memory, state.devices.iter().map(|device| &device.transport))?;
        let copied_ahead = memory.chunk_copies();
        drop(memory);
        let copied = Instant::now();

        let (mut cpuids, mut kept_msrs) = (Vec::new(), Vec::new());
        let standby = parts.in_advance;
        let mut fresh = std::mem::take(&mut parts.fresh).into_iter();
        for ((id, fd), vcpu) in (0u8..).zip(&parts.vcpus).zip(&state.vcpus) {
            let restored = vcpu::state::restore(&parts.kvm.kvm, fd, id, vcpu, fresh.next())?;
            cpuids.push(restored.cpuid);
            kept_msrs.extend(restored.kept_msrs.into_iter().map(|msr| (id, msr)));
        }
        // After the local APICs: the I/O APIC delivers its pending interrupts to them.
        parts.vm.restore(&state.vm)?;
        if let Some(legacy) = &state.legacy {
            parts.vm.restore_pit(&legacy.pit)?;
        }
        parts.devices.restore(&state.devices)?;
        let restored = Instant::now();
        let kvm_index = match parts.vcpus.first() {
            Some(vcpu) => parts.vm.fill_index(&parts.kvm.kvm, vcpu)?,
            None => KvmIndex::NotAsked,
        };
        if timers.is_none() {
            parts.vm.set_clock(&state.vm)?;
        }
        let mut microvm = parts.start(cpuids, Some(description.id))?;
        microvm.note = state.note;
        match timers {
            Some(timers) => microvm.held = Some(Held { vm: state.vm, timers }),
            None => {
                if let Some(generation) = generation {
                    microvm.announce(generation, &state.vm)?;
                }
            }
        }
        let report = RestoreReport {
            standby,
            assemble_ns: nanoseconds(assembled - begin),
            copy_ahead_ns: nanoseconds(copied - assembled),
            copied_ahead_bytes: copied_ahead.bytes,
            state_ns: nanoseconds(restored - copied),
            kvm_index,
            kept_msrs,
        };
        Ok((microvm, report))
    }
}
