//! The configuration of a microVM, and checks of it before anything is created.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;
use uuid::Uuid;

use firn_base::PAGE_SIZE;
use firn_snapshot::{Content, ReadAt, Snapshot};

use crate::arch::cpu_model::CpuModel;
use crate::bus::MmioDevice;
use crate::console::Console;
use crate::open_file::OpenFile;
use crate::virtio::{
    BalloonConfig, DiskCache, Network, NetworkConfig, RateLimiter, VsockListener, is_in_memory,
};

/// The most vCPUs of a microVM: what the table of processors for kernels without ACPI has room for.
pub const MAX_VCPUS: u8 = 32;

/// The drive with the root file system of firn's own guests.
pub const ROOT_DRIVE: &str = "root";
/// The drive with what firn's own guests write.
pub const OVERLAY_DRIVE: &str = "overlay";
/// The network device of firn's own guests.
pub const NETWORK: &str = "eth0";
/// The vsock context id of firn's own guests. Every guest may have the same one, which only its
/// monitor uses.
pub const GUEST_CID: u32 = 3;

/// A microVM that boots a kernel.
pub struct BootConfig {
    /// The kernel: an uncompressed ELF file or a bzImage, which starts by the 64-bit boot protocol.
    pub kernel: OpenFile,
    /// The initramfs; `None` for a kernel that finds its root file system itself.
    pub initramfs: Option<OpenFile>,
    /// The kernel's command line, such as [`DEFAULT_CMDLINE`](crate::DEFAULT_CMDLINE).
    pub cmdline: String,
    /// Whether the command line also names the virtio devices (`virtio_mmio.device=`), for a
    /// kernel that does not use ACPI. A kernel that does finds each device once in any case.
    pub device_arguments: bool,
    /// Whether the guest has a PC's keyboard controller and interval timer. `reboot=k` and
    /// [`Microvm::send_ctrl_alt_del`](crate::Microvm::send_ctrl_alt_del) need the one, old kernels
    /// the other.
    pub legacy_devices: bool,
    /// Number of vCPUs, 1 to [`MAX_VCPUS`].
    pub vcpus: u8,
    /// Whether each two vCPUs, of an even number, are the threads of one core. If not, each is a
    /// core.
    pub smt: bool,
    /// The processor model that the guest sees.
    pub cpu: CpuChoice,
    /// Guest memory, bytes; a multiple of the page size.
    pub memory: u64,
    /// Whether the pages that are written are logged, for freezes of [those
    /// pages](firn_snapshot::Target::Written).
    pub track_writes: bool,
    /// The virtio devices.
    pub devices: Devices,
    /// The host's resources.
    pub host: HostConfig,
}

/// Which processor model a guest sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CpuChoice {
    /// The best named model that the host offers.
    #[default]
    Best,
    /// The same, but no better than this one.
    AtMost(CpuModel),
    /// This one, which the host has to offer.
    Exactly(CpuModel),
}

/// The virtio devices of a guest as the guest sees them, in the order of their windows. Ids are
/// unique among drives, and among networks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Devices {
    /// The ids of the drives; the guest's names of them are `/dev/vda` and on. Their first 20 bytes
    /// are their serial numbers.
    pub drives: Vec<String>,
    /// The guest's vsock context id, at least 3; `None` for a guest without sockets.
    pub vsock: Option<u32>,
    /// Whether it gets random bytes of the host.
    pub entropy: bool,
    /// Its balloon, if it has one.
    pub balloon: Option<BalloonConfig>,
    /// The network devices.
    pub networks: Vec<NetworkDevice>,
}

/// A network device of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkDevice {
    /// Its id.
    pub id: String,
    /// What the guest sees.
    pub config: NetworkConfig,
}

impl Devices {
    /// Those of firn's own guests: all, and a network only where it is configured.
    #[must_use]
    pub fn of_firn(network: Option<NetworkConfig>) -> Self {
        let network = network.map(|config| NetworkDevice { id: NETWORK.to_owned(), config });
        Self {
            drives: vec![ROOT_DRIVE.to_owned(), OVERLAY_DRIVE.to_owned()],
            vsock: Some(GUEST_CID),
            entropy: true,
            balloon: Some(BalloonConfig::REPORTING),
            networks: network.into_iter().collect(),
        }
    }
}

/// The host's side of a drive.
#[derive(Debug)]
pub struct Drive {
    /// The drive's id.
    pub id: String,
    /// Its content.
    pub disk: DriveDisk,
    /// Limits requests and their bytes. A drive whose limit is to be changed later needs one.
    pub limiter: Option<RateLimiter>,
}

impl Drive {
    /// The drives of firn's own guests ([`Devices::of_firn`]): the root file system, which they
    /// read, and what they write, of at least `size` bytes.
    #[must_use]
    pub fn of_firn(
        root: OpenFile,
        base: OverlayBase,
        size: u64,
        scratch: Option<Scratch>,
    ) -> Vec<Self> {
        let drive = |id: &str, disk| Self { id: id.to_owned(), disk, limiter: None };
        vec![
            drive(ROOT_DRIVE, DriveDisk::Image(root)),
            drive(OVERLAY_DRIVE, DriveDisk::Overlay { base, size, scratch }),
        ]
    }
}

/// The content of a drive.
#[derive(Debug)]
pub enum DriveDisk {
    /// An image that the guest reads and that never changes: a snapshot names it with a digest, and
    /// a restore refuses another one.
    Image(OpenFile),
    /// What the guest writes stays outside the base, and a snapshot contains it. At most one drive
    /// of a guest is such a one.
    Overlay {
        /// The content at the start.
        base: OverlayBase,
        /// Size, bytes: zeros follow the base. The drive is as large as its base at least.
        size: u64,
        /// Where the guest's writes go; `None` to keep them in memory.
        scratch: Option<Scratch>,
    },
    /// A file or block device of the caller's, as it is at each moment. No snapshot contains or
    /// names it. Of a size that is no multiple of 512 bytes the guest does not see the rest, and
    /// there may be nothing.
    File {
        /// Open for reading, and for writing unless the guest only reads.
        file: OpenFile,
        /// Whether the guest only reads.
        read_only: bool,
        /// When the guest's writes survive the host.
        cache: DiskCache,
    },
}

/// The content of an overlay before the guest writes. It never changes.
#[derive(Debug)]
pub enum OverlayBase {
    /// A file.
    File(OpenFile),
    /// A part of a pool's extent.
    Extent(Arc<dyn ReadAt>),
}

impl DriveDisk {
    /// The most memory that what the guest writes can take, bytes. A base whose size cannot be
    /// read, which makes no disk, counts as empty.
    fn written_memory(&self) -> u64 {
        let Self::Overlay { base, size, scratch } = self else { return 0 };
        // A size that is too large makes no disk either.
        let size = size.checked_next_multiple_of(PAGE_SIZE).unwrap_or(u64::MAX);
        let size = base.size().unwrap_or(0).max(size);
        match scratch {
            None => size,
            Some(scratch) if is_in_memory(&scratch.file).unwrap_or(true) => size.min(scratch.limit),
            Some(_) => 0,
        }
    }
}

impl OverlayBase {
    fn size(&self) -> io::Result<u64> {
        match self {
            Self::File(base) => base.size(),
            Self::Extent(content) => content.size(),
        }
    }

    /// The writable disk in a snapshot, if it has one.
    ///
    /// # Errors
    /// Its descriptor cannot be duplicated.
    pub fn of_snapshot(snapshot: &Snapshot) -> io::Result<Option<Self>> {
        Ok(match snapshot.overlay() {
            Some(Content::File(file)) => {
                let (file, path) = (file.try_clone()?, snapshot.path().to_owned());
                Some(Self::File(OpenFile { file, path }))
            }
            Some(Content::Extent(content)) => Some(Self::Extent(content.clone())),
            None => None,
        })
    }
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
#[derive(Default)]
pub struct HostConfig {
    /// One for each drive of the guest, in any order.
    pub drives: Vec<Drive>,
    /// Where programs on the host connect to the guest's vsock, if it has one.
    pub vsock: Option<VsockListener>,
    /// Limits the guest's requests for random bytes, and the bytes, if it can make any.
    pub entropy_limiter: Option<RateLimiter>,
    /// The time after which a guest whose balloon has statistics tells them again; `None` for
    /// never.
    pub balloon_period: Option<Duration>,
    /// The other sides of the guest's network devices, by id. A device without one has no link.
    pub networks: Vec<(String, Network)>,
    /// The output of the serial console.
    pub console: Console,
    /// The input of the serial console: a terminal, a pipe or a socket.
    pub console_input: Option<OwnedFd>,
    /// The VM generation id: a value that no other microVM ever had. A new id tells a guest that it
    /// is a clone. `None` for a guest without an operating system; nothing is written
    /// to its memory then.
    pub generation: Option<Uuid>,
    /// Whether the clock of a restored guest advances by the time since its freeze, by the host's
    /// wall clock, instead of continuing where it stopped. A freeze on Linux before 5.16, or on a
    /// host whose time-stamp counter is not its clock, does not save what this needs.
    pub advance_clock: bool,
    /// Register windows in addition to those of the virtio devices.
    pub windows: Vec<MmioWindow>,
}

impl HostConfig {
    /// The most memory that what the guest writes to its disks can take, bytes: none where that is
    /// on a disk of the host.
    #[must_use]
    pub fn written_disk_memory(&self) -> u64 {
        self.drives.iter().map(|drive| drive.disk.written_memory()).sum()
    }
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
