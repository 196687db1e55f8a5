//! An emulated disk: a loop device over memory, throttled for every process of the host.
//!
//! blk-throttle (cgroup version 1) limits a device for the tasks of one group. KVM may read a page
//! of a guest in a kernel worker instead of the monitor's thread. Both are in the root group, so
//! the rule is one of the root group. The device is dedicated, so the rule affects nothing else.

use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use firn_base::PAGE_SIZE;
use procfs::ProcError;
use procfs::process::Process;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::medium::PrivateMount;

/// What a disk is emulated with: a row of SYSTOR '22, table 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DiskParameters {
    /// Time of a read of 4 KiB at depth 1, ns.
    pub latency_ns: f64,
    /// Bytes read in a second.
    pub read_bandwidth: u64,
    /// Bytes written in a second.
    pub write_bandwidth: u64,
}

/// The limits of a device for the root group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Throttle {
    /// Reads in a second; `None` without a limit.
    pub read_iops: Option<u64>,
    /// Bytes read in a second.
    pub read_bps: u64,
    /// Bytes written in a second.
    pub write_bps: u64,
}

impl Throttle {
    /// No limit.
    pub const NONE: Self = Self { read_iops: None, read_bps: 0, write_bps: 0 };
}

/// Why a disk cannot be emulated.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EmulateError {
    /// The control groups cannot be read.
    #[error("cannot emulate a disk: cannot read the control groups of this process")]
    Proc(#[from] ProcError),
    /// There is no blkio controller of version 1.
    #[error("cannot emulate a disk: no blkio controller of cgroup version 1 is mounted")]
    NoController,
    /// This process is in a group of its own.
    #[error(
        "cannot emulate a disk: this process is in the blkio group {0}, which the root group's limits do not reach; \
         start it in the root group"
    )]
    OtherGroup(String),
    /// The kernel refuses a step.
    #[error("cannot emulate a disk: cannot {what}; run as root on a kernel with loop devices")]
    Io {
        /// The step.
        what: String,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A program failed.
    #[error("cannot emulate a disk: {program} failed: {output}")]
    Program {
        /// The program.
        program: &'static str,
        /// What it printed on standard error.
        output: String,
    },
}

/// A disk that is emulated until this value is dropped.
#[derive(Debug)]
pub(crate) struct EmulatedDisk {
    mount: PrivateMount,
    device: Device,
}

/// A loop device.
#[derive(Debug)]
struct Device {
    /// Whether this value has to release it. Otherwise its file system does, however this process
    /// ends.
    owned: bool,
    path: PathBuf,
    /// `MAJOR:MINOR`.
    number: String,
    controller: PathBuf,
}

impl DiskParameters {
    /// The limits that give these parameters on a loop device whose reads take `own_latency_ns`.
    /// blk-throttle has no latency, so a rate stands for it: with one reader the mean time of a
    /// read is the parameter. A device that is as fast as the parameter by itself has no such
    /// limit. `depth` is the number of readers that the limit is for.
    pub(crate) fn throttle(&self, own_latency_ns: f64, depth: u32) -> Throttle {
        let slower = self.latency_ns > 2.0 * own_latency_ns;
        let iops = whole(1e9 * f64::from(depth) / self.latency_ns);
        Throttle {
            read_iops: slower.then_some(iops),
            read_bps: self.read_bandwidth,
            write_bps: self.write_bandwidth,
        }
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "rates of reads are positive and far smaller"
)]
fn whole(rate: f64) -> u64 {
    rate.round().clamp(1.0, 1e12) as u64
}

impl EmulatedDisk {
    /// Makes an ext4 on a new loop device over `size` bytes of memory, which are taken as they are
    /// written. It has no limits yet.
    pub(crate) fn make(size: u64) -> Result<Self, EmulateError> {
        let controller = controller()?;
        let failed = |what: &str| {
            let what = what.to_owned();
            move |source| EmulateError::Io { what, source }
        };
        let memory = memfd_create("firn-disk", MemfdFlags::CLOEXEC)
            .and_then(|memory| ftruncate(&memory, size / PAGE_SIZE * PAGE_SIZE).map(|()| memory));
        let memory = memory.map_err(io::Error::from).map_err(failed("reserve memory"))?;
        let file = format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd());
        let path = PathBuf::from(program("losetup", &["--find", "--show", &file])?.trim());
        let number = fs::metadata(&path).map_err(failed("find the loop device"))?.rdev();
        let number = format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
        // From here on the drop releases the device.
        let mut device = Device { owned: true, path, number, controller };
        let path = device.path.display().to_string();
        program(
            "mkfs.ext4",
            &["-q", "-O", "^has_journal", "-m", "0", "-E", "lazy_itable_init=0", &path],
        )?;
        // Removed files give their memory back.
        let mount = PrivateMount::mount(&device.path, "ext4", c"discard");
        let mount = mount.map_err(failed("mount the loop device"))?;
        // The device is in use, so this releases it with the mount.
        program("losetup", &["--detach", &path])?;
        device.owned = false;
        Ok(Self { mount, device })
    }

    /// A directory on the disk.
    pub(crate) fn path(&self) -> &Path {
        self.mount.path()
    }

    /// Limits the device for every process in the root group.
    pub(crate) fn throttle(&self, throttle: Throttle) -> Result<(), EmulateError> {
        self.device.throttle(throttle)
    }

    /// Reads of the device that the root group's limits have counted so far.
    #[cfg(test)]
    pub(crate) fn reads(&self) -> Result<u64, EmulateError> {
        let path = self.device.controller.join("blkio.throttle.io_serviced");
        let text = fs::read_to_string(&path).map_err(|source| EmulateError::Io {
            what: format!("read {}", path.display()),
            source,
        })?;
        Ok(served(&text, &self.device.number))
    }
}

/// The reads of a device in a file of the controller: lines of device, operation and number.
#[cfg(test)]
fn served(text: &str, device: &str) -> u64 {
    let of = |line: &str| {
        let mut words = line.split(' ');
        let matches = words.next() == Some(device) && words.next() == Some("Read");
        if matches { words.next()?.parse().ok() } else { None }
    };
    text.lines().find_map(of).unwrap_or_default()
}

impl Device {
    fn throttle(&self, throttle: Throttle) -> Result<(), EmulateError> {
        for (file, limit) in [
            ("read_iops", throttle.read_iops.unwrap_or_default()),
            ("read_bps", throttle.read_bps),
            ("write_bps", throttle.write_bps),
        ] {
            let path = self.controller.join(format!("blkio.throttle.{file}_device"));
            // A limit of 0 removes one.
            let rule = format!("{} {limit}", self.number);
            fs::write(&path, rule).map_err(|source| {
                let what = format!("write a limit to {}", path.display());
                EmulateError::Io { what, source }
            })?;
        }
        Ok(())
    }
}

impl Drop for EmulatedDisk {
    fn drop(&mut self) {
        // Before the unmount, which frees the device for others.
        let _ = self.device.throttle(Throttle::NONE);
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if self.owned {
            // A drop cannot return an error.
            let _ = Command::new("losetup").arg("--detach").arg(&self.path).status();
        }
    }
}

/// The directory of the root group of the blkio controller, if this process is in that group.
fn controller() -> Result<PathBuf, EmulateError> {
    let process = Process::myself()?;
    let has = |controllers: &[String]| controllers.iter().any(|name| name == "blkio");
    let groups = process.cgroups()?;
    let group = groups.0.iter().find(|group| has(&group.controllers));
    let group = group.ok_or(EmulateError::NoController)?;
    if group.pathname != "/" {
        return Err(EmulateError::OtherGroup(group.pathname.clone()));
    }
    let mounts = process.mountinfo()?;
    let mount = mounts
        .0
        .into_iter()
        .find(|mount| mount.fs_type == "cgroup" && mount.super_options.contains_key("blkio"));
    Ok(mount.ok_or(EmulateError::NoController)?.mount_point)
}

fn program(name: &'static str, arguments: &[&str]) -> Result<String, EmulateError> {
    let output = Command::new(name).args(arguments).stdin(Stdio::null()).output();
    let output = output.map_err(|source| EmulateError::Io {
        what: format!("start {name} (Debian: apt-get install mount e2fsprogs)"),
        source,
    })?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() {
        return Ok(text(&output.stdout));
    }
    Err(EmulateError::Program { program: name, output: text(&output.stderr) })
}

#[cfg(test)]
#[path = "emulated_tests.rs"]
mod tests;
