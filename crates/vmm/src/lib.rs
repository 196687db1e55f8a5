//! The microVM monitor: KVM, boot, devices, machine state.
//!
//! One process runs one microVM: [`Microvm::boot`] makes one from a kernel, [`Microvm::prepare`] from
//! memory that holds a guest in ring 3, [`Microvm::restore`] from a snapshot over memory that a plan has laid out, [`Microvm::run`] serves it until its
//! [`End`]. [`Microvm::freeze`] writes a snapshot. Other threads reach it through a [`Handle`],
//! other processes through its [`ControlServer`].
//!
//! The guest is hostile: nothing it writes is trusted. The monitor knows nothing of functions.

mod ahead;
mod arch;
mod boot;
mod bus;
mod config;
mod console;
mod control;
mod free_pages;
mod guest_time;
mod kvm;
mod kvm_index;
mod microvm;
mod open_file;
pub mod operands;
pub mod paging;
mod state;
mod stats;
#[cfg(test)]
mod testing;
mod touches;
mod vcpu;
pub mod virtio;
mod vm;
mod witness;

pub use arch::acpi::AcpiError;
pub use arch::cpu_model::{CpuModel, CpuModelError};
pub use boot::{DEFAULT_CMDLINE, LoadKernelError};
pub use bus::{MmioDevice, OverlapError};
pub use config::{BootConfig, HostConfig, MAX_VCPUS, MmioWindow, SizeError, check_sizes};
pub use console::{Console, SerialStateError};
pub use control::{ControlClient, ControlError, ControlServer, ControlServerError};
pub use control::{Request, Response, Status};
pub use free_pages::{FreePagesError, free_pages};
pub use guest_time::{GuestTimeError, GuestTimeTotals};
pub use kvm::{
    KVM_DEVICE, KvmError, OpenKvm, OpenKvmError, TscError, Virtualization, open as open_kvm,
    tsc_khz,
};
pub use kvm_index::KvmIndex;
pub use microvm::{
    Argument, AssembleError, BootError, Destination, DiskError, End, FreezeError, FreezeReport,
    FreezeRequest, FrozenMachine, GenerationError, GoneError, Handle, IncompatibleError, Microvm,
    PrepareError, RenewError, RestoreError, RestoreReport, RunError, UserRegisters, WireError,
    WrittenError, open_root_disk,
};
pub use open_file::{OpenFile, OpenFileError};
pub use state::{DecodeStateError, MACHINE_STATE_VERSION};
pub use stats::{KvmCounters, KvmStats};
pub use vcpu::observer::{Observer, StoppedVcpu, VcpuThread};
pub use vcpu::state::{RestoreVcpuError, SaveVcpuError};
pub use vcpu::{VcpuFailure, VcpuThreadError};
pub use virtio::{BindVsockError, VsockListener};
pub use vm::VmError;
pub use witness::{VcpuWitness, Watch, WatchError, witness};
