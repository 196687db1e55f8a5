//! Freezing: pause, save, seal.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use firn_base::nanoseconds;
use thiserror::Error;
use uuid::Uuid;

use firn_snapshot::{
    Begin, Begun, CpuRequirement, Description, Freeze, FreezeReport, FunctionInfo, Machine, Seal,
    Target, Writer,
};

use super::Microvm;
use crate::arch::cpu_features::features;
use crate::arch::cpuid;
use crate::kvm::VmError;
use crate::state::{LegacyState, MACHINE_STATE_VERSION, MachineState};
use crate::vcpu::VcpuThreadError;
use crate::vcpu::state::{SaveVcpuError, msr_indices};

/// A freeze between its two steps. Neither vCPUs nor devices may run meanwhile: the state of both
/// is saved, and guest memory for an extent is not.
pub(super) struct Freezing {
    writer: Writer,
    pause_ns: u64,
    save_ns: u64,
}

/// Why a microVM was not frozen.
#[derive(Debug, Error)]
pub enum FreezeError {
    /// A vCPU did not stop.
    #[error("cannot pause the microVM")]
    Pause(#[source] VcpuThreadError),
    /// The guest powered itself off or crashed, so no clone could continue.
    #[error("the guest has ended and cannot be frozen")]
    Ended,
    /// A vCPU's state cannot be read.
    #[error("cannot save a vCPU")]
    Vcpu(#[from] SaveVcpuError),
    /// The state of the virtual machine cannot be read.
    #[error("cannot save the virtual machine")]
    Vm(#[from] VmError),
    /// The list of MSRs cannot be read.
    #[error("cannot read KVM's list of MSRs")]
    MsrList(#[source] kvm_ioctls::Error),
    /// The machine state cannot be encoded.
    #[error("cannot encode the machine state")]
    Encode(#[source] postcard::Error),
    /// The pages of guest memory that are in use cannot be listed.
    #[error("cannot read from the kernel which pages of guest memory are in use")]
    Pages(#[source] io::Error),
    /// The pages that the guest reported free cannot be listed.
    #[error(
        "cannot read from the kernel which free pages the guest has used since it reported them"
    )]
    Reported(#[source] io::Error),
    /// The file of a drive cannot be synced.
    #[error("cannot sync the file of drive {drive}")]
    Sync {
        /// The drive.
        drive: String,
        /// The system's error.
        source: io::Error,
    },
    /// A disk cannot be described.
    #[error("cannot describe the guest's disks")]
    Disk(#[source] firn_snapshot::DiskError),
    /// The snapshot cannot be written.
    #[error(transparent)]
    Write(#[from] firn_snapshot::FreezeError),
}

/// After each step, and after an error, the microVM is paused and can be resumed. Between the two
/// steps [`Microvm::run`] must not serve it: [`Microvm::write`] and [`Microvm::seal`] are called
/// between the same two events.
impl Freeze for Microvm {
    type Error = FreezeError;

    fn write(&mut self, begin: Begin, files: Vec<OwnedFd>) -> Result<Begun, FreezeError> {
        let start = Instant::now();
        self.freezing = None;
        self.pause().map_err(FreezeError::Pause)?;
        if self.has_ended() {
            return Err(FreezeError::Ended);
        }
        let paused = Instant::now();
        self.devices
            .sync_drives()
            .map_err(|(drive, source)| FreezeError::Sync { drive, source })?;
        let state = self.save()?;
        let saved = Instant::now();
        let Begin { target, function } = begin;
        let reported = match target {
            Target::Files { .. } | Target::Written => {
                self.vm.memory.reported_free().map_err(FreezeError::Reported)?
            }
            Target::Extent => Vec::new(),
        };
        let machine = Machine {
            description: self.describe(&state, function)?,
            state_version: MACHINE_STATE_VERSION,
            state: state.encode().map_err(FreezeError::Encode)?,
            reported,
        };
        let mut pages = self.vm.memory.pages();
        if target == Target::Written
            && let Some(written) = self.vm.written()?
        {
            pages = pages.with_written(written);
        }
        let begun =
            self.devices.with_overlay(|disk| Writer::begin(machine, &pages, disk, target, files));
        let (writer, begun) = begun?;
        self.freezing = Some(Freezing {
            writer,
            pause_ns: nanoseconds(paused - start),
            save_ns: nanoseconds(saved - paused),
        });
        Ok(begun)
    }

    fn seal(&mut self, seal: Seal, files: Vec<OwnedFd>) -> Result<FreezeReport, FreezeError> {
        let freezing = self.freezing.take().ok_or(firn_snapshot::FreezeError::NotBegun)?;
        let Freezing { writer, pause_ns, save_ns } = freezing;
        let pages = self.vm.memory.pages();
        let report = self.devices.with_overlay(|disk| writer.seal(&pages, disk, seal, files))?;
        // What was written until now is in the snapshot.
        self.vm.written()?;
        self.vm.memory.forget_writes();
        Ok(FreezeReport { pause_ns, save_ns, ..report })
    }
}

impl Microvm {
    pub(super) fn save(&self) -> Result<MachineState, FreezeError> {
        let indices: Arc<[u32]> = msr_indices(&self.kvm).map_err(FreezeError::MsrList)?.into();
        let xsave_size = self.vm.fd.check_extension_int(kvm_ioctls::Cap::Xsave2);
        let vcpus = self
            .vcpus
            .iter()
            .map(|vcpu| Ok(vcpu.save(&indices, xsave_size).map_err(FreezeError::Pause)??))
            .collect::<Result<_, FreezeError>>()?;
        let keyboard = self.bus.keyboard().map(|keyboard| keyboard.state());
        let legacy = match keyboard {
            Some(keyboard) => Some(LegacyState { keyboard, pit: self.vm.save_pit()? }),
            None => None,
        };
        Ok(MachineState {
            vm: self.vm.save()?,
            vcpus,
            serial: self.bus.serial().state().into(),
            legacy,
            devices: self.devices.save(),
            note: self.note.clone(),
        })
    }

    fn describe(
        &self,
        state: &MachineState,
        function: Option<FunctionInfo>,
    ) -> Result<Description, FreezeError> {
        let cpuid = state.vcpus.first().map(|vcpu| vcpu.cpuid.as_slice()).unwrap_or_default();
        let (vendor, brand) = cpuid::vendor_and_brand(cpuid);
        Ok(Description {
            id: Uuid::new_v4(),
            parent: self.parent,
            created_ns: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .ok()
                .and_then(|age| u64::try_from(age.as_nanos()).ok())
                .unwrap_or_default(),
            firn_version: env!("CARGO_PKG_VERSION").to_owned(),
            vcpus: u32::try_from(state.vcpus.len()).unwrap_or(u32::MAX),
            cpu: CpuRequirement { vendor, brand, features: features(cpuid) },
            disks: self.devices.described_disks().map_err(FreezeError::Disk)?,
            function,
        })
    }
}

#[cfg(test)]
#[path = "freeze_tests.rs"]
mod tests;
