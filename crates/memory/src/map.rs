//! The `unsafe` code for memory mappings: reserving address space, mapping into it, advising the
//! kernel, and reading mincore.
//!
//! Soundness rests on one rule: no Rust reference ever points into guest memory. It is read and
//! written only through vm-memory's volatile accesses, so pages may change, be replaced or be
//! discarded at any time.

use std::ffi::c_void;
use std::fs::File;
use std::ops::Range;
use std::ptr::{copy_nonoverlapping, null_mut};

use firn_base::num::usize_of;
use firn_base::{PAGE_SIZE, RangeSet};
use parking_lot::Mutex;
use rustix::io::{Errno, Result};
use rustix::mm::{
    Advice, MapFlags, MremapFlags, ProtFlags, madvise, mmap, mmap_anonymous, mremap_fixed, munmap,
};
use rustix::rand::{GetRandomFlags, getrandom};
use vm_memory::mmap::{MmapRegion, MmapRegionBuilder, MmapRegionError};

use crate::uffd::{RegisterMode, Uffd, UffdError};

/// A range of address space, reserved without access and unmapped on drop. Mappings replace
/// parts of it. Addresses are host-virtual, lengths in bytes; a range outside it is an error.
///
/// It is safe to share between threads: the kernel serialises changes of mappings.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: *mut c_void,
    reserved: usize,
    base: *mut u8,
    len: usize,
    kept: bool,
    /// Of a range that was only [chosen](Self::choose), what is mapped.
    claimed: Option<Mutex<RangeSet>>,
}

/// Addresses that the kernel chooses for no mapping, neither from the top (below the stack) nor
/// from the bottom (a third of the address space).
const CHOSEN: Range<u64> = 0x1000_0000_0000..0x2000_0000_0000;

// SAFETY: the pointers are only passed to the kernel or to vm-memory; see the module's rule.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Reserves `len` bytes whose base is a multiple of `align` (a power of two of at least a
    /// page), with at least a page without access at either end, so that the kernel never merges
    /// guest memory with an adjacent mapping.
    pub(crate) fn reserve(len: u64, align: u64) -> Result<Self> {
        let guarded = len.checked_add(2 * align).ok_or(Errno::NOMEM)?;
        let (reserved, align) = (usize_of(guarded), usize_of(align));
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let start = unsafe { mmap_anonymous(null_mut(), reserved, ProtFlags::empty(), flags) }?;
        let gap = align - start.addr() % align;
        let base = start.cast::<u8>().wrapping_add(gap);
        Ok(Self { start, reserved, base, len: usize_of(len), kept: false, claimed: None })
    }

    /// The same range without a mapping, until a mapping is placed in it: the kernel then has none
    /// to remove, which would cost time for each page of a KVM slot there. A mapping that anything
    /// else placed in it is an error, and stays.
    pub(crate) fn choose(len: u64, align: u64) -> Result<Self> {
        let reserved = len.checked_add(2 * align).ok_or(Errno::NOMEM)?;
        let room = CHOSEN.end - CHOSEN.start;
        if reserved >= room {
            return Err(Errno::NOMEM);
        }
        let mut random = [0; 8];
        getrandom(&mut random, GetRandomFlags::empty())?;
        let places = (room - reserved) / align;
        let start = CHOSEN.start + u64::from_le_bytes(random) % places.max(1) * align;
        let start = std::ptr::with_exposed_provenance_mut::<c_void>(usize_of(start));
        let base = start.cast::<u8>().wrapping_add(usize_of(align));
        let claimed = Some(Mutex::default());
        let reserved = usize_of(reserved);
        Ok(Self { start, reserved, base, len: usize_of(len), kept: false, claimed })
    }

    /// Reserves what is not mapped of a range that was only chosen.
    pub(crate) fn claim(&self) -> Result<()> {
        let Some(claimed) = &self.claimed else { return Ok(()) };
        let start = self.start.addr() as u64;
        claim(&mut claimed.lock(), start..start + self.reserved as u64)
    }

    /// Calls `map` for a range with the flag that lets it replace the mappings of this value, and
    /// no other.
    fn place(
        &self,
        addr: u64,
        len: u64,
        map: impl FnOnce(*mut c_void, usize, MapFlags) -> Result<*mut c_void>,
    ) -> Result<()> {
        let (ptr, bytes) = self.range(addr, len)?;
        let Some(claimed) = &self.claimed else {
            return map(ptr, bytes, MapFlags::FIXED).map(drop);
        };
        let (mut claimed, range) = (claimed.lock(), addr..addr + len);
        let flag = if matches!(claimed.split(range.clone()).as_slice(), [(_, false)]) {
            MapFlags::FIXED_NOREPLACE
        } else {
            claim(&mut claimed, range.clone())?;
            MapFlags::FIXED
        };
        map(ptr, bytes, flag)?;
        claimed.insert(range);
        Ok(())
    }

    /// Keeps the range mapped for the rest of the process.
    pub(crate) fn keep(&mut self) {
        self.kept = true;
    }

    /// The address of the first byte, with the requested alignment.
    pub(crate) fn base(&self) -> u64 {
        self.base.addr() as u64
    }

    fn range(&self, addr: u64, len: u64) -> Result<(*mut c_void, usize)> {
        let offset = addr.checked_sub(self.base()).ok_or(Errno::INVAL)?;
        let end = offset.checked_add(len).ok_or(Errno::INVAL)?;
        if len == 0 || end > self.len as u64 {
            return Err(Errno::INVAL);
        }
        Ok((self.base.wrapping_add(usize_of(offset)).cast(), usize_of(len)))
    }

    /// Replaces the range with new private anonymous memory: zeros that use no DRAM until they are
    /// touched.
    pub(crate) fn map_zero(&self, addr: u64, len: u64) -> Result<()> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        self.place(addr, len, |ptr, len, flag| {
            // SAFETY: the range lies within our own reservation.
            unsafe { mmap_anonymous(ptr, len, access, flags | flag) }
        })
    }

    /// Replaces the range with a private copy-on-write mapping of a file.
    pub(crate) fn map_private(&self, addr: u64, len: u64, file: &File, from: u64) -> Result<()> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        self.place(addr, len, |ptr, len, flag| {
            // SAFETY: the range lies within our own reservation.
            unsafe { mmap(ptr, len, access, flags | flag, file, from) }
        })
    }

    /// Replaces the range with a shared writable mapping of a file.
    pub(crate) fn map_shared(&self, addr: u64, len: u64, file: &File, from: u64) -> Result<()> {
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        self.place(addr, len, |ptr, len, flag| {
            // SAFETY: the range lies within our own reservation.
            unsafe { mmap(ptr, len, access, flags | flag, file, from) }
        })
    }

    /// Replaces the range with a shared read-only mapping of a file.
    pub(crate) fn map_sealed(&self, addr: u64, len: u64, file: &File, from: u64) -> Result<()> {
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        let access = ProtFlags::READ;
        self.place(addr, len, |ptr, len, flag| {
            // SAFETY: the range lies within our own reservation.
            unsafe { mmap(ptr, len, access, flags | flag, file, from) }
        })
    }

    /// Replaces the range, which must be read-only, with private anonymous memory that holds the
    /// same bytes: a huge page where the kernel has one. `len` is a power of two, and `addr` a
    /// multiple of it.
    ///
    /// The copy is complete before one call moves it to the range, during which the kernel blocks
    /// page faults. Readers see the same bytes at any time, including KVM, whose MMU notifier drops
    /// the old pages.
    pub(crate) fn copy_in_place(&self, addr: u64, len: u64) -> Result<()> {
        let (place, bytes) = self.range(addr, len)?;
        let copy = Scratch::new(bytes)?;
        // SAFETY: both ranges are mapped and `bytes` long; one is read-only, the other is private
        // to this function.
        unsafe { copy_nonoverlapping(place.cast::<u8>(), copy.start.cast(), bytes) };
        let flags = MremapFlags::MAYMOVE;
        // SAFETY: the copy is private to this function, and its new place lies within our own
        // reservation.
        let moved = unsafe { mremap_fixed(copy.start, bytes, bytes, flags, place) };
        if let Err(error) = moved {
            // The kernel may have unmapped the range before it failed. No other mapping may take
            // its place.
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
            // SAFETY: a mapping that replaces no other touches no other memory.
            let _ = unsafe { mmap_anonymous(place, bytes, ProtFlags::empty(), flags) };
            return Err(error);
        }
        copy.moved();
        Ok(())
    }

    fn advise(&self, addr: u64, len: u64, advice: Advice) -> Result<()> {
        let (ptr, len) = self.range(addr, len)?;
        // SAFETY: the range lies within our own reservation; the advice used here changes at most
        // its contents, which the module's rule allows.
        unsafe { madvise(ptr, len, advice) }
    }

    /// `MADV_RANDOM`: the kernel does not read ahead on a fault.
    pub(crate) fn advise_random(&self, addr: u64, len: u64) -> Result<()> {
        self.advise(addr, len, Advice::Random)
    }

    /// `MADV_HUGEPAGE`: a fault on anonymous memory may map a leaf of 2 MiB.
    pub(crate) fn advise_huge(&self, addr: u64, len: u64) -> Result<()> {
        self.advise(addr, len, Advice::LinuxHugepage)
    }

    /// `MADV_POPULATE_READ`: maps every page of the range for reading, and copies none.
    pub(crate) fn populate_read(&self, addr: u64, len: u64) -> Result<()> {
        self.advise(addr, len, Advice::LinuxPopulateRead)
    }

    /// `MADV_POPULATE_WRITE`: maps every page of the range for writing, and copies those of a
    /// private mapping.
    pub(crate) fn populate_write(&self, addr: u64, len: u64) -> Result<()> {
        self.advise(addr, len, Advice::LinuxPopulateWrite)
    }

    /// `MADV_DONTNEED`: drops the pages of an anonymous range; they read as zeros afterwards.
    pub(crate) fn drop_pages(&self, addr: u64, len: u64) -> Result<()> {
        self.advise(addr, len, Advice::LinuxDontNeed)
    }

    /// Registers a range with a userfaultfd. Huge pages are disabled: a fault on one would fill
    /// pages that were not touched.
    pub(crate) fn register(
        &self,
        addr: u64,
        len: u64,
        uffd: &Uffd,
        mode: RegisterMode,
    ) -> std::result::Result<(), UffdError> {
        let range = addr..addr.saturating_add(len);
        self.advise(addr, len, Advice::LinuxNoHugepage).map_err(|errno| UffdError::Register {
            address: addr,
            len,
            source: errno.into(),
        })?;
        // SAFETY: the range lies within our own reservation (or `advise` had refused it), into
        // which no reference points.
        unsafe { uffd.register(range, mode) }
    }

    /// vm-memory's region of a range. It does not own the mapping: the caller must keep `self` as
    /// long as the region.
    pub(crate) fn region(
        &self,
        addr: u64,
        len: u64,
    ) -> std::result::Result<MmapRegion, MmapRegionError> {
        let (ptr, len) = self.range(addr, len).map_err(|e| MmapRegionError::Mmap(e.into()))?;
        let builder = MmapRegionBuilder::new(len)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_NORESERVE);
        // SAFETY: the range lies within our reservation, which `GuestMemory` keeps mapped for as
        // long as a view exists.
        unsafe { builder.with_raw_mmap_pointer(ptr.cast()) }.build()
    }
}

/// Reserves the parts of a range that are not claimed.
fn claim(claimed: &mut RangeSet, range: Range<u64>) -> Result<()> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
    for (part, is_claimed) in claimed.split(range) {
        if !is_claimed {
            let at = std::ptr::without_provenance_mut(usize_of(part.start));
            let len = usize_of(part.end - part.start);
            // SAFETY: a mapping that replaces no other touches no other memory.
            unsafe { mmap_anonymous(at, len, ProtFlags::empty(), flags) }?;
            claimed.insert(part);
        }
    }
    Ok(())
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        let start = self.start.addr() as u64;
        let whole = start..start + self.reserved as u64;
        let mapped = match &self.claimed {
            Some(claimed) => claimed.lock().split(whole),
            None => vec![(whole, true)],
        };
        for (part, _) in mapped.into_iter().filter(|(_, is_mapped)| *is_mapped) {
            let at = self.start.cast::<u8>().wrapping_add(usize_of(part.start - start)).cast();
            // SAFETY: this value mapped the range, and it is not used any more. Unmapping whole
            // mappings cannot fail.
            let _ = unsafe { munmap(at, usize_of(part.end - part.start)) };
        }
    }
}

/// Populated anonymous memory of `len` bytes, aligned to `len`.
struct Scratch {
    start: *mut c_void,
    len: usize,
}

impl Scratch {
    /// `len` bytes at a multiple of `len`, a power of two.
    fn new(len: usize) -> Result<Self> {
        let twice = len.checked_mul(2).ok_or(Errno::NOMEM)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let all = unsafe { mmap_anonymous(null_mut(), twice, access, MapFlags::PRIVATE) }?;
        let before = all.addr().next_multiple_of(len) - all.addr();
        let start = all.cast::<u8>().wrapping_add(before).cast::<c_void>();
        let scratch = Self { start, len };
        for (at, len) in [(0, before), (before + len, len - before)] {
            if len > 0 {
                // SAFETY: a part of the new mapping, outside `scratch`.
                unsafe { munmap(all.cast::<u8>().wrapping_add(at).cast(), len) }?;
            }
        }
        // SAFETY: the range is private to this value. A kernel without huge pages refuses, and uses
        // small ones.
        let _ = unsafe { madvise(start, len, Advice::LinuxHugepage) };
        // SAFETY: as above; it holds zeros before and after.
        unsafe { madvise(start, len, Advice::LinuxPopulateWrite) }?;
        Ok(scratch)
    }

    /// Forgets the memory, which was moved to another address.
    fn moved(self) {
        std::mem::forget(self);
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: the range is private to this value, and it is not used any more. That cannot
        // fail.
        let _ = unsafe { munmap(self.start, self.len) };
    }
}

/// For each page of `len` bytes of a file from `from` on, whether it is in the page cache
/// (`mincore(2)`). Both are multiples of a page; `len` is not 0.
pub(crate) fn cached_pages(file: &File, from: u64, len: u64) -> Result<Vec<bool>> {
    let bytes = usize_of(len);
    let mut states = vec![0u8; usize_of(len.div_ceil(PAGE_SIZE))];
    // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
    let ptr = unsafe { mmap(null_mut(), bytes, ProtFlags::READ, MapFlags::SHARED, file, from) }?;
    // SAFETY: the range is mapped, and `states` has a byte for each of its pages.
    let failed = unsafe { libc::mincore(ptr, bytes, states.as_mut_ptr()) } != 0;
    let error = std::io::Error::last_os_error();
    // SAFETY: the range is the one just mapped.
    unsafe { munmap(ptr, bytes) }?;
    if failed {
        return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO));
    }
    Ok(states.into_iter().map(|state| state & 1 == 1).collect())
}
