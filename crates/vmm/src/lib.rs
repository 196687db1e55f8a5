//! The microVM monitor: KVM, boot, devices, machine state.
//!
//! One process runs one microVM. [`Microvm::boot`] makes it from a kernel, [`Microvm::prepare`]
//! from memory with a guest in ring 3, [`Microvm::restore`] from a snapshot over memory that a plan
//! laid out. [`Microvm::run`] serves it until its [`End`], and a [freeze](firn_snapshot::Freeze)
//! writes a snapshot. Other threads use it through a [`Handle`], other processes through a control
//! socket ([`serve_control`]).
//!
//! The guest is hostile: the monitor validates everything that the guest writes. The crate does
//! not depend on functions or the daemon.

mod access;
mod arch;
mod bus;
mod config;
mod console;
mod control;
mod counters;
mod cow;
mod i8042;
mod inspect;
mod kvm;
mod microvm;
mod open_file;
mod state;
mod subscriber;
mod vcpu;
mod virtio;

pub use arch::acpi::AcpiError;
pub use arch::cpu_model::{CpuModel, CpuModelError};
pub use arch::kernel::{DEFAULT_CMDLINE, LoadKernelError};
pub use bus::{MmioDevice, OverlapError};
pub use config::{
    BootConfig, CpuChoice, Devices, Drive, DriveDisk, GUEST_CID, HostConfig, MAX_VCPUS, MmioWindow,
    NETWORK, NetworkDevice, OVERLAY_DRIVE, OverlayBase, ROOT_DRIVE, Scratch, SizeError,
};
pub use console::{Console, SerialCounters, SerialStateError};
pub use control::{
    ControlClient, ControlError, ControlServerError, Request, Response, Status, serve_control,
};
pub use counters::{Counters, DeviceCounters, Timed};
pub use i8042::{CtrlAltDelError, KeyboardCounters, KeyboardStateError};
pub use inspect::{
    AttributionControl, AttributionError, FaultAttribution, FreePagesError, GuestTimeError,
    GuestTimeTotals, TracepointFormat, Tracepoints, fault_attribution, free_pages,
};
pub use kvm::{
    KVM_DEVICE, KvmCounters, KvmError, KvmIndex, KvmStats, OpenKvm, OpenKvmError, SupportedCpuid,
    TscError, Virtualization, VmError, open as open_kvm, open_device as open_kvm_device, tsc_khz,
};
pub use microvm::{
    Argument, AssembleError, BootError, DiskError, End, FreezeError, FrozenMachine,
    GenerationError, GoneError, Handle, IncompatibleError, Microvm, Names, PrepareError,
    ReleaseError, RenewError, RestoreError, RestoreReport, RunError, Shape, Standby, StandbyError,
    UpdateDeviceError, UserRegisters, WireError, WrittenError, note_of, open_root_disk,
};
pub use open_file::{OpenFile, OpenFileError};
pub use state::DecodeStateError;
pub use vcpu::state::{RestoreVcpuError, SaveVcpuError};
pub use vcpu::{ExitCounters, FirstRun, VcpuFailure, VcpuThreadError};
pub use virtio::{
    BackendCounters, BalloonConfig, BalloonCounters, BalloonStatistics, BindVsockError, DiskCache,
    DiskCounters, EntropyCounters, LimiterCounters, Metadata, Network, NetworkConfig,
    NetworkCounters, NetworkEnd, OpenDiskError, OpenTapError, QueueCounters, RateLimit,
    RateLimiter, TokenBucket, Traffic, TransportCounters, VsockBroker, VsockConnector,
    VsockCounters, VsockListener, is_in_memory, open_tap, scratch_file,
};
