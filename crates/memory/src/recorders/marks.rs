//! The pages of guest memory that were written, from the marks in this process's page tables
//! (`PAGEMAP_SCAN`, Linux 6.7: `Documentation/admin-guide/mm/pagemap.rst`).

use std::fs::File;
use std::io;
use std::ops::Range;

use firn_base::PAGE_SIZE;
use firn_snapshot::PageSet;
use linux_raw_sys::general::{
    PAGE_IS_PRESENT, PAGE_IS_SWAPPED, PAGE_IS_WRITTEN, page_region, pm_scan_arg,
};
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};

use crate::guest_memory::GuestMemory;
use crate::own_files::OwnFiles;

/// The ioctl, which linux-raw-sys does not have.
const PAGEMAP_SCAN: Opcode = opcode::read_write::<pm_scan_arg>(b'f', 16);
const EMPTY: page_region = page_region { start: 0, end: 0, categories: 0 };
/// The number of regions that one call returns at most.
const BATCH: usize = 64;

/// The image pages that are present and not write-protected. The memory is registered with a
/// userfaultfd that has [`WRITE_PROTECT_ASYNC`](crate::uffd::Features::WRITE_PROTECT_ASYNC), and a
/// page that is read first is protected: these pages were written, and not discarded since.
pub(super) fn marked(memory: &GuestMemory) -> io::Result<PageSet> {
    let (pagemap, layout) = (OwnFiles::of_process().pagemap()?, memory.layout());
    let mut pages = PageSet::new(layout.pages());
    for slot in memory.slots() {
        scan(pagemap, slot.host_addr..slot.host_addr + slot.len, |written| {
            let guest = slot.guest_addr + (written.start - slot.host_addr);
            if let Some(offset) = layout.image_offset(guest) {
                let first = offset / PAGE_SIZE;
                pages.insert_range(first..first + (written.end - written.start) / PAGE_SIZE);
            }
        })?;
    }
    Ok(pages)
}

/// Calls `found` with each part of a range of this process that was written.
fn scan(pagemap: &File, range: Range<u64>, mut found: impl FnMut(Range<u64>)) -> io::Result<()> {
    let mut at = range.start;
    while at < range.end {
        let mut regions = [EMPTY; BATCH];
        let mut argument = pm_scan_arg {
            size: size_of::<pm_scan_arg>() as u64,
            flags: 0,
            start: at,
            end: range.end,
            walk_end: 0,
            vec: regions.as_mut_ptr().addr() as u64,
            vec_len: BATCH as u64,
            max_pages: 0,
            category_inverted: 0,
            category_mask: PAGE_IS_WRITTEN.into(),
            category_anyof_mask: (PAGE_IS_PRESENT | PAGE_IS_SWAPPED).into(),
            return_mask: PAGE_IS_WRITTEN.into(),
        };
        // SAFETY: the value is what PAGEMAP_SCAN takes.
        let operation = unsafe { Updater::<PAGEMAP_SCAN, _>::new(&mut argument) };
        // SAFETY: the kernel writes the argument and at most `vec_len` regions, and changes no
        // page.
        unsafe { ioctl(pagemap, operation) }?;
        // Unused regions end at 0.
        let filled = regions.iter().take_while(|region| region.end > 0);
        filled.for_each(|region| found(region.start..region.end));
        if argument.walk_end <= at {
            return Err(io::ErrorKind::InvalidData.into());
        }
        at = argument.walk_end;
    }
    Ok(())
}
