//! The configuration of a microVM, and checks of it before anything is created.

use std::fs::File;

use thiserror::Error;
use uuid::Uuid;

use firn_base::PAGE_SIZE;

use crate::arch::cpu_model::CpuModel;
use crate::bus::MmioDevice;
use crate::console::Console;
use crate::open_file::OpenFile;
use crate::virtio::{Network, NetworkConfig, VsockListener};

/// The most vCPUs of a microVM.
pub(crate) const MAX_VCPUS: u8 = 4;

/// A microVM that boots Linux.
pub struct BootConfig {
    /// The uncompressed ELF kernel.
    pub kernel: OpenFile,
    /// The initramfs, whose `/init` sets up the guest.
    pub initramfs: OpenFile,
    /// Kernel parameters that are added to the default command line.
    pub cmdline: Option<String>,
    /// Number of vCPUs, 1 to 4.
    pub vcpus: u8,
    /// The processor model that the guest sees; `None` for the best named model that the host
    /// offers.
    pub cpu: Option<CpuModel>,
    /// Guest memory, bytes; a multiple of the page size.
    pub memory: u64,
    /// The root file system, read-only.
    pub root: OpenFile,
    /// The initial content of the writable disk. The file itself is never written.
    pub overlay: OpenFile,
    /// Size of the writable disk, bytes: zeros follow the file. A disk is as large as its file at
    /// least.
    pub disk_size: u64,
    /// The guest's network device; `None` for a guest without one.
    pub network: Option<NetworkConfig>,
    /// The host's resources.
    pub host: HostConfig,
}

/// Registers in guest-physical memory that the caller serves.
pub struct MmioWindow {
    /// First guest-physical address, outside RAM and the virtio devices' windows.
    pub start: u64,
    /// Length, bytes.
    pub len: u64,
    /// The device that serves the window.
    pub device: Box<dyn MmioDevice>,
}

/// Where a guest's disk writes go.
#[derive(Debug)]
pub struct Scratch {
    /// The file that takes them, such as [`scratch_file`](crate::scratch_file): empty, open for
    /// reading and writing, on a file system with holes.
    pub file: File,
    /// Limit of the space that they take, bytes. A write beyond it is an I/O error for the guest.
    pub limit: u64,
}

/// What a microVM uses of its host; not part of a snapshot. Everything in it is open, so that a
/// microVM can be made without access to any path.
pub struct HostConfig {
    /// Where programs on the host connect to the guest's vsock. Required for a guest with disks,
    /// which has all virtio devices.
    pub vsock: Option<VsockListener>,
    /// Where the guest's disk writes go; `None` to keep them in memory.
    pub scratch: Option<Scratch>,
    /// The other side of the guest's network device. A guest without the device has none.
    pub network: Network,
    /// The output of the serial console.
    pub console: Console,
    /// The VM generation id: a value that no other microVM ever had. A new id tells a guest that it
    /// is a clone. `None` for a guest without an operating system; nothing is written
    /// to its memory then.
    pub generation: Option<Uuid>,
    /// Register windows in addition to those of the virtio devices.
    pub windows: Vec<MmioWindow>,
}

/// The sizes of a microVM are invalid.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SizeError {
    /// The guest has no memory.
    #[error("guest memory of 0 bytes is not valid: use at least 128 MiB")]
    NoMemory,
    /// The size is not a multiple of the page size.
    #[error("guest memory of {0} bytes is not valid: use a multiple of the page size, 4096")]
    Unaligned(u64),
    /// The size exceeds the host's memory.
    #[error("guest memory of {wanted} bytes exceeds the host's {host} bytes of DRAM")]
    MoreThanHost {
        /// Requested bytes.
        wanted: u64,
        /// Bytes of DRAM of the host.
        host: u64,
    },
    /// The number of vCPUs is out of range.
    #[error("{0} vCPUs are not valid: use 1 to {MAX_VCPUS}")]
    Vcpus(u8),
}

/// Checks the sizes of a microVM, and that the host has as much memory.
///
/// # Errors
/// See [`SizeError`].
pub(crate) fn check_sizes(vcpus: u8, memory: u64) -> Result<(), SizeError> {
    let info = rustix::system::sysinfo();
    check_sizes_on(vcpus, memory, info.totalram * u64::from(info.mem_unit))
}

fn check_sizes_on(vcpus: u8, memory: u64, host: u64) -> Result<(), SizeError> {
    if memory == 0 {
        return Err(SizeError::NoMemory);
    }
    if !memory.is_multiple_of(PAGE_SIZE) {
        return Err(SizeError::Unaligned(memory));
    }
    if memory > host {
        return Err(SizeError::MoreThanHost { wanted: memory, host });
    }
    if !(1..=MAX_VCPUS).contains(&vcpus) {
        return Err(SizeError::Vcpus(vcpus));
    }
    Ok(())
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
