//! The description of the host in results.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use firn_base::processors;
use firn_memory::{HostFacts, HostFactsError};
use firn_vmm::Virtualization;
use procfs::process::{MountInfo, Process};
use procfs::{CpuInfo, Current, Meminfo, ProcError};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Set in the lab, where counts are valid and times are not.
const LAB_VARIABLE: &str = "FIRN_LAB";

/// The host, the medium and the build.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// Processors and memory, such as `2 x AMD EPYC, 23 GiB`.
    pub machine: String,
    /// Processors that this process may use.
    pub cpus: u64,
    /// DRAM in bytes.
    pub memory_bytes: u64,
    /// The kernel's release.
    pub kernel: String,
    /// How KVM runs a guest on it.
    pub kvm: KvmKind,
    /// File system and device of the snapshots, such as `ext4 on /dev/vda (virtio disk)`.
    pub medium: String,
    /// The commit of this build, with `+changes` if the sources differed from it; `unknown` outside
    /// git.
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
    /// The lab's KVM, in an emulated machine: times do not measure performance.
    Lab,
}

impl std::fmt::Display for KvmKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Hardware => "hardware KVM",
            Self::Software => "software-paged KVM",
            Self::Lab => "the lab's KVM (times do not measure performance)",
        })
    }
}

/// Bytes of KVM's own page tables of all VMs on this host (`SecPageTables`, since Linux 6.1); 0 on
/// older kernels.
pub(crate) fn kvm_table_bytes() -> u64 {
    let meminfo = Meminfo::current().ok();
    meminfo.and_then(|meminfo| meminfo.secondary_page_tables).unwrap_or_default()
}

/// Why the host cannot be described.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HostError {
    /// The facts that planners need cannot be read.
    #[error(transparent)]
    Facts(#[from] HostFactsError),
    /// A file in /proc cannot be read or parsed.
    #[error("cannot describe this host from /proc")]
    Proc(#[from] ProcError),
    /// A file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
}

impl Host {
    /// Describes this host, and the medium under a directory.
    ///
    /// # Errors
    ///
    /// [`HostError`] if /proc cannot be read, or the directory does not exist.
    pub fn of(directory: &Path) -> Result<Self, HostError> {
        let facts = HostFacts::read()?;
        let cpuinfo = CpuInfo::current()?;
        let model = model(&cpuinfo);
        let cpus = processors() as u64;
        let kvm = if std::env::var_os(LAB_VARIABLE).is_some() {
            KvmKind::Lab
        } else {
            match Virtualization::of_host() {
                Virtualization::Hardware => KvmKind::Hardware,
                Virtualization::Software => KvmKind::Software,
            }
        };
        Ok(Self {
            machine: format!("{cpus} x {model}, {} GiB", facts.memory_total >> 30),
            cpus,
            memory_bytes: facts.memory_total,
            kernel: facts.kernel,
            kvm,
            medium: medium_of(directory)?,
            commit: env!("FIRN_COMMIT").to_owned(),
        })
    }

    /// One line of text.
    #[must_use]
    pub fn line(&self) -> String {
        let Self { machine, kernel, kvm, medium, commit, .. } = self;
        format!("{machine}; Linux {kernel}; {kvm}; {medium}; firn {commit}")
    }
}

/// File system and device of a path.
fn medium_of(path: &Path) -> Result<String, HostError> {
    let canonical = fs::canonicalize(path)
        .map_err(|source| HostError::Read { path: path.to_owned(), source })?;
    let device = fs::metadata(&canonical)
        .map_err(|source| HostError::Read { path: canonical.clone(), source })?
        .dev();
    let mounts = Process::myself()?.mountinfo()?;
    let mount = mount_of(&mounts.0, &canonical);
    Ok(mount.map_or("unknown".to_owned(), |mount| name(mount, device)))
}

/// The medium of a pool: the file system if it is a file, otherwise what its manager calls it, such
/// as `/dev/dax0.0` or `memfd`.
pub(crate) fn medium_of_pool(name: &str) -> String {
    let file = Some(Path::new(name)).filter(|path| path.is_file());
    file.and_then(|path| medium_of(path).ok()).unwrap_or_else(|| name.to_owned())
}

/// The processor's name; the architecture's if /proc/cpuinfo has none.
fn model(cpuinfo: &CpuInfo) -> &str {
    cpuinfo.model_name(0).unwrap_or(std::env::consts::ARCH)
}

/// The mount that contains a path: the one with the longest mount point, and the last of several
/// there.
fn mount_of<'a>(mounts: &'a [MountInfo], path: &Path) -> Option<&'a MountInfo> {
    let containing = mounts.iter().filter_map(|mount| {
        // Spaces in mount points are encoded as \040 (proc(5)).
        let point = PathBuf::from(mount.mount_point.to_str()?.replace("\\040", " "));
        path.starts_with(&point).then(|| (point.components().count(), mount))
    });
    containing.max_by_key(|(depth, _)| *depth).map(|(_, mount)| mount)
}

/// A mount's file system, device, and the kind of that device.
fn name(mount: &MountInfo, device: u64) -> String {
    let MountInfo { fs_type, mount_source, super_options, .. } = mount;
    if fs_type == "tmpfs" {
        let huge = super_options.get("huge").and_then(Option::as_ref);
        return huge.map_or("tmpfs".to_owned(), |huge| format!("tmpfs huge={huge}"));
    }
    let dax =
        if super_options.keys().any(|option| option.starts_with("dax")) { " dax" } else { "" };
    let source = mount_source.as_deref().unwrap_or("none");
    let kind = device_kind(device).map_or(String::new(), |kind| format!(" ({kind})"));
    format!("{fs_type}{dax} on {source}{kind}")
}

/// The kind of a block device, by its path in sysfs.
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
    // A partition has its disk's queue.
    let queue = [place.join("queue"), place.parent()?.join("queue")];
    let rotational = queue.iter().find_map(|q| fs::read_to_string(q.join("rotational")).ok())?;
    Some(if rotational.trim() == "1" { "rotating disk" } else { "solid-state disk" })
}

#[cfg(test)]
#[path = "host_tests.rs"]
mod tests;
