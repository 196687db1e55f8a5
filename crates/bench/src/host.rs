//! What a result says of the host that it was measured on.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use firn_memory::{HostFacts, HostFactsError};
use firn_vmm::Virtualization;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Set in the lab, where counts are true and times are not.
const LAB_VARIABLE: &str = "FIRN_LAB";

/// The host, the medium and the build.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// Processors and memory: `2 x AMD EPYC, 23 GiB`.
    pub machine: String,
    /// Processors that this process may use.
    pub cpus: u64,
    /// DRAM in bytes.
    pub memory_bytes: u64,
    /// The kernel's release.
    pub kernel: String,
    /// How KVM runs a guest here.
    pub kvm: KvmKind,
    /// File system and device under the snapshot: `ext4 on /dev/vda (virtio disk)`.
    pub medium: String,
    /// The commit of this build, with `+changes` where the sources had others; `unknown` outside git.
    pub commit: String,
}

/// How KVM runs a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvmKind {
    /// VT-x or SVM.
    Hardware,
    /// KVM with software page tables.
    Software,
    /// The lab's KVM, in an emulated machine: times say nothing of performance.
    Lab,
}

impl std::fmt::Display for KvmKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Hardware => "hardware KVM",
            Self::Software => "software-paged KVM",
            Self::Lab => "the lab's KVM (times say nothing of performance)",
        })
    }
}

/// Bytes of all KVMs' own page tables on this host (`SecPageTables`, Linux 6.1); 0 where the kernel does not tell.
pub(crate) fn kvm_table_bytes() -> u64 {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let value = meminfo.lines().find_map(|line| line.strip_prefix("SecPageTables:"));
    let kib = value.and_then(|value| value.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.unwrap_or_default() * 1024
}

/// Why the host could not be described.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HostError {
    /// The kernel does not tell.
    #[error(transparent)]
    Facts(#[from] HostFactsError),
    /// A file could not be read.
    #[error("reading {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}

impl Host {
    /// Describes this host, and the medium under a directory.
    ///
    /// # Errors
    ///
    /// [`HostError`] when /proc does not answer, or the directory does not exist.
    pub fn of(directory: &Path) -> Result<Self, HostError> {
        let read = |path: &str| {
            fs::read_to_string(path).map_err(|source| HostError::Read { path: path.into(), source })
        };
        let facts = HostFacts::read()?;
        let cpuinfo = "/proc/cpuinfo";
        let model = model(&read(cpuinfo)?).unwrap_or_else(|| std::env::consts::ARCH.to_owned());
        let cpus = std::thread::available_parallelism()
            .map_err(|source| HostError::Read { path: cpuinfo.into(), source })?
            .get() as u64;
        let kvm = if std::env::var_os(LAB_VARIABLE).is_some() {
            KvmKind::Lab
        } else {
            match Virtualization::detect()
                .map_err(|source| HostError::Read { path: cpuinfo.into(), source })?
            {
                Virtualization::Hardware => KvmKind::Hardware,
                Virtualization::Software => KvmKind::Software,
            }
        };
        let canonical = fs::canonicalize(directory)
            .map_err(|source| HostError::Read { path: directory.to_owned(), source })?;
        let device = fs::metadata(&canonical)
            .map_err(|source| HostError::Read { path: canonical.clone(), source })?
            .dev();
        let mount = mount_of(&read("/proc/self/mountinfo")?, &canonical);
        Ok(Self {
            machine: format!("{cpus} x {model}, {} GiB", facts.memory_total >> 30),
            cpus,
            memory_bytes: facts.memory_total,
            kernel: facts.kernel,
            kvm,
            medium: mount.map_or("unknown".to_owned(), |mount| mount.name(device)),
            commit: env!("FIRN_COMMIT").to_owned(),
        })
    }

    /// One line for people.
    #[must_use]
    pub fn line(&self) -> String {
        let Self { machine, kernel, kvm, medium, commit, .. } = self;
        format!("{machine}; Linux {kernel}; {kvm}; {medium}; firn {commit}")
    }
}

/// The processor's name in /proc/cpuinfo.
fn model(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// A mount, as in /proc/self/mountinfo (proc(5)).
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    file_system: String,
    source: String,
    options: String,
}

/// The mount that a path lies in: the one with the longest mount point, and of several there the last.
fn mount_of(mountinfo: &str, path: &Path) -> Option<Mount> {
    let mounts = mountinfo.lines().filter_map(|line| {
        let (place, kind) = line.split_once(" - ")?;
        // Spaces in names are written \040.
        let point = PathBuf::from(place.split(' ').nth(4)?.replace("\\040", " "));
        let mut kind = kind.split(' ');
        let mount = Mount {
            file_system: kind.next()?.to_owned(),
            source: kind.next()?.to_owned(),
            options: kind.next().unwrap_or_default().to_owned(),
        };
        path.starts_with(&point).then_some((point.components().count(), mount))
    });
    mounts.max_by_key(|(depth, _)| *depth).map(|(_, mount)| mount)
}

impl Mount {
    /// For people: file system, device, and what kind of device it is.
    fn name(&self, device: u64) -> String {
        let Self { file_system, source, options } = self;
        if file_system == "tmpfs" {
            let huge = options.split(',').find(|option| option.starts_with("huge="));
            return huge.map_or("tmpfs".to_owned(), |huge| format!("tmpfs {huge}"));
        }
        let dax =
            if options.split(',').any(|option| option.starts_with("dax")) { " dax" } else { "" };
        let kind = device_kind(device).map_or(String::new(), |kind| format!(" ({kind})"));
        format!("{file_system}{dax} on {source}{kind}")
    }
}

/// What a block device is, by its place in sysfs.
fn device_kind(device: u64) -> Option<&'static str> {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let place = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).ok()?;
    let text = place.to_str()?;
    if text.contains("/virtio") {
        return Some("virtio disk");
    }
    if text.contains("/nvme") {
        return Some("NVMe disk");
    }
    // A partition's queue is its disk's.
    let queue = [place.join("queue"), place.parent()?.join("queue")];
    let rotational = queue.iter().find_map(|q| fs::read_to_string(q.join("rotational")).ok())?;
    Some(if rotational.trim() == "1" { "rotating disk" } else { "solid-state disk" })
}

#[cfg(test)]
#[path = "host_tests.rs"]
mod tests;
