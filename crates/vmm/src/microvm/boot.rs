//! A microVM that boots a kernel.

use thiserror::Error;
use vm_memory::{GuestMemory as _, GuestMemoryError};

use firn_memory::{AnonymousError, GuestMemory};
use firn_snapshot::{LayoutError, MemoryLayout, PageSet};

use super::Microvm;
use super::parts::{AssembleError, Machine, Parts};
use super::standby::Standby;
use crate::arch::cpu_model::CpuModel;
use crate::arch::kernel::{self, Kernel, LoadKernelError};
use crate::arch::{boot_regs, cpu_features, cpuid};
use crate::config::{BootConfig, CpuChoice, SizeError, check_sizes};
use crate::i8042::KeyboardState;

/// Why a microVM did not boot. Everything that the attempt created is removed.
#[derive(Debug, Error)]
pub enum BootError {
    /// The sizes are invalid.
    #[error(transparent)]
    Size(#[from] SizeError),
    /// There is no memory layout of this size.
    #[error("cannot lay out guest memory")]
    Layout(#[from] LayoutError),
    /// Guest memory cannot be reserved.
    #[error("cannot reserve guest memory")]
    Memory(#[from] AnonymousError),
    /// Guest memory belongs to a snapshot: a defect of firn.
    #[error("a kernel cannot be loaded into the sealed memory of a snapshot")]
    SealedMemory,
    /// The host does not have the requested processor.
    #[error(
        "this host's processor or KVM does not offer {model} (it lacks {missing}): use --cpu {best}, or omit --cpu"
    )]
    CpuModel {
        /// The processor.
        model: CpuModel,
        /// The missing features.
        missing: String,
        /// The best processor that the host offers.
        best: CpuModel,
    },
    /// The parts cannot be assembled.
    #[error(transparent)]
    Assemble(#[from] AssembleError),
    /// The kernel cannot be loaded.
    #[error(transparent)]
    Kernel(#[from] LoadKernelError),
    /// The guest's generation id cannot be written.
    #[error("cannot write the VM generation id")]
    Generation(#[source] GuestMemoryError),
    /// A vCPU cannot be set up.
    #[error("cannot set up vCPU {vcpu}")]
    Vcpu {
        /// Number of the vCPU.
        vcpu: u8,
        /// KVM's error.
        source: kvm_ioctls::Error,
    },
}

impl Microvm {
    /// Makes a microVM and loads a kernel into it; [`Microvm::resume`] starts it.
    ///
    /// # Errors
    /// See [`BootError`].
    pub fn boot(config: BootConfig, kvm: impl Into<Standby>) -> Result<Self, BootError> {
        let standby = kvm.into();
        let kvm = &standby.kvm;
        let BootConfig { mut kernel, mut initramfs, vcpus, devices, .. } = config;
        let generation = config.host.generation;
        check_sizes(vcpus, config.memory)?;
        let mut memory = GuestMemory::anonymous(MemoryLayout::for_size(config.memory)?)?;
        // The kernel is loaded by a view that logs nothing.
        let guest = memory.vm_memory();
        if config.track_writes {
            memory.track_writes();
        }
        let offered = kvm.cpuid.as_slice();
        let model = match config.cpu {
            CpuChoice::Best => CpuModel::best(offered),
            CpuChoice::AtMost(model) => CpuModel::best(offered).min(model),
            CpuChoice::Exactly(model) => model,
        };
        let lacking = model.lacking(offered);
        if !lacking.is_empty() {
            let missing = cpu_features::describe_all(&lacking);
            return Err(BootError::CpuModel { model, missing, best: CpuModel::best(offered) });
        }
        let keyboard = config.legacy_devices.then(KeyboardState::default);
        let machine = Machine { keyboard, devices, ..Machine::default() };
        let parts = Parts::assemble(config.host, standby, memory, vcpus, machine)?;

        // The memory of a boot is anonymous, never sealed.
        let guest = guest.physical_memory().ok_or(BootError::SealedMemory)?;
        let mut kernel = Kernel {
            kernel: &mut kernel,
            initramfs: initramfs.as_mut(),
            cmdline: &config.cmdline,
            device_arguments: config.device_arguments,
            vcpus,
            virtio_devices: parts.devices.len(),
            legacy_devices: config.legacy_devices,
        };
        let entry = kernel::load(guest, &mut kernel)?;
        // No snapshot has any of it yet.
        let mut all = PageSet::new(parts.vm.memory.layout().pages());
        all.insert_range(0..parts.vm.memory.layout().pages());
        parts.vm.memory.mark_written(&all);
        if let Some(generation) = generation {
            parts.vm.write_generation(generation).map_err(BootError::Generation)?;
        }

        let mut cpuids = Vec::with_capacity(parts.vcpus.len());
        for (vcpu, fd) in (0u8..).zip(&parts.vcpus) {
            let failed = |source| BootError::Vcpu { vcpu, source };
            let mut list =
                cpuid::for_vcpu(&parts.kvm.cpuid, model, vcpu, vcpus, parts.kvm.has_tsc_deadline());
            if config.smt {
                cpuid::pair_threads(&mut list, vcpu, vcpus);
            }
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
}

#[cfg(test)]
#[path = "boot_tests.rs"]
mod tests;
