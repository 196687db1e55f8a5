//! The memory usage of a guest.

use firn_base::PAGE_SIZE;
use firn_snapshot::PageSet;
use serde::Serialize;
use thiserror::Error;

use super::pages::{FILE, PRESENT, SWAPPED, pagemap_entries};
use super::{Backing, GuestMemory};
use crate::own_files::{OwnFiles, OwnFilesError};
use crate::slot::host_addr;

/// The memory that a guest uses on this host, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryUsage {
    /// Mapped by this process's page tables: the sum of the four below. The kernel maps cached
    /// neighbours of a faulting page as well (`fault_around_bytes`), so this can be more than the
    /// guest touched.
    pub resident: u64,
    /// Private to this guest: anonymous memory and copies of file pages.
    pub private: u64,
    /// In the page cache, once for all guests that map it.
    pub shared: u64,
    /// In the pool of the snapshot, including a replica: no DRAM of this guest.
    pub pool: u64,
    /// The copy of chunks of the extent that was made ahead for this guest: DRAM that it alone
    /// uses.
    pub copies: u64,
    /// Page tables of the whole process.
    pub page_tables: u64,
    /// Anonymous memory of the process outside guest memory: that of the monitor itself. Its
    /// program is in the page cache.
    pub monitor: u64,
}

/// Why the usage could not be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum UsageError {
    /// The files of this process could not be opened.
    #[error(transparent)]
    Open(#[from] OwnFilesError),
    /// /proc/self/pagemap could not be read.
    #[error("cannot read /proc/self/pagemap")]
    Pagemap(#[source] std::io::Error),
    /// /proc/self/smaps could not be read.
    #[error("cannot read /proc/self/smaps")]
    Smaps(#[source] std::io::Error),
    /// /proc/self/status could not be read.
    #[error("cannot read /proc/self/status")]
    Status(#[source] procfs::ProcError),
}

impl GuestMemory {
    /// The usage now, from /proc/self/smaps. The kernel walks the page tables of the whole process,
    /// which takes milliseconds for a guest that has touched a GiB.
    ///
    /// # Errors
    ///
    /// [`UsageError`] when /proc cannot be read.
    pub fn usage(&self) -> Result<MemoryUsage, UsageError> {
        let files = OwnFiles::of_process();
        let status = files.status().map_err(UsageError::Status)?;
        let page_tables = status.vmpte.unwrap_or(0) * 1024;
        let mut usage = MemoryUsage { page_tables, ..MemoryUsage::default() };
        if matches!(self.backing, Backing::Extent | Backing::Sealed | Backing::Replica) {
            self.count_extent(&mut usage).map_err(UsageError::Pagemap)?;
        } else {
            let smaps = files.smaps().map_err(UsageError::Smaps)?;
            self.count_mappings(&smaps, &mut usage);
        }
        let anonymous = status.rssanon.unwrap_or(0) * 1024;
        usage.monitor = anonymous.saturating_sub(usage.private);
        Ok(usage)
    }

    /// Counts from smaps, which has an entry of some twenty-five lines for each mapping of this
    /// process, of which there may be tens of thousands: two lines of each entry are parsed, and no
    /// map of all of them is built.
    fn count_mappings(&self, smaps: &str, usage: &mut MemoryUsage) {
        let mut is_guest = false;
        for line in smaps.lines() {
            if let Some((start, end)) = mapping_of(line) {
                // Pages without access surround guest memory, so no mapping is partly guest memory.
                is_guest = self
                    .slots
                    .iter()
                    .any(|slot| start >= slot.host_addr && end <= slot.host_addr + slot.len);
            } else if is_guest {
                usage.resident += field(line, "Rss:");
                usage.private += field(line, "Anonymous:");
            }
        }
        usage.shared = usage.resident.saturating_sub(usage.private);
    }

    /// The image pages that are private to this process: anonymous memory, and pages that the
    /// kernel copied on a write.
    pub(crate) fn private_pages(&self) -> std::io::Result<PageSet> {
        let pagemap = OwnFiles::of_process().pagemap()?;
        let mut private = PageSet::new(self.layout.pages());
        for region in self.layout.regions() {
            let addr = host_addr(&self.slots, region.guest_addr);
            let addr = addr.ok_or(std::io::ErrorKind::InvalidInput)?;
            let entries = pagemap_entries(pagemap, addr, region.len)?;
            let pages = (region.image_offset / PAGE_SIZE..).zip(entries);
            let is_private = |entry| entry & (PRESENT | SWAPPED) != 0 && entry & FILE == 0;
            for (page, _) in pages.filter(|(_, entry)| is_private(*entry)) {
                private.insert(page);
            }
        }
        Ok(private)
    }

    /// Counts from pagemap, which has the owner of each page. smaps tells pages of a huge page file
    /// from copies of them by the number of processes that map them. An entry of a file page that
    /// the kernel is moving has the bits of a swapped page and of a file.
    fn count_extent(&self, usage: &mut MemoryUsage) -> std::io::Result<()> {
        let pagemap = OwnFiles::of_process().pagemap()?;
        for slot in &self.slots {
            for (range, copied) in self.copied.split(slot.guest_addr..slot.guest_addr + slot.len) {
                let addr = slot.host_addr + (range.start - slot.guest_addr);
                for entry in pagemap_entries(pagemap, addr, range.end - range.start)? {
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

/// The addresses of a mapping, from the first line of its entry: `7f00-7f10 rw-p …`.
fn mapping_of(line: &str) -> Option<(u64, u64)> {
    let (start, end) = line.split_once(' ')?.0.split_once('-')?;
    Some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?))
}

/// The bytes of a line `Rss:   12 kB` if it has this name, else 0.
fn field(line: &str, name: &str) -> u64 {
    let value = line.strip_prefix(name).and_then(|rest| rest.trim().strip_suffix(" kB"));
    value.and_then(|kib| kib.parse::<u64>().ok()).unwrap_or_default() * 1024
}
