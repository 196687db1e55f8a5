//! Facts about this host that planners and the `doctor` command use.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::OnceLock;

use firn_base::get_or_try_init;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::uffd::{Features, Uffd};

/// Facts about this host on which restores depend.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HostFacts {
    /// The kernel's release: `6.12.0-13-cloud-amd64`.
    pub kernel: String,
    /// DRAM in bytes (`MemTotal`).
    pub memory_total: u64,
    /// DRAM in bytes that is available without swapping (`MemAvailable`).
    pub memory_available: u64,
    /// Sizes in bytes of the huge pages of hugetlbfs, ascending.
    pub huge_page_sizes: Vec<u64>,
    /// When anonymous memory gets transparent huge pages: `always`, `madvise` or `never`; `None`
    /// where the kernel does not support them.
    pub transparent_huge_pages: Option<String>,
    /// The same for shared memory and tmpfs: also `within_size`, `advise`, `deny`, `force`.
    pub shmem_huge_pages: Option<String>,
    /// The most mappings that a process may have (`vm.max_map_count`).
    pub max_mappings: u64,
    /// Whether this process may serve page faults, including those of the kernel, with userfaultfd.
    pub userfaultfd: bool,
}

/// Why the facts could not be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HostFactsError {
    /// A file could not be read.
    #[error("cannot read {path}; are /proc and /sys mounted?")]
    Read {
        /// The file.
        path: &'static str,
        /// The error of the read.
        #[source]
        source: io::Error,
    },
    /// A file lacks a value.
    #[error("{path} has no value {name}")]
    Missing {
        /// The file.
        path: &'static str,
        /// The name of the value.
        name: &'static str,
    },
}

const MEMINFO: &str = "/proc/meminfo";
const HUGE_PAGES: &str = "/sys/kernel/mm/hugepages";
const THP: &str = "/sys/kernel/mm/transparent_hugepage";

impl HostFacts {
    /// Reads the facts, without changing anything.
    ///
    /// # Errors
    ///
    /// [`HostFactsError`] when /proc is there and cannot be read.
    pub fn read() -> Result<Self, HostFactsError> {
        let (memory_total, memory_available) = match fs::read_to_string(MEMINFO) {
            Ok(meminfo) => memory(&meminfo)?,
            // Firecracker's jail has no /proc.
            Err(error) if error.kind() == io::ErrorKind::NotFound => memory_without_proc(),
            Err(source) => return Err(HostFactsError::Read { path: MEMINFO, source }),
        };
        Ok(Self {
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            memory_total,
            memory_available,
            huge_page_sizes: huge_page_sizes(),
            transparent_huge_pages: chosen(&Path::new(THP).join("enabled")),
            shmem_huge_pages: chosen(&Path::new(THP).join("shmem_enabled")),
            // The kernel's default where /proc has no value.
            max_mappings: procfs::sys::vm::max_map_count().unwrap_or(65_530),
            userfaultfd: Uffd::open(Features::empty()).is_ok(),
        })
    }
}

static FACTS: OnceLock<HostFacts> = OnceLock::new();

impl HostFacts {
    /// The facts as they were at the first call in this process, or as it [knows](Self::know) them.
    ///
    /// # Errors
    ///
    /// See [`HostFacts::read`].
    pub fn of_process() -> Result<&'static Self, HostFactsError> {
        get_or_try_init(&FACTS, Self::read)
    }

    /// Makes these the facts of this process, which another one has read, unless it knows some.
    pub fn know(self) {
        let _ = FACTS.set(self);
    }
}

/// Total and available memory, bytes.
fn memory(meminfo: &str) -> Result<(u64, u64), HostFactsError> {
    let value = |name| kib_of(meminfo, name).ok_or(HostFactsError::Missing { path: MEMINFO, name });
    Ok((value("MemTotal")? * 1024, value("MemAvailable")? * 1024))
}

/// The same from sysinfo(2), which counts none of the page cache as available.
fn memory_without_proc() -> (u64, u64) {
    let info = rustix::system::sysinfo();
    let unit = u64::from(info.mem_unit);
    (info.totalram * unit, info.freeram * unit)
}

/// The value of a line `MemTotal:   123 kB`. Every start reads two of some fifty lines, so they are
/// not all parsed.
fn kib_of(meminfo: &str, name: &str) -> Option<u64> {
    let mut values = meminfo.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    values.next()?.trim().strip_suffix(" kB")?.parse().ok()
}

/// Parsed from names like `hugepages-2048kB`; empty where the kernel has no hugetlbfs.
fn huge_page_sizes() -> Vec<u64> {
    let Ok(entries) = fs::read_dir(HUGE_PAGES) else { return Vec::new() };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut sizes: Vec<u64> = names.filter_map(|name| huge_page_size(&name)).collect();
    sizes.sort_unstable();
    sizes
}

fn huge_page_size(name: &str) -> Option<u64> {
    let kib: u64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
    kib.checked_mul(1024)
}

/// The word in brackets: `always [madvise] never`.
fn chosen(path: &Path) -> Option<String> {
    let words = fs::read_to_string(path).ok()?;
    let word = words.split_whitespace().find_map(|w| w.strip_prefix('[')?.strip_suffix(']'))?;
    Some(word.to_owned())
}

#[cfg(test)]
#[path = "host_facts_tests.rs"]
mod tests;
