//! Setting the machine up: from the initramfs to the root file system.

mod disks;
mod modules;
mod process;
mod switch_root;

use std::fs;
use std::io;
use std::path::Path;

use firn_agent::network;
use rustix::mount::{MountFlags, mount};

pub(crate) use process::{Side, fork, reap_until};

/// Why the machine could not be set up.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SetUpError {
    #[error("cannot mount {what} on {target}")]
    Mount { what: &'static str, target: &'static str, source: io::Error },
    #[error("cannot set up {path}")]
    Path { path: String, source: io::Error },
    #[error("cannot insert the kernel module {name}")]
    Module { name: String, source: io::Error },
    #[error(
        "the root disk /dev/vda did not appear within {seconds} s: \
         attach it as the first virtio-blk device"
    )]
    NoRootDisk { seconds: u64 },
    #[error(
        "the root disk /dev/vda is truncated: it has {has} bytes and its file system needs {needs}; \
         build or copy it again"
    )]
    RootTooShort { has: u64, needs: u64 },
    #[error("the monitor attached a second disk, but /dev/vdb did not appear within {seconds} s")]
    NoOverlayDisk { seconds: u64 },
    #[error("cannot switch to the root file system on /root")]
    SwitchRoot { source: io::Error },
    #[error("cannot bring up the loopback interface")]
    Loopback { source: io::Error },
    #[error("cannot set the host name")]
    HostName { source: io::Error },
}

/// Mounts the usual file systems, inserts the kernel modules, assembles the root file system from
/// the disks and switches to it.
pub(crate) fn set_up() -> Result<(), SetUpError> {
    for path in ["/proc", "/sys", "/dev"] {
        make_dir(path)?;
    }
    attach("proc", "proc", "/proc", MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC)?;
    attach("sysfs", "sysfs", "/sys", MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC)?;
    attach("devtmpfs", "devtmpfs", "/dev", MountFlags::NOSUID)?;
    modules::insert("order")?;
    disks::assemble_root()?;
    if has_network()? {
        modules::insert("network")?;
    }
    switch_root::switch_root()?;
    for path in ["/dev/shm", "/run", "/tmp"] {
        make_dir(path)?;
    }
    attach("tmpfs", "tmpfs", "/dev/shm", MountFlags::NOSUID | MountFlags::NODEV)?;
    attach("tmpfs", "tmpfs", "/run", MountFlags::NOSUID | MountFlags::NODEV)?;
    attach("cgroup2", "cgroup2", "/sys/fs/cgroup", MountFlags::NOSUID | MountFlags::NODEV)?;
    open_to_all("/tmp")?;
    set_up_kernel()?;
    network::bring_up("lo").map_err(|source| SetUpError::Loopback { source })?;
    rustix::system::sethostname(b"firn")
        .map_err(|error| SetUpError::HostName { source: error.into() })
}

/// The kernel's settings.
///
/// What it does from time to time, each clone does soon after its thaw, and gets the pages for it.
/// It does not compact memory unasked or reclaim it because kinds of pages get mixed, counts pages
/// of memory at longer intervals (all: Documentation/admin-guide/sysctl/vm.rst), and does not limit
/// the write-back to keep reads fast (Documentation/block/queue-sysfs.rst).
const SETTINGS: [(&str, &str); 5] = [
    ("/proc/sys/vm/watermark_boost_factor", "0"),
    ("/proc/sys/vm/compaction_proactiveness", "0"),
    ("/proc/sys/vm/stat_interval", "3600"),
    ("/sys/block/vda/queue/wbt_lat_usec", "0"),
    ("/sys/block/vdb/queue/wbt_lat_usec", "0"),
];

/// Sets what this kernel and this machine have of [`SETTINGS`].
fn set_up_kernel() -> Result<(), SetUpError> {
    SETTINGS.into_iter().try_for_each(|(path, value)| match fs::write(path, value) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result.map_err(|source| SetUpError::Path { path: path.into(), source }),
    })
}

/// Whether the monitor attached a network device, whose number is 1 (virtio 1.2, 5). Its driver
/// takes memory that other guests need not spend.
fn has_network() -> Result<bool, SetUpError> {
    const DEVICES: &str = "/sys/bus/virtio/devices";
    let failed = |source| SetUpError::Path { path: DEVICES.to_owned(), source };
    let numbers = fs::read_dir(DEVICES).map_err(failed)?.map(|device| {
        let number = fs::read_to_string(device?.path().join("device"))?;
        Ok(number.trim() == "0x0001")
    });
    let numbers: io::Result<Vec<bool>> = numbers.collect();
    Ok(numbers.map_err(failed)?.contains(&true))
}

fn attach(
    what: &'static str,
    kind: &'static str,
    target: &'static str,
    flags: MountFlags,
) -> Result<(), SetUpError> {
    attach_with(what, kind, target, flags, None)
}

/// Mounts `what` on `target`.
fn attach_with(
    what: &'static str,
    kind: &'static str,
    target: &'static str,
    flags: MountFlags,
    options: Option<&std::ffi::CStr>,
) -> Result<(), SetUpError> {
    mount(what, target, kind, flags, options).map_err(|error| SetUpError::Mount {
        what,
        target,
        source: error.into(),
    })
}

fn make_dir(path: &str) -> Result<(), SetUpError> {
    fs::create_dir_all(path).map_err(|source| SetUpError::Path { path: path.into(), source })
}

/// Allows every user to write to the directory, as usual on Linux.
fn open_to_all(path: &str) -> Result<(), SetUpError> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(Path::new(path), fs::Permissions::from_mode(0o1777))
        .map_err(|source| SetUpError::Path { path: path.into(), source })
}
