//! The page size at which the kernel mapped a range.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;

use firn_base::num::u64_of;

const SMALL: u64 = 4096;
const HUGE: u64 = 2 << 20;

/// Bytes of the smallest leaf of a populated mapping; 4 KiB if the kernel does not report it.
pub(super) fn of_mapping(start: usize, len: u64) -> u64 {
    let huge = scan(u64_of(start), len).unwrap_or_else(|_| {
        // For Linux before 6.7, which does not report leaves of DAX files here. The file may
        // contain paths that are not UTF-8.
        let smaps = fs::read("/proc/self/smaps").unwrap_or_default();
        huge_bytes(&String::from_utf8_lossy(&smaps), start)
    });
    if huge >= len { HUGE } else { SMALL }
}

/// `struct pm_scan_arg` (Documentation/admin-guide/mm/pagemap.rst).
#[repr(C)]
#[derive(Default)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    regions: u64,
    regions_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region`: consecutive pages of the same categories.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// `_IOWR('f', 16, struct pm_scan_arg)`
const PAGEMAP_SCAN: libc::c_ulong = 0xc060_6610;
const PAGE_IS_HUGE: u64 = 1 << 6;

const _: () = assert!(size_of::<ScanArgument>() == 0x60);

/// Bytes of a range of this process that its page tables map by leaves of 2 MiB or more.
fn scan(start: u64, len: u64) -> io::Result<u64> {
    let pagemap = File::open("/proc/self/pagemap")?;
    let mut regions = [Region::default(); 64];
    let end = start.saturating_add(len);
    let (mut at, mut huge) = (start, 0);
    while at < end {
        let mut argument = ScanArgument {
            size: u64_of(size_of::<ScanArgument>()),
            start: at,
            end,
            regions: u64_of(regions.as_mut_ptr().addr()),
            regions_len: u64_of(regions.len()),
            category_mask: PAGE_IS_HUGE,
            return_mask: PAGE_IS_HUGE,
            ..ScanArgument::default()
        };
        // SAFETY: the kernel reads and writes the argument and at most `regions_len` regions; it
        // changes no page.
        let found = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut argument) };
        let found = usize::try_from(found).map_err(|_| io::Error::last_os_error())?;
        huge += regions.iter().take(found).map(|region| region.end - region.start).sum::<u64>();
        if argument.walk_end <= at {
            return Err(io::ErrorKind::Other.into());
        }
        at = argument.walk_end;
    }
    Ok(huge)
}

/// Bytes of the mapping at `start` in leaves of 2 MiB (proc_pid_smaps(5)).
fn huge_bytes(smaps: &str, start: usize) -> u64 {
    let head = format!("{start:x}-");
    let lines = smaps.lines().skip_while(|line| !line.starts_with(&head)).skip(1);
    // The header of the next mapping begins with an address, all other lines with a capital letter.
    let lines = lines.take_while(|line| line.starts_with(|c: char| c.is_ascii_uppercase()));
    let huge = ["ShmemPmdMapped:", "FilePmdMapped:", "Shared_Hugetlb:", "Private_Hugetlb:"];
    lines
        .filter_map(|line| {
            let value = huge.iter().find_map(|name| line.strip_prefix(name))?;
            value.trim().strip_suffix(" kB")?.parse::<u64>().ok()
        })
        .map(|kib| kib << 10)
        .sum()
}

#[cfg(test)]
#[path = "leaf_tests.rs"]
mod tests;
