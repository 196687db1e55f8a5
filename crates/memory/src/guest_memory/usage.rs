//! What guest memory costs.

use std::fs::File;

use firn_base::PAGE_SIZE;
use serde::Serialize;
use thiserror::Error;

use super::pages::{FILE, PAGEMAP, PRESENT, SWAPPED, pagemap_entries};
use super::{Backing, GuestMemory, host_addr};

/// What a guest's memory costs this host now, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryUsage {
    /// Mapped by this process's page tables: the sum of the four below. The kernel maps cached neighbours
    /// of a faulting page as well (`fault_around_bytes`), so this can be more than the guest touched.
    pub resident: u64,
    /// Belongs to this guest alone: anonymous memory and copies of file pages.
    pub private: u64,
    /// Belongs to the page cache, and is there once however many guests map it.
    pub shared: u64,
    /// Belongs to the pool that the snapshot lies in, a replica included: no DRAM of this guest's.
    pub pool: u64,
    /// A copy of parts of the extent that was made ahead for this guest: DRAM that belongs to it alone.
    pub copies: u64,
    /// Page tables of the whole process.
    pub page_tables: u64,
    /// Anonymous memory of the process that is no guest memory: what the monitor itself takes. Its program is the page cache's.
    pub monitor: u64,
}

/// Why the usage could not be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum UsageError {
    /// A file of /proc could not be read.
    #[error("cannot read {path}; is /proc mounted?")]
    Read {
        /// The file.
        path: &'static str,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
}

impl GuestMemory {
    /// What guest memory costs now, from /proc/self/smaps. The kernel walks the page tables of the whole
    /// process for it: milliseconds for a guest that has touched a GiB.
    ///
    /// # Errors
    ///
    /// [`UsageError`] when /proc cannot be read.
    pub fn usage(&self) -> Result<MemoryUsage, UsageError> {
        let read = |path: &'static str| {
            std::fs::read_to_string(path).map_err(|source| UsageError::Read { path, source })
        };
        let status = read("/proc/self/status")?;
        let of_status = |name| status.lines().map(|line| field(line, name)).sum::<u64>();
        let page_tables = of_status("VmPTE:");
        let mut usage = MemoryUsage { page_tables, ..MemoryUsage::default() };
        if matches!(self.backing, Backing::Extent | Backing::Sealed | Backing::Replica) {
            self.count_extent(&mut usage)
                .map_err(|source| UsageError::Read { path: PAGEMAP, source })?;
        } else {
            self.count_mappings(&read("/proc/self/smaps")?, &mut usage);
        }
        usage.monitor = of_status("RssAnon:").saturating_sub(usage.private);
        Ok(usage)
    }

    fn count_mappings(&self, smaps: &str, usage: &mut MemoryUsage) {
        let mut ours = false;
        for line in smaps.lines() {
            if let Some((start, end)) = mapping_of(line) {
                // Pages without access lie around guest memory, so no mapping is partly ours.
                ours = self
                    .slots
                    .iter()
                    .any(|slot| start >= slot.host_addr && end <= slot.host_addr + slot.len);
            } else if ours {
                usage.resident += field(line, "Rss:");
                usage.private += field(line, "Anonymous:");
            }
        }
        usage.shared = usage.resident.saturating_sub(usage.private);
    }

    /// Of `len` bytes within one region, how many pages belong to this guest alone and are no file's.
    pub(crate) fn private_pages(&self, guest_addr: u64, len: u64) -> std::io::Result<u64> {
        let addr = host_addr(&self.slots, guest_addr).ok_or(std::io::ErrorKind::InvalidInput)?;
        let entries = pagemap_entries(&File::open(PAGEMAP)?, addr, len)?;
        let private = |entry: &&u64| **entry & (PRESENT | SWAPPED) != 0 && **entry & FILE == 0;
        Ok(u64::try_from(entries.iter().filter(private).count()).unwrap_or(u64::MAX))
    }

    /// A page of a file that the kernel is just moving reads as swapped, and is the file's still.
    ///
    /// smaps tells the pages of a huge page file from copies of them by who else has them mapped, which says nothing of
    /// who owns them; pagemap says it of each page.
    fn count_extent(&self, usage: &mut MemoryUsage) -> std::io::Result<()> {
        let pagemap = File::open(PAGEMAP)?;
        for slot in &self.slots {
            for (range, copied) in self.copied.split(slot.guest_addr..slot.guest_addr + slot.len) {
                let addr = slot.host_addr + (range.start - slot.guest_addr);
                for entry in pagemap_entries(&pagemap, addr, range.end - range.start)? {
                    if entry & (PRESENT | SWAPPED) == 0 {
                        continue;
                    }
                    usage.resident += PAGE_SIZE;
                    let bytes = if copied {
                        &mut usage.copies
                    } else if entry & FILE != 0 {
                        &mut usage.pool
                    } else {
                        &mut usage.private
                    };
                    *bytes += PAGE_SIZE;
                }
            }
        }
        Ok(())
    }
}

/// The addresses of a mapping from its head line: `7f00-7f10 rw-p …`.
fn mapping_of(line: &str) -> Option<(u64, u64)> {
    let (start, end) = line.split_once(' ')?.0.split_once('-')?;
    Some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?))
}

/// The bytes of a line `Rss:   12 kB` if it has this name, else 0.
fn field(line: &str, name: &str) -> u64 {
    let value = line.strip_prefix(name).and_then(|rest| rest.trim().strip_suffix(" kB"));
    value.and_then(|kib| kib.parse::<u64>().ok()).unwrap_or_default() * 1024
}
