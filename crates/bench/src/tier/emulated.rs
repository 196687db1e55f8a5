//! An emulated disk: a compressed disk in memory (zram) whose reads are delayed.
//!
//! A read of zram is done by the thread that asks for it, in 4 to 6 µs (Linux,
//! Documentation/admin-guide/blockdev/zram.rst). A loop device over memory reads in a kernel
//! worker, so there a read takes two wake-ups of a processor too: 33 to 90 µs in a virtual machine.
//! A BPF program delays each read by what the emulated disk takes longer ([`ReadDelay`]).
//!
//! A volume that is known by its limits is emulated with those: blk-throttle (cgroup version 1)
//! limits the rates of a device for the tasks of one group. KVM may read a page of a guest in a
//! kernel worker instead of the monitor's thread. Both are in the root group, so the rule is one of
//! the root group. The device is dedicated, so the rule affects nothing else.

use std::cell::RefCell;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use firn_base::PAGE_SIZE;
use firn_memory::{BpfError, ReadDelay};
use procfs::ProcError;
use procfs::process::Process;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::medium::PrivateMount;

/// Where the kernel makes and removes compressed disks.
const CONTROL: &str = "/sys/class/zram-control";
/// The name of an emulated disk's file system. It tells the disks of a killed process from others.
const LABEL: &str = "firn-disk";
/// Where an ext4 has its name, in bytes from the start of the device.
const LABEL_OFFSET: u64 = 1024 + 0x78;

/// What a disk is emulated with: a row of SYSTOR '22, table 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DiskParameters {
    /// Time of a read of 4 KiB at depth 1, ns.
    pub latency_ns: f64,
    /// Bytes read in a second.
    pub read_bandwidth: u64,
    /// Bytes written in a second.
    pub write_bandwidth: u64,
    /// Readers at once that saturate it with reads of 4 KiB (4.2.1); `None` where it serves any
    /// number at the latency of one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub saturating_readers: Option<u32>,
}

/// The limits of a device for the root group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Throttle {
    /// Reads in a second; 0 without a limit.
    pub read_iops: u64,
    /// Bytes read in a second; 0 without a limit.
    pub read_bps: u64,
}

impl Throttle {
    /// No limit.
    pub const NONE: Self = Self { read_iops: 0, read_bps: 0 };
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
    #[error("cannot emulate a disk: cannot {what}; run as root on a kernel with CONFIG_ZRAM")]
    Io {
        /// The step.
        what: String,
        /// The error of the operating system.
        source: io::Error,
    },
    /// Reads cannot be delayed.
    #[error("cannot emulate a disk: cannot delay its reads")]
    Delay(#[from] BpfError),
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
    delay: RefCell<Option<ReadDelay>>,
    device: Device,
}

/// A compressed disk, which is removed on drop. What a killed process leaves is removed before the
/// next one is made.
#[derive(Debug)]
struct Device {
    /// N of `/dev/zramN`.
    index: u32,
    /// Open, so that it cannot be removed as one that was left.
    file: Option<File>,
    major: u32,
    minor: u32,
}

impl DiskParameters {
    /// What a read takes on a host with `processors` where `readers` wait at once and each keeps a
    /// processor: together they read as fast as from the disk, whose readers sleep.
    pub(crate) fn busy(&self, readers: u32, processors: u32) -> ReadTimes {
        let at_once = f64::from(readers.min(processors));
        let served = self.saturating_readers.map_or(readers, |most| readers.min(most));
        let latency_ns = self.latency_ns * at_once / f64::from(served.max(1));
        // All of them share the bandwidth.
        let further_page_ns = PAGE_SIZE as f64 * 1e9 * at_once / self.read_bandwidth as f64;
        ReadTimes { first_page_ns: latency_ns.max(further_page_ns), further_page_ns }
    }
}

/// What a read takes, ns.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ReadTimes {
    /// Its first page of 4 KiB.
    pub(crate) first_page_ns: f64,
    /// Each further page.
    pub(crate) further_page_ns: f64,
}

impl ReadTimes {
    /// By how much it takes longer than on a faster device.
    pub(crate) fn beyond(self, faster: Self) -> Self {
        Self {
            first_page_ns: (self.first_page_ns - faster.first_page_ns).max(0.0),
            further_page_ns: (self.further_page_ns - faster.further_page_ns).max(0.0),
        }
    }
}

impl EmulatedDisk {
    /// Makes an ext4 on a new device of `size` bytes, whose memory is taken as it is written. It
    /// has no limits yet.
    pub(crate) fn make(size: u64) -> Result<Self, EmulateError> {
        let device = Device::make(size)?;
        let path = device_path(device.index);
        // Removed files give their memory back.
        let mount = PrivateMount::mount(&path, "ext4", c"discard");
        let mount = mount.map_err(failed(format!("mount {}", path.display())))?;
        Ok(Self { mount, delay: RefCell::default(), device })
    }

    /// A directory on the disk.
    pub(crate) fn path(&self) -> &Path {
        self.mount.path()
    }

    /// Limits the device for every process in the root group.
    pub(crate) fn throttle(&self, throttle: Throttle) -> Result<(), EmulateError> {
        self.device.throttle(throttle)
    }

    /// Delays each read of the device; zeros end that.
    pub(crate) fn delay_reads(&self, by: ReadTimes) -> Result<(), EmulateError> {
        let attach = || {
            let [first, further] =
                [by.first_page_ns, by.further_page_ns].map(|ns| Duration::from_secs_f64(ns / 1e9));
            ReadDelay::attach(self.device.major, self.device.minor, first, further)
        };
        let attached = if by == ReadTimes::default() { None } else { Some(attach()?) };
        self.delay.replace(attached);
        Ok(())
    }

    /// Reads of the device that the root group's limits have counted so far.
    #[cfg(test)]
    pub(crate) fn reads(&self) -> Result<u64, EmulateError> {
        let path = controller()?.join("blkio.throttle.io_serviced");
        let text = fs::read_to_string(&path).map_err(failed(format!("read {}", path.display())))?;
        Ok(served(&text, &self.device.number()))
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
    /// Makes a device of `size` bytes with an empty ext4.
    fn make(size: u64) -> Result<Self, EmulateError> {
        load_zram()?;
        remove_left();
        let index = fs::read_to_string(Path::new(CONTROL).join("hot_add"))
            .and_then(|index| index.trim().parse().map_err(io::Error::other))
            .map_err(failed("make a compressed disk"))?;
        // From here on the drop removes the device.
        let mut device = Self { index, file: None, major: 0, minor: 0 };
        let path = device_path(index);
        let open = || {
            let file = File::open(&path)?;
            let number = file.metadata()?.rdev();
            let pages = size / PAGE_SIZE * PAGE_SIZE;
            fs::write(format!("/sys/block/zram{index}/disksize"), pages.to_string())?;
            Ok((file, number))
        };
        let (file, number) = open().map_err(failed(format!("set up {}", path.display())))?;
        device.file = Some(file);
        (device.major, device.minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        let path = path.display().to_string();
        let options = ["-q", "-O", "^has_journal", "-m", "0", "-E", "lazy_itable_init=0"];
        program("mkfs.ext4", &[&options[..], &["-L", LABEL, &path]].concat())?;
        Ok(device)
    }

    /// Its number in the files of the controller.
    fn number(&self) -> String {
        format!("{}:{}", self.major, self.minor)
    }

    fn throttle(&self, throttle: Throttle) -> Result<(), EmulateError> {
        let controller = controller()?;
        for (file, limit) in [("read_iops", throttle.read_iops), ("read_bps", throttle.read_bps)] {
            let path = controller.join(format!("blkio.throttle.{file}_device"));
            // A limit of 0 removes one.
            let rule = format!("{} {limit}", self.number());
            fs::write(&path, rule)
                .map_err(failed(format!("write a limit to {}", path.display())))?;
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
        self.file = None;
        // The unmount is over when the last file is closed, which may be one of a process that is
        // just ending. A drop cannot return an error; what is left is removed later.
        for _ in 0..100 {
            if remove(self.index).is_ok() {
                return;
            }
            sleep(Duration::from_millis(10));
        }
    }
}

/// Loads the kernel's module, if it is one and is not loaded.
fn load_zram() -> Result<(), EmulateError> {
    if !Path::new(CONTROL).exists() {
        program("modprobe", &["zram"])?;
    }
    Ok(())
}

fn device_path(index: u32) -> PathBuf {
    format!("/dev/zram{index}").into()
}

/// Removes a device with its memory. The kernel refuses it while the device is open or mounted.
fn remove(index: u32) -> io::Result<()> {
    fs::write(Path::new(CONTROL).join("hot_remove"), index.to_string())
}

/// Removes the disks of processes that were killed.
fn remove_left() {
    let Ok(devices) = fs::read_dir("/sys/block") else { return };
    for name in devices.flatten().map(|device| device.file_name()) {
        let index = name.to_str().and_then(|name| name.strip_prefix("zram")?.parse().ok());
        if let Some(index) = index
            && has_label(&device_path(index))
        {
            // One in use is refused.
            let _ = remove(index);
        }
    }
}

fn has_label(device: &Path) -> bool {
    let mut label = [0; LABEL.len() + 1];
    let read = File::open(device).and_then(|file| file.read_exact_at(&mut label, LABEL_OFFSET));
    read.is_ok() && label.strip_suffix(b"\0") == Some(LABEL.as_bytes())
}

fn failed(what: impl Into<String>) -> impl FnOnce(io::Error) -> EmulateError {
    let what = what.into();
    |source| EmulateError::Io { what, source }
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
    let output =
        output.map_err(failed(format!("start {name} (Debian: apt-get install e2fsprogs kmod)")))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() {
        return Ok(text(&output.stdout));
    }
    Err(EmulateError::Program { program: name, output: text(&output.stderr) })
}

#[cfg(test)]
#[path = "emulated_tests.rs"]
mod tests;
