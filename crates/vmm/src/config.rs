//! What a microVM is to be, checked before anything is made.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use thiserror::Error;
use uuid::Uuid;

use firn_base::PAGE_SIZE;

use crate::arch::cpu_model::CpuModel;
use crate::bus::MmioDevice;
use crate::console::Console;
use crate::open_file::OpenFile;
use crate::virtio::VsockListener;

/// Most vCPUs of a microVM.
pub const MAX_VCPUS: u8 = 4;

/// A microVM that boots Linux.
pub struct BootConfig {
    /// The uncompressed ELF kernel.
    pub kernel: OpenFile,
    /// The initramfs whose `/init` sets the guest up.
    pub initramfs: OpenFile,
    /// Words added to [`crate::DEFAULT_CMDLINE`].
    pub cmdline: Option<String>,
    /// Processors, 1 to [`MAX_VCPUS`].
    pub vcpus: u8,
    /// What processor the guest is told of; `None` for the best named model that the host offers.
    pub cpu: Option<CpuModel>,
    /// Guest memory, bytes; a multiple of the page size.
    pub memory: u64,
    /// The root file system, read-only.
    pub root: OpenFile,
    /// The initial content of the writable disk; the file itself is never written.
    pub overlay: OpenFile,
    /// What belongs to this process.
    pub host: HostConfig,
}

/// Registers in guest-physical memory that the microVM's owner serves itself.
pub struct MmioWindow {
    /// First guest-physical address; neither RAM nor a virtio device's.
    pub start: u64,
    /// Length, bytes.
    pub len: u64,
    /// What is behind it.
    pub device: Arc<Mutex<dyn MmioDevice>>,
}

/// What a microVM uses of its host; not part of a snapshot. Everything in it is open, so a microVM is made without any path.
pub struct HostConfig {
    /// Where programs on the host connect to the guest's vsock; required for a guest with disks, which has
    /// all virtio devices.
    pub vsock: Option<VsockListener>,
    /// Directory for the unlinked file that takes the guest's disk writes, opened with `O_RDONLY` or `O_PATH`;
    /// `None` to keep them in memory.
    pub scratch: Option<OwnedFd>,
    /// Where the serial console goes.
    pub console: Console,
    /// The VM generation id: a value that no other microVM ever had. A guest that finds a new one
    /// knows that it is a clone. `None` for a guest without an operating system that would look for
    /// it: nothing is written into its memory.
    pub generation: Option<Uuid>,
    /// Register windows beside those of the virtio devices.
    pub windows: Vec<MmioWindow>,
}

/// A microVM of these sizes cannot exist here.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SizeError {
    /// No memory at all.
    #[error("guest memory of 0 bytes: give at least 128 MiB")]
    NoMemory,
    /// Not whole pages.
    #[error("guest memory of {0} bytes is no multiple of the page size, 4096")]
    Unaligned(u64),
    /// More than there is.
    #[error("guest memory of {wanted} bytes is more than the host's {host} bytes of DRAM")]
    MoreThanHost {
        /// Bytes asked for.
        wanted: u64,
        /// Bytes of DRAM that the host has.
        host: u64,
    },
    /// No or too many processors.
    #[error("{0} vCPUs: a microVM has 1 to {MAX_VCPUS}")]
    Vcpus(u8),
}

/// Checks the sizes of a microVM against what is possible and what the host has.
///
/// # Errors
/// See [`SizeError`].
pub fn check_sizes(vcpus: u8, memory: u64) -> Result<(), SizeError> {
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
