//! The two ways a microVM begins: by booting a kernel, or from a snapshot.

use std::io;
use std::path::Path;
use std::time::Instant;

use serde::Serialize;
use thiserror::Error;
use uuid::Uuid;
use vm_memory::{GuestMemory as _, GuestMemoryError};

use firn_base::nanoseconds;
use firn_memory::{AnonymousError, CopyChunkError, GuestMemory};
use firn_snapshot::{LayoutError, MemoryLayout, Snapshot};

use super::parts::{AssembleError, Parts};
use super::virtio_set::{DiskError, Disks};
use super::{Argument, Microvm};
use crate::ahead;
use crate::arch::cpu_model::CpuModel;
use crate::arch::{boot_regs, cpuid, layout};
use crate::boot::{self, DEFAULT_CMDLINE, Kernel, LoadKernelError};
use crate::config::{BootConfig, HostConfig, SizeError, check_sizes};
use crate::console::SerialRegisters;
use crate::kvm::{Faults, OpenKvm, OpenKvmError};
use crate::kvm_index::KvmIndex;
use crate::open_file::OpenFile;
use crate::state::{DecodeStateError, MachineState};
use crate::vcpu;
use crate::vcpu::state::RestoreVcpuError;
use crate::vm::{VmError, VmState};

/// The guest's wish to be told of pages that it has to wait for (`Documentation/virt/kvm/x86/msr.rst`).
const MSR_KVM_ASYNC_PF_EN: u32 = 0x4b56_4d02;

/// Why a microVM did not boot. Nothing of it is left over.
#[derive(Debug, Error)]
pub enum BootError {
    /// Sizes that cannot be.
    #[error(transparent)]
    Size(#[from] SizeError),
    /// No memory layout of this size.
    #[error("laying out guest memory")]
    Layout(#[from] LayoutError),
    /// Guest memory could not be reserved.
    #[error("reserving guest memory")]
    Memory(#[from] AnonymousError),
    /// Guest memory is a snapshot's: a defect of firn.
    #[error("a kernel cannot be loaded into the sealed memory of a snapshot")]
    SealedMemory,
    /// A disk cannot be used.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The host does not have the processor that was asked for.
    #[error(
        "this host's processor or KVM offers no {model} (it lacks {missing}): ask for {best}, or leave it to firn"
    )]
    CpuModel {
        /// The processor.
        model: CpuModel,
        /// What is missing of it.
        missing: String,
        /// The best that the host has.
        best: CpuModel,
    },
    /// The parts could not be put together.
    #[error(transparent)]
    Assemble(#[from] AssembleError),
    /// The kernel could not be loaded.
    #[error(transparent)]
    Kernel(#[from] LoadKernelError),
    /// The guest's generation id could not be written.
    #[error("writing the VM generation id")]
    Generation(#[source] GuestMemoryError),
    /// A vCPU could not be prepared.
    #[error("preparing vCPU {vcpu}")]
    Vcpu {
        /// Number of the vCPU.
        vcpu: u8,
        /// What KVM said.
        source: kvm_ioctls::Error,
    },
}

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
        "this host's processor or KVM lacks what the snapshot's guest was given ({missing}): \
         it was frozen on {brand}; thaw on such a host, or freeze the function again here"
    )]
    CpuFeatures {
        /// The processor of the freeze.
        brand: String,
        /// The features that are missing.
        missing: String,
    },
    /// The processor is of another make.
    #[error(
        "the snapshot was frozen on a processor of {snapshot}, this host's is of {host}: thaw on \
         such a host, or freeze the function again here"
    )]
    CpuVendor {
        /// Vendor at the freeze.
        snapshot: String,
        /// Vendor here.
        host: String,
    },
}

/// Why a snapshot was not restored. Nothing of the microVM is left over.
#[derive(Debug, Error)]
pub enum RestoreError {
    /// The parts of the snapshot contradict each other: a defect of the writer.
    #[error("the snapshot contradicts itself: {0}")]
    Contradiction(&'static str),
    /// A disk cannot be used.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The parts could not be put together.
    #[error(transparent)]
    Assemble(#[from] AssembleError),
    /// Sealed memory could not be copied.
    #[error("copying ahead what the guest will write")]
    Copy(#[from] CopyChunkError),
    /// The virtual machine's state could not be set.
    #[error("restoring the virtual machine")]
    Vm(#[from] VmError),
    /// A vCPU's state could not be set.
    #[error("restoring a vCPU")]
    Vcpu(#[from] RestoreVcpuError),
    /// A device's state is not one that it can have.
    #[error("restoring the devices")]
    Device(#[from] crate::virtio::RestoreDeviceError),
    /// The guest could not be told that it is a clone.
    #[error("telling the guest that it is a clone")]
    Generation(#[from] GenerationError),
}

/// Why a guest was not given a new generation id.
#[derive(Debug, Error)]
pub enum GenerationError {
    /// Guest memory refused it.
    #[error("writing the VM generation id")]
    Memory(#[source] GuestMemoryError),
    /// It could not be announced.
    #[error("raising the interrupt that announces the VM generation id")]
    Interrupt(#[source] io::Error),
}

/// Why a paused guest was not given another generation id.
#[derive(Debug, Error)]
pub enum RenewError {
    /// It is not known whether the guest listens.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// It was not given.
    #[error(transparent)]
    Generation(#[from] GenerationError),
}

/// The machine of a snapshot, read and found fit for this host.
pub struct FrozenMachine<'a> {
    snapshot: &'a Snapshot,
    state: MachineState,
    kvm: OpenKvm,
}

/// What a restore of machine state did.
#[derive(Clone, Debug, Serialize)]
pub struct RestoreReport {
    /// Making the VM, its slots, irqchip, devices and vCPUs, ns.
    pub assemble_ns: u64,
    /// Looking for what of sealed memory is written for certain, and copying it, ns.
    pub copy_ahead_ns: u64,
    /// Bytes that were copied of it, in chunks of 2 MiB; 0 where no memory is sealed.
    pub copied_ahead_bytes: u64,
    /// Setting their state, ns.
    pub state_ns: u64,
    /// KVM's own tables, where the plan has a complete index.
    pub kvm_index: KvmIndex,
    /// MSRs that this host's KVM refuses to set and that have the right value anyway, by vCPU.
    pub kept_msrs: Vec<(u8, u32)>,
}

impl Microvm {
    /// Makes a microVM and loads a kernel into it; [`Microvm::resume`] starts it.
    ///
    /// # Errors
    /// See [`BootError`].
    pub fn boot(config: BootConfig, kvm: OpenKvm) -> Result<Self, BootError> {
        let BootConfig { mut kernel, mut initramfs, vcpus, .. } = config;
        let generation = config.host.generation;
        check_sizes(vcpus, config.memory)?;
        let disks = Disks::of_boot(config.root, config.overlay)?;
        let memory = GuestMemory::anonymous(MemoryLayout::for_size(config.memory)?)?;
        let serial = SerialRegisters::default();
        let offered = kvm.cpuid.as_slice();
        let model = config.cpu.unwrap_or_else(|| CpuModel::best(offered));
        let lacking = model.lacking(offered);
        if !lacking.is_empty() {
            let missing = cpuid::describe_all(&lacking);
            return Err(BootError::CpuModel { model, missing, best: CpuModel::best(offered) });
        }
        let parts = Parts::assemble(config.host, kvm, memory, vcpus, Some(disks), serial)?;

        let cmdline = match &config.cmdline {
            Some(extra) => format!("{DEFAULT_CMDLINE} {extra}"),
            None => DEFAULT_CMDLINE.to_owned(),
        };
        let guest = parts.vm.memory.vm_memory();
        // A boot's memory is the microVM's own.
        let guest = guest.physical_memory().ok_or(BootError::SealedMemory)?;
        let mut kernel = Kernel {
            kernel: &mut kernel,
            initramfs: &mut initramfs,
            cmdline: &cmdline,
            vcpus,
            virtio_devices: parts.devices.len(),
        };
        let entry = boot::load(guest, &mut kernel)?;
        if let Some(generation) = generation {
            parts.vm.write_generation(generation).map_err(BootError::Generation)?;
        }

        let mut cpuids = Vec::with_capacity(parts.vcpus.len());
        for (vcpu, fd) in (0u8..).zip(&parts.vcpus) {
            let failed = |source| BootError::Vcpu { vcpu, source };
            let list =
                cpuid::for_vcpu(&parts.kvm.cpuid, model, vcpu, vcpus, parts.kvm.tsc_deadline());
            fd.set_cpuid2(&list).map_err(failed)?;
            cpuids.push(list);
            if vcpu == 0 {
                let mut sregs = fd.get_sregs().map_err(failed)?;
                boot_regs::set_long_mode(&mut sregs);
                fd.set_sregs(&sregs).map_err(failed)?;
                fd.set_regs(&boot_regs::regs(entry)).map_err(failed)?;
            }
        }
        Ok(Self { cpu: Some(model), ..parts.start(cpuids, None)? })
    }

    /// Makes a microVM from a frozen machine over memory that a plan has laid out;
    /// [`Microvm::resume`] starts it. The guest finds a new generation id and its old vsock
    /// connections reset. `root` is the snapshot's root disk, if it has one: [`open_root_disk`](crate::open_root_disk)
    /// opens it.
    ///
    /// # Errors
    /// See [`RestoreError`].
    pub fn restore(
        frozen: FrozenMachine<'_>,
        memory: GuestMemory,
        host: HostConfig,
        root: Option<OpenFile>,
    ) -> Result<(Self, RestoreReport), RestoreError> {
        let begin = Instant::now();
        let FrozenMachine { snapshot, state, kvm } = frozen;
        let description = &snapshot.manifest().description;
        let vcpus = u8::try_from(state.vcpus.len())
            .ok()
            .filter(|vcpus| u32::from(*vcpus) == description.vcpus)
            .ok_or(RestoreError::Contradiction("its manifest has another number of vCPUs"))?;
        let disks = Disks::of_snapshot(snapshot, root)?;
        let generation = host.generation;
        let parts = Parts::assemble(host, kvm, memory, vcpus, disks, state.serial)?;
        let assembled = Instant::now();

        // Before anything is set that KVM writes to guest memory for.
        let memory = parts.vm.memory.vm_memory();
        for vcpu in &state.vcpus {
            ahead::copy_of_vcpu(&memory, &(vcpu.regs, vcpu.sregs), &vcpu.msrs)?;
        }
        ahead::copy_of_devices(&memory, &state.virtio)?;
        let copied_ahead = memory.chunk_copies();
        drop(memory);
        let copied = Instant::now();

        let (mut cpuids, mut kept_msrs) = (Vec::new(), Vec::new());
        for ((id, fd), vcpu) in (0u8..).zip(&parts.vcpus).zip(&state.vcpus) {
            let restored = vcpu::state::restore(&parts.kvm.kvm, fd, id, vcpu)?;
            cpuids.push(restored.cpuid);
            kept_msrs.extend(restored.kept_msrs.into_iter().map(|msr| (id, msr)));
        }
        // After the local APICs, for the I/O APIC delivers what it has pending into them.
        parts.vm.restore(&state.vm)?;
        parts.devices.restore(&state.virtio)?;
        let restored = Instant::now();
        let kvm_index = match parts.vcpus.first() {
            Some(vcpu) => parts.vm.fill_index(&parts.kvm.kvm, vcpu)?,
            None => KvmIndex::NotAsked,
        };
        let microvm = parts.start(cpuids, Some(description.id))?;
        if let Some(generation) = generation {
            microvm.announce(generation, &state.vm)?;
        }
        let report = RestoreReport {
            assemble_ns: nanoseconds(assembled - begin),
            copy_ahead_ns: nanoseconds(copied - assembled),
            copied_ahead_bytes: copied_ahead.bytes,
            state_ns: nanoseconds(restored - copied),
            kvm_index,
            kept_msrs,
        };
        Ok((microvm, report))
    }

    /// Gives the paused guest another generation id, as a clone of its own snapshot would have.
    ///
    /// # Errors
    /// See [`RenewError`].
    pub fn renew_generation(&self, generation: Uuid) -> Result<(), RenewError> {
        let state = self.vm.save()?;
        Ok(self.announce(generation, &state)?)
    }

    /// Shows the guest a new generation id, and interrupts it where it listens.
    fn announce(&self, generation: Uuid, state: &VmState) -> Result<(), GenerationError> {
        self.vm.write_generation(generation).map_err(GenerationError::Memory)?;
        if state.accepts(layout::GENERATION_GSI) {
            self.generation_irq.write(1).map_err(GenerationError::Interrupt)?;
        }
        Ok(())
    }
}

impl<'a> FrozenMachine<'a> {
    /// Reads the machine state of a snapshot, and checks that this host can provide what its guest
    /// was given: nothing is made before that is known.
    ///
    /// # Errors
    /// See [`IncompatibleError`].
    pub fn open(snapshot: &'a Snapshot, kvm: &Path) -> Result<Self, IncompatibleError> {
        Self::open_on(snapshot, OpenKvm::open(kvm)?)
    }

    /// The same on a KVM that is open already.
    ///
    /// # Errors
    /// See [`IncompatibleError`].
    pub fn open_on(snapshot: &'a Snapshot, kvm: OpenKvm) -> Result<Self, IncompatibleError> {
        let (version, bytes) = snapshot.machine_state();
        let state = MachineState::decode(version, bytes)?;
        let offered = cpuid::for_vcpu(&kvm.cpuid, CpuModel::Host, 0, 1, kvm.tsc_deadline());
        check_cpu(&snapshot.manifest().description.cpu, offered.as_slice())?;
        Ok(Self { snapshot, state, kvm })
    }
}

impl FrozenMachine<'_> {
    /// Changes an argument of the first instruction, in the first vCPU's registers: for a guest that was
    /// [prepared](Microvm::prepare) and frozen before it began. Its memory stays as it is.
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

    /// Has every fault on guest memory met in the vCPU's own thread, which waits for the page. Otherwise KVM lets a
    /// thread of the kernel wait, and halts the vCPU meanwhile, or tells the guest to do something else.
    ///
    /// KVM has no switch for that, but it does so where it does not see the guest halt: HLT then stays in guest mode.
    pub fn fault_in_vcpu_threads(&mut self) {
        self.kvm.faults = Faults::InVcpuThreads;
        let msrs = self.state.vcpus.iter_mut().flat_map(|vcpu| &mut vcpu.msrs);
        msrs.filter(|msr| msr.index == MSR_KVM_ASYNC_PF_EN).for_each(|msr| msr.data = 0);
    }
}

fn check_cpu(
    needed: &firn_snapshot::CpuRequirement,
    offered: &[kvm_bindings::kvm_cpuid_entry2],
) -> Result<(), IncompatibleError> {
    let (vendor, _) = cpuid::vendor_and_brand(offered);
    if vendor != needed.vendor {
        return Err(IncompatibleError::CpuVendor { snapshot: needed.vendor.clone(), host: vendor });
    }
    let missing = cpuid::missing(&needed.features, offered);
    if missing.is_empty() {
        return Ok(());
    }
    let missing = cpuid::describe_all(&missing);
    Err(IncompatibleError::CpuFeatures { brand: needed.brand.clone(), missing })
}
