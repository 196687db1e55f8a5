//! The root file system: an overlay of a read-only disk and a writable disk.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::fstatvfs;
use rustix::ioctl::{Setter, ioctl, opcode};
use rustix::mount::MountFlags;

use super::{SetUpError, attach, attach_with, make_dir};

/// Time limit for a disk to appear after the modules are inserted. It is long because the machine
/// may be emulated.
const DISK_LIMIT: Duration = Duration::from_secs(30);

/// `EXT4_IOC_RESIZE_FS`.
const RESIZE: rustix::ioctl::Opcode = opcode::write::<u64>(b'f', 16);

/// Mount point of the assembled root before the switch.
pub(super) const NEW_ROOT: &str = "/root";

/// Mounts an overlay of `/dev/vda` (erofs, read-only) and `/dev/vdb` (ext4) on [`NEW_ROOT`]. If the
/// monitor attached only one disk, written files stay in memory.
pub(super) fn assemble_root() -> Result<(), SetUpError> {
    if !appears("/dev/vda") {
        return Err(SetUpError::NoRootDisk { seconds: DISK_LIMIT.as_secs() });
    }
    for path in ["/lower", "/upper", NEW_ROOT] {
        make_dir(path)?;
    }
    attach("/dev/vda", "erofs", "/lower", MountFlags::RDONLY)?;
    check_root()?;
    if block_devices() > 1 {
        if !appears("/dev/vdb") {
            return Err(SetUpError::NoOverlayDisk { seconds: DISK_LIMIT.as_secs() });
        }
        attach("/dev/vdb", "ext4", "/upper", MountFlags::NOATIME)?;
        grow("/upper", "vdb")?;
    } else {
        attach("tmpfs", "tmpfs", "/upper", MountFlags::empty())?;
    }
    for path in ["/upper/data", "/upper/work"] {
        make_dir(path)?;
    }
    let options = c"lowerdir=/lower,upperdir=/upper/data,workdir=/upper/work";
    attach_with("overlay", "overlay", NEW_ROOT, MountFlags::NOATIME, Some(options))
}

/// Detects a truncated root disk. Mounting it only reads its first blocks.
fn check_root() -> Result<(), SetUpError> {
    let has = size_of("vda")?;
    let system = rustix::fs::statvfs("/lower").map_err(failed("/lower"))?;
    let needs = system.f_blocks.saturating_mul(system.f_frsize);
    if has < needs { Err(SetUpError::RootTooShort { has, needs }) } else { Ok(()) }
}

/// Lets the ext4 on `target` take all of its disk.
fn grow(target: &'static str, disk: &str) -> Result<(), SetUpError> {
    let size = size_of(disk)?;
    let folder = File::open(target).map_err(failed(target))?;
    let blocks = size / fstatvfs(&folder).map_err(failed(target))?.f_bsize.max(1);
    // SAFETY: EXT4_IOC_RESIZE_FS (Documentation/filesystems/ext4 in the kernel's source) reads the
    // new number of blocks, a 64-bit integer, and nothing else.
    let resize = unsafe { Setter::<RESIZE, u64>::new(blocks) };
    // SAFETY: the request has the type above, and changes no memory of this process.
    unsafe { ioctl(&folder, resize) }.map_err(failed(target))
}

/// Size of a disk, bytes.
fn size_of(disk: &str) -> Result<u64, SetUpError> {
    let path = format!("/sys/class/block/{disk}/size");
    let sectors = fs::read_to_string(&path).map_err(failed(&path))?;
    let sectors: u64 =
        sectors.trim().parse().map_err(|error| failed(&path)(io::Error::other(error)))?;
    // The kernel counts sectors of 512 bytes, regardless of the disk's sector size.
    Ok(sectors.saturating_mul(512))
}

fn failed<E: Into<io::Error>>(path: &str) -> impl Fn(E) -> SetUpError {
    move |source| SetUpError::Path { path: path.into(), source: source.into() }
}

/// Waits for a device node. Devices are probed concurrently with the first process.
fn appears(path: &str) -> bool {
    let deadline = Instant::now() + DISK_LIMIT;
    while !Path::new(path).exists() {
        if Instant::now() >= deadline {
            return false;
        }
        thread::sleep(Duration::from_millis(1));
    }
    true
}

/// The number of virtio block devices that the monitor attached, including those without a device
/// node (device id 2: Virtio 1.2, section 5.2).
fn block_devices() -> usize {
    let Ok(devices) = fs::read_dir("/sys/bus/virtio/devices") else { return 0 };
    devices
        .flatten()
        .filter_map(|device| fs::read_to_string(device.path().join("device")).ok())
        .filter(|id| id.trim() == "0x0002")
        .count()
}
