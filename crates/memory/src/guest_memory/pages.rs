//! The pages of guest memory, for a freeze.

use std::cmp::Reverse;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use firn_base::num::usize_of;
use firn_base::{PAGE_SIZE, PageRange};
use firn_snapshot::{Chunk, MemoryLayout, PageSet, PageSource};
use thiserror::Error;
use vm_memory::{Bytes, GuestAddress};

use super::{Backing, GuestMemory};
use crate::own_files::OwnFiles;
use crate::page_cache::for_each_stored;
use crate::slot::host_addr;

/// A file with one entry for each page of this process (Linux, admin-guide/mm/pagemap).
/// Size of an entry, in bytes.
const ENTRY: usize = 8;
/// Bit of an entry: the page belongs to a file or is shared anonymous memory.
pub(super) const FILE: u64 = 1 << 61;
/// Bit of an entry: the page is swapped out.
pub(super) const SWAPPED: u64 = 1 << 62;
/// Bit of an entry: the page is present in this process's page tables.
pub(super) const PRESENT: u64 = 1 << 63;

/// The most ranges that [`GuestMemory::reported_free`] lists. Linux reports ranges of at least
/// 2 MiB, so it has more only above 16 GiB.
pub(super) const MAX_REPORTED: usize = 8192;

/// The pages of a paused guest, for [`Writer`](firn_snapshot::Writer).
///
/// A page that is in no page table has the contents of its mapping: zeros, or the bytes of the
/// image. /proc/self/pagemap identifies such pages, and they are read from the image without a page
/// fault, so reading all guest memory uses no DRAM. Pages from the image are checked against the
/// snapshot's digests, where the plan's sources have them, because the new snapshot's digests would
/// otherwise cover damaged bytes.
#[derive(Debug)]
pub struct GuestPages<'a> {
    memory: &'a GuestMemory,
    /// `None` in a process without /proc, where every page counts as touched.
    pagemap: Option<&'static File>,
    written: Option<PageSet>,
}

/// The image is shorter than guest memory.
#[derive(Debug, Error)]
#[error(
    "the image has {len} bytes, but the microVM's memory needs {needed}: the file was truncated while it was in use"
)]
struct TruncatedImage {
    /// Its length in bytes.
    len: u64,
    /// The end of the memory that is mapped from it.
    needed: u64,
}

impl GuestMemory {
    /// The pages of this memory, for a freeze. The guest must not run while they are read.
    pub fn pages(&self) -> GuestPages<'_> {
        let pagemap = OwnFiles::of_process().pagemap().ok();
        GuestPages { memory: self, pagemap, written: None }
    }

    /// Reads a byte of every page, so that all are there: another process may provide them.
    ///
    /// # Errors
    ///
    /// The kernel cannot read a page.
    pub fn touch_all(&self) -> io::Result<()> {
        for region in self.layout.regions() {
            for address in region.guest_range().step_by(usize_of(PAGE_SIZE)) {
                let byte = self.mapped.memory.read_obj::<u8>(GuestAddress(address));
                byte.map_err(io::Error::other)?;
            }
        }
        Ok(())
    }
}

impl GuestMemory {
    /// The image pages that the guest has reported free, touched since or not.
    pub(crate) fn reported(&self) -> PageSet {
        self.reported.lock().clone()
    }

    /// The image pages that the guest reported free ([`discard`](GuestMemory::discard)) and that
    /// were not touched since, ascending: they are zeros. No page is read. Of more than
    /// `MAX_REPORTED` ranges the longest are listed; the others are pages like any other, and so
    /// are all in a process without /proc.
    ///
    /// # Errors
    ///
    /// The error of reading /proc/self/pagemap.
    pub fn reported_free(&self) -> io::Result<Vec<PageRange>> {
        let Ok(pagemap) = OwnFiles::of_process().pagemap() else { return Ok(Vec::new()) };
        let mut free = PageSet::new(self.layout.pages());
        let reported = self.reported.lock();
        for region in self.layout.regions() {
            let image = region.image_range();
            for pages in reported.ranges_in(image.start / PAGE_SIZE..image.end / PAGE_SIZE) {
                let start = region.guest_addr + (pages.start * PAGE_SIZE - image.start);
                let addr = host_addr(&self.slots, start).ok_or(io::ErrorKind::InvalidInput)?;
                let len = (pages.end - pages.start) * PAGE_SIZE;
                let untouched = pages.zip(pagemap_entries(pagemap, addr, len)?);
                let untouched = untouched.filter(|(_, entry)| entry & (PRESENT | SWAPPED) == 0);
                untouched.for_each(|(page, _)| free.insert(page));
            }
        }
        let mut ranges = free.to_ranges();
        if ranges.len() > MAX_REPORTED {
            ranges.sort_unstable_by_key(|range| Reverse(range.pages));
            ranges.truncate(MAX_REPORTED);
            ranges.sort_unstable_by_key(|range| range.first);
        }
        Ok(ranges)
    }
}

impl PageSource for GuestPages<'_> {
    fn layout(&self) -> &MemoryLayout {
        &self.memory.layout
    }

    fn written(&self) -> Option<&PageSet> {
        self.written.as_ref()
    }

    fn chunk<'a>(&'a self, image_offset: u64, buf: &'a mut [u8]) -> io::Result<Chunk<'a>> {
        let chunk = image_offset..image_offset + buf.len() as u64;
        let mut content = Vec::new();
        for region in self.memory.layout.regions() {
            let part = region.image_range();
            let part = part.start.max(chunk.start)..part.end.min(chunk.end);
            if part.is_empty() {
                continue;
            }
            let guest_addr = region.guest_addr + (part.start - region.image_offset);
            let mut page = (part.start - chunk.start) / PAGE_SIZE;
            let touched = self.touched(guest_addr, part.end - part.start)?;
            for run in touched.chunk_by(|a, b| a == b) {
                let pages = usize_of(page)..usize_of(page) + run.len();
                let at = chunk.start + page * PAGE_SIZE;
                page += run.len() as u64;
                let bytes = usize_of(PAGE_SIZE) * pages.start..usize_of(PAGE_SIZE) * pages.end;
                let guest_addr = guest_addr + (at - part.start);
                if self.read(guest_addr, at, run[0], &mut buf[bytes])? {
                    content.push(pages);
                }
            }
        }
        Ok(if content.is_empty() { Chunk::Zero } else { Chunk::Pages(buf, content) })
    }
}

impl GuestPages<'_> {
    /// The same pages, of which these were written, for a freeze that writes no others.
    #[must_use]
    pub fn with_written(self, written: PageSet) -> Self {
        Self { written: Some(written), ..self }
    }

    /// Reads whole pages within one region, all of them touched or all untouched; returns `false`
    /// when they are zeros, whatever is in the buffer then.
    fn read(
        &self,
        guest_addr: u64,
        image_offset: u64,
        touched: bool,
        buf: &mut [u8],
    ) -> io::Result<bool> {
        if !touched {
            return self.read_untouched(guest_addr, image_offset, buf);
        }
        let memory = &self.memory.mapped.memory;
        memory.read_slice(buf, GuestAddress(guest_addr)).map_err(io::Error::other)?;
        Ok(true)
    }

    /// For each page, whether it is in this process's page tables or in swap.
    fn touched(&self, guest_addr: u64, len: u64) -> io::Result<Vec<bool>> {
        let addr = host_addr(&self.memory.slots, guest_addr).ok_or(io::ErrorKind::InvalidInput)?;
        let Some(pagemap) = self.pagemap else {
            return Ok(vec![true; usize_of(len / PAGE_SIZE)]);
        };
        let entries = pagemap_entries(pagemap, addr, len)?;
        Ok(entries.into_iter().map(|entry| entry & (PRESENT | SWAPPED) != 0).collect())
    }

    /// Reads untouched pages from their mapping; returns `false` when all are zeros, whatever is in
    /// the buffer then.
    fn read_untouched(&self, guest_addr: u64, offset: u64, buf: &mut [u8]) -> io::Result<bool> {
        let (image, digests) = match &self.memory.backing {
            Backing::None => return Ok(false),
            Backing::Image { file, digests } => (file, digests),
            // Reading through the mapping uses no DRAM, but for what a pager fills.
            Backing::Extent | Backing::Sealed | Backing::Replica => {
                let memory = &self.memory.mapped.memory;
                memory.read_slice(buf, GuestAddress(guest_addr)).map_err(io::Error::other)?;
                return Ok(true);
            }
        };
        buf.fill(0);
        let range = guest_addr..guest_addr + buf.len() as u64;
        let anonymous = self.memory.anonymous.lock();
        let mut filled = false;
        for (part, is_anonymous) in anonymous.split(range) {
            if is_anonymous {
                continue;
            }
            let part = offset + (part.start - guest_addr)..offset + (part.end - guest_addr);
            let len = image.metadata()?.len();
            if len < part.end {
                return Err(io::Error::other(TruncatedImage { len, needed: part.end }));
            }
            for_each_stored(image, part.clone(), |stored: Range<u64>| {
                filled = true;
                let buf = &mut buf[usize_of(stored.start - offset)..usize_of(stored.end - offset)];
                image.read_exact_at(buf, stored.start)
            })?;
            if let Some(digests) = digests {
                let bytes = &buf[usize_of(part.start - offset)..usize_of(part.end - offset)];
                digests.check(part.start / PAGE_SIZE, bytes).map_err(io::Error::other)?;
            }
        }
        Ok(filled)
    }
}

/// The entries of pagemap for the pages of `len` bytes at `addr`.
pub(super) fn pagemap_entries(pagemap: &File, addr: u64, len: u64) -> io::Result<Vec<u64>> {
    let mut entries = vec![0; usize_of(len / PAGE_SIZE) * ENTRY];
    pagemap.read_exact_at(&mut entries, addr / PAGE_SIZE * ENTRY as u64)?;
    let (entries, _) = entries.as_chunks::<ENTRY>();
    Ok(entries.iter().map(|entry| u64::from_ne_bytes(*entry)).collect())
}
