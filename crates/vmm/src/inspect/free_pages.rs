//! The free pages of a frozen Linux guest, from the metadata of its page allocator in the snapshot.
//!
//! Linux describes itself for crash dumps in a page of text, the vmcoreinfo
//! (`Documentation/admin-guide/kdump/vmcoreinfo.rst`), which is found by its first bytes. It has
//! the addresses, sizes and offsets that lead to the array of `struct page`. A page of type "buddy"
//! starts a free block of `1 << private` pages (`include/linux/page-flags.h`, `mm/page_alloc.c`).
//! Pages on per-CPU lists have no such mark and count as in use.
//!
//! Every number comes from the guest and is checked: an address outside guest memory is an error,
//! and a block that is not aligned or leaves its region is not free. Wrong metadata affects only
//! the guest's own pages. The number of steps is limited, whatever the metadata refers to and
//! however many pages begin as a vmcoreinfo does.

use std::cell::Cell;
use std::collections::HashMap;

use firn_base::{PAGE_SIZE, PageRange};
use firn_snapshot::{CHUNK_SIZE, ImageRegion, PageSet, ReadAt, Snapshot};
use thiserror::Error;

use crate::access::{PageTables, WalkEnd};

/// The first bytes of the vmcoreinfo.
const BEGIN: &[u8] = b"OSRELEASE=";
/// Linear address at which the kernel's text and data are mapped (`__START_KERNEL_map`).
const KERNEL_MAP: u64 = 0xffff_ffff_8000_0000;
/// In a `section_mem_map`: the section has an array of `struct page`. The flags are in the low 6
/// bits.
const HAS_MEM_MAP: u64 = 2;
const SECTION_FLAGS: u64 = 0x3f;
/// Steps for each page of guest memory: its `struct page`, and reads of guest memory. Linux needs
/// one read for each 12 pages: the page tables and the page of 64 `struct page`.
const STEPS_PER_PAGE: u64 = 8;
/// Further steps, for the sections of a small guest.
const MORE_STEPS: u64 = 4096;
/// Most orders of any Linux.
const MAX_ORDERS: u64 = 20;

/// Why the free pages of a snapshot's guest cannot be found.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FreePagesError {
    /// Guest memory has no vmcoreinfo.
    #[error("guest memory has no vmcoreinfo: the guest is not a Linux with CONFIG_VMCORE_INFO")]
    NoDescription,
    /// A field of the vmcoreinfo is missing or invalid.
    #[error("{0} is missing or invalid in the guest's vmcoreinfo: this kernel is not supported")]
    Unknown(&'static str),
    /// The guest's metadata has an address outside guest memory.
    #[error("the guest's page metadata refers to {0:#x}, which is outside guest memory")]
    Outside(u64),
    /// The search would take too many steps.
    #[error("the guest's page metadata takes more than {0} steps to read, which no Linux needs")]
    TooLong(u64),
    /// The image cannot be read.
    #[error("cannot read the image")]
    Image(#[from] std::io::Error),
}

/// The image pages that are free in the guest's page allocator, ascending.
///
/// # Errors
/// See [`FreePagesError`].
pub fn free_pages(snapshot: &Snapshot) -> Result<Vec<PageRange>, FreePagesError> {
    let memory = Memory::of(snapshot);
    let mut found = Err(FreePagesError::NoDescription);
    memory.each_stored_page(|bytes| {
        // Another page may start with the same bytes, such as one of a file or of an old kernel.
        let is_over = matches!(found, Ok(_) | Err(FreePagesError::TooLong(_)));
        if bytes.starts_with(BEGIN) && !is_over {
            found = Kernel::of(bytes).and_then(|kernel| kernel.free_pages(&memory));
        }
    })?;
    found.map(|free| free.to_ranges())
}

/// The memory of the frozen guest.
struct Memory<'a> {
    snapshot: &'a Snapshot,
    /// The steps that all descriptions together may take, and how many are left.
    limit: u64,
    left: Cell<u64>,
}

impl<'a> Memory<'a> {
    fn of(snapshot: &'a Snapshot) -> Self {
        let limit = snapshot.manifest().layout.pages() * STEPS_PER_PAGE + MORE_STEPS;
        Self { snapshot, limit, left: Cell::new(limit) }
    }

    fn step(&self) -> Result<(), FreePagesError> {
        let left = self.left.get().checked_sub(1).ok_or(FreePagesError::TooLong(self.limit))?;
        self.left.set(left);
        Ok(())
    }

    fn regions(&self) -> impl Iterator<Item = ImageRegion> + '_ {
        self.snapshot.manifest().layout.regions()
    }

    /// Passes every page that is not all zero to `visit`.
    fn each_stored_page(&self, mut visit: impl FnMut(&[u8])) -> Result<(), FreePagesError> {
        let mut bytes = vec![0; usize::try_from(CHUNK_SIZE).unwrap_or_default()];
        for run in self.snapshot.zero_map().gaps() {
            let (mut at, end) = (run.start * PAGE_SIZE, run.end * PAGE_SIZE);
            while at < end {
                let len = usize::try_from((end - at).min(CHUNK_SIZE)).unwrap_or_default();
                self.snapshot.image().read_exact_at(&mut bytes[..len], at)?;
                bytes[..len].chunks(4096).for_each(&mut visit);
                at += len as u64;
            }
        }
        Ok(())
    }

    /// Reads bytes at a guest-physical address, within one page.
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), FreePagesError> {
        self.step()?;
        let offset = self.snapshot.manifest().layout.image_offset(address);
        let offset = offset.ok_or(FreePagesError::Outside(address))?;
        Ok(self.snapshot.image().read_exact_at(bytes, offset)?)
    }

    fn read_word(&self, address: u64) -> Result<u64, FreePagesError> {
        if !address.is_multiple_of(8) {
            return Err(FreePagesError::Outside(address));
        }
        let mut bytes = [0; 8];
        self.read(address, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }
}

/// A kernel's description of itself. Sizes and offsets are in bytes.
#[derive(Debug)]
struct Kernel {
    tables: PageTables,
    /// The array of pointers to `struct mem_section`. The vmcoreinfo has the value of this
    /// variable, not its address.
    mem_section: u64,
    roots: u64,
    section_size: u64,
    section_map: u64,
    pages_per_section: u64,
    page_size: u64,
    page_type: u64,
    page_private: u64,
    /// The type of the first page of a free block.
    buddy: u32,
    orders: u64,
}

impl Kernel {
    fn of(page: &[u8]) -> Result<Self, FreePagesError> {
        let text = page.split(|byte| *byte == 0).next().unwrap_or_default();
        let lines = text.split(|byte| *byte == b'\n');
        let lines = lines.filter_map(|line| std::str::from_utf8(line).ok()?.split_once('='));
        let fields: HashMap<&str, &str> = lines.collect();
        let symbol = |name: &str| u64::from_str_radix(fields.get(name)?, 16).ok();
        let number = |name: &str| fields.get(name)?.parse::<i64>().ok();
        let size = |name: &'static str| {
            let value = number(name).and_then(|number| u64::try_from(number).ok());
            value.ok_or(FreePagesError::Unknown(name))
        };
        let phys_base = number("NUMBER(phys_base)").unwrap_or_default();
        let root = symbol("SYMBOL(swapper_pg_dir)").or_else(|| symbol("SYMBOL(init_top_pgt)"));
        let root = root.and_then(|root| root.checked_sub(KERNEL_MAP));
        let root = root.and_then(|root| root.checked_add_signed(phys_base));
        let root = root.ok_or(FreePagesError::Unknown("SYMBOL(swapper_pg_dir)"))?;
        let five_levels = number("NUMBER(pgtable_l5_enabled)") == Some(1);
        let mem_section = symbol("SYMBOL(mem_section)");
        let buddy = number("NUMBER(PAGE_BUDDY_MAPCOUNT_VALUE)");
        // The kernel prints the 32 bits of a type as a signed or an unsigned number.
        let buddy = buddy.map(|buddy| buddy.cast_unsigned() & u64::from(u32::MAX));
        let buddy = buddy.and_then(|buddy| u32::try_from(buddy).ok());
        let section_bits = size("NUMBER(SECTION_SIZE_BITS)")?;
        let kernel = Self {
            tables: PageTables::at(root, five_levels),
            mem_section: mem_section.ok_or(FreePagesError::Unknown("SYMBOL(mem_section)"))?,
            roots: size("LENGTH(mem_section)")?,
            section_size: size("SIZE(mem_section)")?,
            section_map: size("OFFSET(mem_section.section_mem_map)")?,
            pages_per_section: 1 << section_bits.clamp(12, 52).saturating_sub(12),
            page_size: size("SIZE(page)")?,
            page_type: size("OFFSET(page._mapcount)")?,
            page_private: size("OFFSET(page.private)")?,
            buddy: buddy.ok_or(FreePagesError::Unknown("NUMBER(PAGE_BUDDY_MAPCOUNT_VALUE)"))?,
            orders: size("LENGTH(zone.free_area)")?.min(MAX_ORDERS),
        };
        kernel.check()
    }

    /// Checks what the walk requires: each `struct page` lies within one page, and its fields
    /// within it.
    fn check(self) -> Result<Self, FreePagesError> {
        let divides = |size: u64| size >= 8 && PAGE_SIZE.is_multiple_of(size);
        let within = |offset: u64, len: u64, size: u64| offset.is_multiple_of(len) && offset < size;
        if !divides(self.page_size)
            || !within(self.page_type, 4, self.page_size)
            || !within(self.page_private, 8, self.page_size)
        {
            return Err(FreePagesError::Unknown("SIZE(page)"));
        }
        if !(8..=PAGE_SIZE).contains(&self.section_size)
            || !self.section_size.is_multiple_of(8)
            || !within(self.section_map, 8, self.section_size)
        {
            return Err(FreePagesError::Unknown("SIZE(mem_section)"));
        }
        Ok(self)
    }

    fn free_pages(&self, memory: &Memory<'_>) -> Result<PageSet, FreePagesError> {
        let mut free = PageSet::new(memory.snapshot.manifest().layout.pages());
        for region in memory.regions() {
            let (mut page, end) =
                (region.guest_addr / PAGE_SIZE, (region.guest_addr + region.len) / PAGE_SIZE);
            let mut structs = Structs::default();
            while page < end {
                memory.step()?;
                let Some(map) = self.map_of(memory, page / self.pages_per_section)? else {
                    page = (page / self.pages_per_section + 1) * self.pages_per_section;
                    continue;
                };
                let section_end =
                    ((page / self.pages_per_section + 1) * self.pages_per_section).min(end);
                while page < section_end {
                    memory.step()?;
                    let block = self.block(memory, &mut structs, map, page)?;
                    let fits = |pages: &u64| page.is_multiple_of(*pages) && *pages <= end - page;
                    match block.filter(fits) {
                        Some(pages) => {
                            let first = page - region.guest_addr / PAGE_SIZE
                                + region.image_offset / PAGE_SIZE;
                            free.insert_range(first..first + pages);
                            page += pages;
                        }
                        None => page += 1,
                    }
                }
            }
        }
        Ok(free)
    }

    /// The address of `struct page` number 0, as encoded for a section's pages; `None` if the
    /// section has no array.
    fn map_of(&self, memory: &Memory<'_>, section: u64) -> Result<Option<u64>, FreePagesError> {
        let in_root = PAGE_SIZE / self.section_size;
        let (root, inside) = (section / in_root, section % in_root);
        if root >= self.roots {
            return Ok(None);
        }
        let root = self.word(memory, self.mem_section.wrapping_add(root * 8))?;
        if root == 0 {
            return Ok(None);
        }
        let entry = root.wrapping_add(inside * self.section_size + self.section_map);
        let map = self.word(memory, entry)?;
        Ok((map & HAS_MEM_MAP != 0).then_some(map & !SECTION_FLAGS))
    }

    /// The number of pages of the free block that starts at a page, if one does.
    fn block(
        &self,
        memory: &Memory<'_>,
        structs: &mut Structs,
        map: u64,
        page: u64,
    ) -> Result<Option<u64>, FreePagesError> {
        let address = map.wrapping_add(page.wrapping_mul(self.page_size));
        if !address.is_multiple_of(self.page_size) {
            return Err(FreePagesError::Outside(address));
        }
        let inside = usize::try_from(address % PAGE_SIZE).unwrap_or_default();
        if !structs.holds(address - address % PAGE_SIZE) {
            // The array has no pages for memory that does not exist.
            let Some(physical) = self.physical(memory, address - address % PAGE_SIZE)? else {
                return Ok(None);
            };
            memory.read(physical, &mut structs.bytes)?;
            structs.at = Some(address - address % PAGE_SIZE);
        }
        let field = |offset: u64| inside + usize::try_from(offset).unwrap_or_default();
        let Some(found) = structs.bytes[field(self.page_type)..].first_chunk() else {
            return Ok(None);
        };
        let Some(order) = structs.bytes[field(self.page_private)..].first_chunk() else {
            return Ok(None);
        };
        let order = u64::from_le_bytes(*order);
        let free = u32::from_le_bytes(*found) == self.buddy && order < self.orders;
        Ok(free.then(|| 1 << order))
    }

    /// Reads 8 bytes at a linear address of the kernel.
    fn word(&self, memory: &Memory<'_>, address: u64) -> Result<u64, FreePagesError> {
        let physical = self.physical(memory, address)?;
        let physical = physical.ok_or(FreePagesError::Outside(address))?;
        memory.read_word(physical)
    }

    fn physical(&self, memory: &Memory<'_>, address: u64) -> Result<Option<u64>, FreePagesError> {
        match self.tables.walk(address, |entry| memory.read_word(entry).ok()).end {
            WalkEnd::Mapped { address, .. } => Ok(Some(address)),
            // No step may be left.
            WalkEnd::NotPresent | WalkEnd::Unread => memory.step().map(|()| None),
        }
    }
}

/// A page of the array of `struct page`.
struct Structs {
    at: Option<u64>,
    bytes: [u8; 4096],
}

impl Default for Structs {
    fn default() -> Self {
        Self { at: None, bytes: [0; 4096] }
    }
}

impl Structs {
    fn holds(&self, address: u64) -> bool {
        self.at == Some(address)
    }
}

#[cfg(test)]
#[path = "free_pages_tests.rs"]
mod tests;
