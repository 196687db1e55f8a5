//! Freezing: pause, save, seal.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use firn_base::{PageRange, nanoseconds};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use uuid::Uuid;

use firn_memory::GuestPages;
use firn_snapshot::{
    CpuRequirement, Description, ExtentContents, FunctionInfo, ImageKind, PoolTarget, SealReport,
    Writer, write_extent,
};

use super::Microvm;
use crate::arch::cpu_features::features;
use crate::arch::cpuid;
use crate::kvm::VmError;
use crate::state::{MACHINE_STATE_VERSION, MachineState};
use crate::vcpu::VcpuThreadError;
use crate::vcpu::state::{SaveVcpuError, msr_indices};

/// The place of a new snapshot. An existing snapshot is replaced completely, or not at all.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Destination {
    /// A directory for this snapshot.
    Directory(PathBuf),
    /// A pool: guest memory is written to it without a file in between.
    Pool {
        /// The socket of the pool's manager.
        socket: PathBuf,
        /// The snapshot's name in the pool.
        name: String,
    },
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) => write!(f, "{}", path.display()),
            Self::Pool { socket, name } => write!(f, "{name} in the pool at {}", socket.display()),
        }
    }
}

/// A request to freeze.
#[derive(Clone, Debug)]
pub struct FreezeRequest {
    /// The place of the snapshot.
    pub destination: Destination,
    /// Write zero pages to the directory, instead of leaving holes; a pool always contains them.
    pub dense: bool,
    /// The function, as the manifest describes it.
    pub function: Option<FunctionInfo>,
}

/// The output of a freeze, and the durations of its parts, in ns.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FreezeReport {
    /// Bringing all vCPUs out of guest mode.
    pub pause_ns: u64,
    /// Reading the machine state.
    pub save_ns: u64,
    /// Reading, digesting and writing guest memory, with a thread for each processor.
    pub image_ns: u64,
    /// Of that, reading guest memory and finding the pages that were never touched: the sum over
    /// all threads.
    pub read_ns: u64,
    /// Of that, finding zero pages and computing digests: the sum over all threads.
    pub digest_ns: u64,
    /// Of that, writing: the sum over all threads.
    pub write_ns: u64,
    /// Reading, digesting and writing the guest's disk.
    pub overlay_ns: u64,
    /// Writing the other parts and making all files durable.
    pub sync_ns: u64,
    /// Protecting files with fs-verity, or finding out that their file system has none.
    pub protect_ns: u64,
    /// Moving the snapshot to its place.
    pub publish_ns: u64,
    /// Pages that the image stores.
    pub stored_pages: u64,
    /// Pages of guest memory that are zero.
    pub zero_pages: u64,
    /// Zero pages that were written.
    pub zero_pages_written: u64,
    /// Bytes written to all files.
    pub bytes_written: u64,
    /// Bytes that all files take on the medium.
    pub disk_bytes: u64,
    /// The files that fs-verity protects.
    pub protected: Vec<String>,
}

/// Why a microVM was not frozen. An existing snapshot at the destination is unchanged.
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
    /// The root disk cannot be described.
    #[error("cannot describe the root disk")]
    Disk(#[source] firn_snapshot::DiskError),
    /// The snapshot cannot be written.
    #[error("cannot write the snapshot {destination}")]
    Write {
        /// The place of the snapshot.
        destination: Destination,
        /// Why it failed.
        source: firn_snapshot::FreezeError,
    },
}

impl Microvm {
    /// Pauses the microVM and writes a snapshot of it. Afterwards it stays paused.
    ///
    /// # Errors
    /// See [`FreezeError`]. The microVM stays paused and can be resumed.
    pub fn freeze(&mut self, request: FreezeRequest) -> Result<FreezeReport, FreezeError> {
        let begin = Instant::now();
        self.pause().map_err(FreezeError::Pause)?;
        if self.has_ended() {
            return Err(FreezeError::Ended);
        }
        let paused = Instant::now();
        let state = self.save()?;
        let saved = Instant::now();
        let description = self.describe(&state, request.function)?;
        let machine_state = state.encode().map_err(FreezeError::Encode)?;
        let pages = self.vm.memory.pages().map_err(FreezeError::Pages)?;
        let sealed = match &request.destination {
            Destination::Directory(path) => {
                let kind = if request.dense { ImageKind::Dense } else { ImageKind::Sparse };
                let reported = self.vm.memory.reported_free().map_err(FreezeError::Reported)?;
                self.write_directory(path, kind, &pages, reported, description, &machine_state)
            }
            Destination::Pool { socket, name } => {
                let mut target = PoolTarget::new(socket, name);
                self.write_extent(&mut target, &pages, description, &machine_state)
            }
        };
        let destination = request.destination;
        let sealed = sealed.map_err(|source| FreezeError::Write { destination, source })?;
        Ok(FreezeReport {
            pause_ns: nanoseconds(paused - begin),
            save_ns: nanoseconds(saved - paused),
            image_ns: nanoseconds(sealed.image),
            read_ns: nanoseconds(sealed.work.read),
            digest_ns: nanoseconds(sealed.work.digest),
            write_ns: nanoseconds(sealed.work.write),
            overlay_ns: nanoseconds(sealed.overlay),
            sync_ns: nanoseconds(sealed.sync),
            protect_ns: nanoseconds(sealed.protect),
            publish_ns: nanoseconds(sealed.publish),
            stored_pages: sealed.stored_pages,
            zero_pages: sealed.zero_pages,
            zero_pages_written: sealed.work.zero_pages_written,
            bytes_written: sealed.bytes_written,
            disk_bytes: sealed.disk_bytes,
            protected: sealed.protected,
        })
    }

    fn write_directory(
        &self,
        path: &Path,
        kind: ImageKind,
        pages: &GuestPages<'_>,
        reported: Vec<PageRange>,
        description: Description,
        machine_state: &[u8],
    ) -> Result<SealReport, firn_snapshot::FreezeError> {
        let mut writer = Writer::create(path)?;
        writer.write_image(pages, kind)?;
        self.devices
            .with_overlay(|disk| disk.map(|disk| writer.write_overlay(disk)).transpose())?;
        writer.set_reported(reported);
        writer.seal(description, MACHINE_STATE_VERSION, machine_state)
    }

    fn write_extent(
        &self,
        target: &mut PoolTarget,
        pages: &GuestPages<'_>,
        description: Description,
        machine_state: &[u8],
    ) -> Result<SealReport, firn_snapshot::FreezeError> {
        let contents = ExtentContents {
            memory: pages,
            description,
            machine_state_version: MACHINE_STATE_VERSION,
            machine_state,
        };
        self.devices.with_overlay(|overlay| write_extent(contents, overlay, target))
    }

    fn save(&self) -> Result<MachineState, FreezeError> {
        let indices: Arc<[u32]> = msr_indices(&self.kvm).map_err(FreezeError::MsrList)?.into();
        let xsave_size = self.vm.fd.check_extension_int(kvm_ioctls::Cap::Xsave2);
        let vcpus = self
            .vcpus
            .iter()
            .map(|vcpu| Ok(vcpu.save(&indices, xsave_size).map_err(FreezeError::Pause)??))
            .collect::<Result<_, FreezeError>>()?;
        Ok(MachineState {
            vm: self.vm.save()?,
            vcpus,
            serial: self.bus.serial().state().into(),
            virtio: self.devices.save(),
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
            disks: self.devices.read_only_disks().map_err(FreezeError::Disk)?,
            function,
        })
    }
}
