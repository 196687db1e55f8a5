//! The memory of one guest, mapped into this process.

mod chunks;
mod discard;
mod pages;
mod usage;
mod view;
mod write_log;

pub use chunks::{ChunkCopies, CopyChunkError};
pub use discard::DiscardError;
pub use pages::GuestPages;
pub use usage::{MemoryUsage, UsageError};
pub use view::GuestView;

use std::error::Error as StdError;
use std::fs::File;
use std::sync::{Arc, OnceLock};

use firn_base::{GuestRange, RangeSet};
use firn_snapshot::{Digests, MemoryLayout, PageSet};
use parking_lot::Mutex;
use rustix::io::Errno;
use thiserror::Error;
use vm_memory::mmap::MmapRegion;
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionCollectionError, GuestRegionMmap};

use crate::map::Mapping;
use crate::pager::Pager;
use crate::plan::Leaf;
use crate::sigbus::{self, KnownFile, LostBacking, RegisteredSlots};
use crate::slot::{Slot, host_addr};
use crate::uffd::{RegisterMode, Uffd, UffdError};
use chunks::Chunks;
use write_log::WriteLog;

/// Why memory for a cold boot could not be mapped.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AnonymousError {
    /// Address space cannot be reserved.
    #[error(
        "cannot reserve {bytes} bytes of address space for guest memory; is its size right, or `ulimit -v` set?"
    )]
    Reserve {
        /// The length in bytes.
        bytes: u64,
        /// The error of the mmap.
        #[source]
        source: std::io::Error,
    },
    /// A region could not be mapped.
    #[error("cannot map {len} bytes of anonymous memory at guest address {guest_addr:#x}")]
    Map {
        /// First byte of the region.
        guest_addr: u64,
        /// Its length in bytes.
        len: u64,
        /// The error of the mmap.
        #[source]
        source: std::io::Error,
    },
    /// vm-memory refuses the regions.
    #[error("vm-memory refuses the regions of guest memory")]
    View(#[source] ViewError),
}

/// The error of vm-memory for the regions of guest memory.
pub type ViewError = Box<dyn StdError + Send + Sync>;

/// The memory of one guest, mapped into this process until it is dropped.
///
/// Every region of the layout lies in one reservation of address space, surrounded by pages without
/// access. All methods may be called from any thread, including while vCPUs run.
///
/// It stays mapped as long as this value or a view from [`vm_memory`](Self::vm_memory) exists.
#[derive(Debug)]
pub struct GuestMemory {
    layout: MemoryLayout,
    slots: Vec<Slot>,
    mapped: Arc<Mapped>,
    backing: Backing,
    /// Guest addresses that are anonymous memory; all others are mapped from the backing.
    anonymous: Arc<Mutex<RangeSet>>,
    /// Copies a chunk before it is written, where the backing is sealed.
    chunks: Option<Arc<Chunks>>,
    /// The image pages that the guest has reported free since it was mapped: a bitmap, whose size
    /// does not depend on what the guest reports.
    reported: Mutex<PageSet>,
    /// The log of written pages, where writes are tracked.
    written: Option<Arc<WriteLog>>,
    /// The largest number of ranges that `anonymous` may have.
    most_ranges: usize,
    /// Ranges whose index was built before the guest runs.
    indexed: Vec<GuestRange>,
    /// Guest addresses that are mapped from this guest's copy of the extent.
    copied: RangeSet,
    /// Ranges of private mappings that the plan populates, ascending.
    populated: Vec<GuestRange>,
    /// The files that parts of it are mapped from, for [`lost_backing`](Self::lost_backing).
    known_files: Vec<KnownFile>,
    _registered: RegisteredSlots,
}

/// The mapping, and vm-memory's regions of it. If a region is still referenced when this value is
/// dropped, the mapping is kept until the process ends, so that no region dangles.
#[derive(Debug)]
struct Mapped {
    memory: GuestMemoryMmap,
    regions: Vec<Arc<MmapRegion>>,
    mapping: Mapping,
    /// Dropped after the mapping: the pager serves it as long as it exists.
    pager: OnceLock<Pager>,
}

/// The backing of memory that is not anonymous.
#[derive(Debug)]
pub(crate) enum Backing {
    /// All memory is anonymous.
    None,
    /// The image, with the digests of its pages.
    Image {
        /// The file.
        file: File,
        /// The digests of its snapshot, where the plan's sources have one.
        digests: Option<Arc<Digests>>,
    },
    /// The sealed extent of a snapshot, mapped privately.
    Extent,
    /// The sealed extent of a snapshot, mapped shared and read-only: chunks are copied before they
    /// are written.
    Sealed,
    /// A replica of an extent, which only this guest maps.
    Replica,
}

/// Address space for a guest: no page of it can be accessed. A standby monitor has one, with the
/// virtual machine whose slots lie in it, before it knows the snapshot.
#[derive(Debug)]
pub struct Reservation {
    pub(crate) mapping: Mapping,
    layout: MemoryLayout,
    align: Leaf,
    slots: Vec<Slot>,
}

impl Reservation {
    /// Reserves address space for every region of a layout. Host and guest addresses are congruent
    /// modulo `align`, and at least modulo 2 MiB.
    pub(crate) fn new(layout: MemoryLayout, align: Leaf) -> std::io::Result<Self> {
        Self::with(layout, align, Mapping::reserve)
    }

    /// The same for guest memory that is mapped later: only the addresses are chosen, so that no
    /// mapping has to be removed then.
    ///
    /// # Errors
    /// The kernel has no address space of this size.
    pub fn in_advance(layout: MemoryLayout, align: Leaf) -> std::io::Result<Self> {
        Self::with(layout, align, Mapping::choose)
    }

    fn with(
        layout: MemoryLayout,
        align: Leaf,
        reserve: fn(u64, u64) -> Result<Mapping, Errno>,
    ) -> std::io::Result<Self> {
        let align = align.max(Leaf::Size2M);
        let multiple = align.bytes();
        let mut end = 0u64;
        let mut offsets = Vec::new();
        for region in layout.regions() {
            // The next offset that is congruent to the region's address, after a gap.
            let offset = end.next_multiple_of(multiple) + region.guest_addr % multiple;
            end = offset.checked_add(region.len + multiple).ok_or(Errno::NOMEM)?;
            offsets.push(offset);
        }
        let mapping = reserve(end, multiple)?;
        let slots = layout.regions().zip(offsets).map(|(region, offset)| Slot {
            guest_addr: region.guest_addr,
            len: region.len,
            host_addr: mapping.base() + offset,
        });
        let slots = slots.collect();
        Ok(Self { mapping, layout, align, slots })
    }

    /// The ranges for KVM memory slots, as of the guest memory that will be mapped here.
    #[must_use]
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Whether a plan with this layout and these leaves can be executed here.
    pub(crate) fn fits(&self, layout: &MemoryLayout, leaf: Leaf) -> bool {
        self.layout == *layout && leaf <= self.align
    }

    /// The host address of `guest_addr`; `None` where the guest has no memory.
    pub(crate) fn host_addr(&self, guest_addr: u64) -> Option<u64> {
        host_addr(&self.slots, guest_addr)
    }

    /// Guest memory over the mapped layers: anonymous memory at these guest addresses, the backing
    /// elsewhere.
    pub(crate) fn finish(
        self,
        backing: Backing,
        anonymous: RangeSet,
    ) -> Result<GuestMemory, ViewError> {
        let Self { mapping, layout, slots, .. } = self;
        mapping.claim()?;
        let mut regions = Vec::with_capacity(slots.len());
        let mut views = Vec::with_capacity(slots.len());
        for slot in &slots {
            let region = Arc::new(mapping.region(slot.host_addr, slot.len)?);
            let view = GuestRegionMmap::with_arc(region.clone(), GuestAddress(slot.guest_addr));
            views.push(view.ok_or(GuestRegionCollectionError::MemoryRegionOverlap)?);
            regions.push(region);
        }
        let registered = RegisteredSlots::new(&slots);
        let memory = GuestMemoryMmap::from_regions(views)?;
        let mapped = Arc::new(Mapped { memory, regions, mapping, pager: OnceLock::new() });
        let most_ranges = anonymous.len() + discard::MAX_NEW_RANGES;
        let anonymous = Arc::new(Mutex::new(anonymous));
        let sealed = matches!(backing, Backing::Sealed);
        let chunks =
            sealed.then(|| Arc::new(Chunks::new(mapped.clone(), slots.clone(), anonymous.clone())));
        let reported = Mutex::new(PageSet::new(layout.pages()));
        Ok(GuestMemory {
            layout,
            slots,
            mapped,
            backing,
            anonymous,
            chunks,
            reported,
            written: None,
            most_ranges,
            indexed: Vec::new(),
            copied: RangeSet::default(),
            populated: Vec::new(),
            known_files: Vec::new(),
            _registered: registered,
        })
    }
}

impl GuestMemory {
    /// Memory for a cold boot: private anonymous memory, all zeros, which uses DRAM only for pages
    /// that the guest touches. The host's setting for transparent huge pages applies.
    ///
    /// # Errors
    ///
    /// [`AnonymousError`] when the kernel refuses the address space or a mapping.
    pub fn anonymous(layout: MemoryLayout) -> Result<Self, AnonymousError> {
        let bytes = layout.total_bytes();
        let all = layout.regions().map(|region| region.guest_range()).collect();
        let reservation = Reservation::new(layout, Leaf::Size2M)
            .map_err(|source| AnonymousError::Reserve { bytes, source })?;
        for slot in &reservation.slots {
            let mapped = reservation.mapping.map_zero(slot.host_addr, slot.len);
            mapped.map_err(|e| AnonymousError::Map {
                guest_addr: slot.guest_addr,
                len: slot.len,
                source: e.into(),
            })?;
        }
        reservation.finish(Backing::None, all).map_err(AnonymousError::View)
    }

    /// The guest-physical regions.
    pub fn layout(&self) -> &MemoryLayout {
        &self.layout
    }

    /// The ranges for KVM memory slots: one for each region, in ascending order.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// The view through which the monitor reads and writes guest memory. Clones are cheap.
    pub fn vm_memory(&self) -> GuestView {
        GuestView::new(self.mapped.clone(), self.chunks.clone(), self.written.clone())
    }

    /// The ranges, ascending, whose page tables the plan built before the resume. KVM's own tables
    /// are a second index, which the caller prefaults for the same ranges where the kernel supports
    /// it.
    pub fn indexed(&self) -> &[GuestRange] {
        &self.indexed
    }

    pub(crate) fn set_indexed(&mut self, ranges: Vec<GuestRange>) {
        self.indexed = ranges;
    }

    /// Why the host cannot provide the guest's page at an address: the lost byte of the file.
    /// Without an address, the first lost byte by the lengths of the files, or the first that
    /// fs-verity refuses to read, or that the kernel refuses to map. `None` where the page is not
    /// mapped from a file, or no such byte is found.
    #[must_use]
    pub fn lost_backing(&self, guest_addr: Option<u64>) -> Option<LostBacking> {
        match guest_addr {
            Some(address) => sigbus::lost_at(host_addr(&self.slots, address)?),
            None => sigbus::first_lost(&self.slots),
        }
    }

    pub(crate) fn know_files(&mut self, files: Vec<KnownFile>) {
        self.known_files = files;
    }

    pub(crate) fn set_copied(&mut self, ranges: RangeSet) {
        self.copied = ranges;
    }

    /// The parts of a range that come from the copy.
    pub(crate) fn copied_in(&self, range: GuestRange) -> Vec<GuestRange> {
        let parts = self.copied.split(range.start..range.end()).into_iter();
        let copied = parts.filter(|(_, is_copied)| *is_copied);
        copied.map(|(part, _)| part.into()).collect()
    }

    pub(crate) fn set_populated(&mut self, ranges: Vec<GuestRange>) {
        self.populated = ranges;
    }

    /// The ranges to populate that begin in a range.
    pub(crate) fn populated_in(&self, range: GuestRange) -> impl Iterator<Item = GuestRange> {
        let first = self.populated.partition_point(|populated| populated.start < range.start);
        let following = self.populated[first..].iter().copied();
        following.take_while(move |populated| populated.start < range.end())
    }

    /// Registers all memory with a userfaultfd, in pages of 4 KiB.
    ///
    /// # Errors
    ///
    /// [`UffdError::Register`].
    pub fn register(&self, uffd: &Uffd, mode: RegisterMode) -> Result<(), UffdError> {
        let mut slots = self.slots.iter();
        slots
            .try_for_each(|slot| self.mapped.mapping.register(slot.host_addr, slot.len, uffd, mode))
    }

    /// Registers a range within one region with a userfaultfd, and returns its address in this
    /// process.
    pub(crate) fn register_range(
        &self,
        range: GuestRange,
        uffd: &Uffd,
        mode: RegisterMode,
    ) -> Result<u64, UffdError> {
        let address = host_addr(&self.slots, range.start).unwrap_or_default();
        self.mapped.mapping.register(address, range.len, uffd, mode)?;
        Ok(address)
    }

    /// Whether two guest addresses are in one region, so that their distance is the same in this
    /// process.
    pub(crate) fn is_one_piece(&self, one: u64, other: u64) -> bool {
        let slot = |address| self.slots.iter().rev().find(|slot| slot.guest_addr <= address);
        slot(one) == slot(other)
    }

    /// Stores the pager that serves this memory.
    pub(crate) fn set_pager(&self, pager: Pager) {
        // The executor, the only caller, sets it once.
        let _ = self.mapped.pager.set(pager);
    }

    /// The pager that serves this memory, if any.
    #[must_use]
    pub fn pager(&self) -> Option<&Pager> {
        self.mapped.pager.get()
    }

    /// Maps every page of a range within one region for reading, without copying any.
    pub(crate) fn build_index(&self, range: GuestRange) -> Result<(), Errno> {
        let addr = host_addr(&self.slots, range.start).ok_or(Errno::INVAL)?;
        self.mapped.mapping.populate_read(addr, range.len)
    }

    /// Maps every page of a range within one region for writing. The kernel copies those of a
    /// private mapping.
    pub(crate) fn populate(&self, range: GuestRange) -> Result<(), Errno> {
        let addr = host_addr(&self.slots, range.start).ok_or(Errno::INVAL)?;
        self.mapped.mapping.populate_write(addr, range.len)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        self.memory = GuestMemoryMmap::new();
        for region in self.regions.drain(..) {
            if Arc::into_inner(region).is_none() {
                self.mapping.keep();
                // Memory that stays mapped must still be served.
                if let Some(pager) = self.pager.take() {
                    std::mem::forget(pager);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
