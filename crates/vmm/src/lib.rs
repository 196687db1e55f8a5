//! The microVM monitor: KVM, boot, devices, machine state.
//!
//! One process runs one microVM. [`Microvm::boot`] makes it from a kernel, [`Microvm::prepare`]
//! from memory with a guest in ring 3, [`Microvm::restore`] from a snapshot over memory that a plan
//! laid out. [`Microvm::run`] serves it until its [`End`], and [`Microvm::freeze`] writes a
//! snapshot. Other threads use it through a [`Handle`], other processes through its
//! [`ControlServer`].
//!
//! The guest is hostile: the monitor validates everything that the guest writes. The monitor knows
//! nothing of functions.

mod access;
mod arch;
mod bus;
mod config;
mod console;
mod control;
mod cow;
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
pub use config::{BootConfig, HostConfig, MAX_VCPUS, MmioWindow, SizeError, check_sizes};
pub use console::{Console, SerialStateError};
pub use control::{ControlClient, ControlError, ControlServer, ControlServerError};
pub use control::{Request, Response, Status};
pub use inspect::{
    AttributionControl, AttributionError, FaultAttribution, FreePagesError, GuestTimeError,
    GuestTimeTotals, fault_attribution, free_pages,
};
pub use kvm::{
    KVM_DEVICE, KvmCounters, KvmError, KvmIndex, KvmStats, OpenKvm, OpenKvmError, TscError,
    Virtualization, VmError, open as open_kvm, tsc_khz,
};
pub use microvm::{
    Argument, AssembleError, BootError, Destination, DiskError, End, FreezeError, FreezeReport,
    FreezeRequest, FrozenMachine, GenerationError, GoneError, Handle, IncompatibleError, Microvm,
    PrepareError, RenewError, RestoreError, RestoreReport, RunError, UserRegisters, WireError,
    WrittenError, open_root_disk,
};
pub use open_file::{OpenFile, OpenFileError};
pub use state::{DecodeStateError, MACHINE_STATE_VERSION};
pub use vcpu::state::{RestoreVcpuError, SaveVcpuError};
pub use vcpu::{VcpuFailure, VcpuThreadError};
pub use virtio::{BindVsockError, VsockListener};
