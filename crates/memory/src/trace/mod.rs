//! Traces: the page accesses of one invocation of a real function.
//!
//! A trace lists the guest pages that an invocation touched for the first time after a thaw, in
//! order, and the pages that it read first and wrote later. It contains the data that a replay of a
//! touch needs (the size of the guest's own leaf, the work since the previous touch), the zero
//! pages of the snapshot and, optionally, the pages that the guest's allocator held free, and
//! [repeated accesses](Again). The player replays it without the function, without Linux, on any
//! KVM.
//!
//! A file holds the magic, a version, and a deflated body after its CRC-32. The CRC detects damage.
//! The limit on the inflated size and the checks of [`Trace::new`] protect against hostile files.

mod again;
mod file;

pub use again::{Again, Repeat};
pub use file::{DecodeTraceError, EncodeTraceError};

use firn_base::PAGE_SIZE;
use firn_snapshot::{MemoryLayout, PageSet};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::plan::Leaf;

/// The page accesses of one invocation, in order, and the guest memory that they belong to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    origin: TraceOrigin,
    layout: MemoryLayout,
    zero_map: PageSet,
    touches: Vec<Touch>,
    free: Option<PageSet>,
    again: Option<Again>,
}

/// The origin of a trace: enough to record it again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceOrigin {
    /// Name of the function.
    pub function: String,
    /// Name of its input, such as `a`.
    pub input: String,
    /// The command that recorded it.
    pub command: String,
    /// The host on which it was recorded: kind of KVM, processor, kernel.
    pub host: String,
    /// The unit of [`Touch::gap`].
    pub gaps: GapUnit,
}

/// The unit of the gap between two touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GapUnit {
    /// Instructions of the guest, which the lab's clock counts.
    Instructions,
    /// Nanoseconds in guest mode.
    Nanoseconds,
}

/// One touch of a guest page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touch {
    /// The guest page: guest-physical address / 4096.
    pub page: u64,
    /// The kind of access.
    pub access: Access,
    /// What touched the page.
    pub by: Toucher,
    /// The leaf of the guest's own page tables through which the page was touched; 4 KiB where no
    /// leaf was used, or where it is unknown.
    pub leaf: Leaf,
    /// The guest's work since the previous touch, in the trace's [`GapUnit`].
    pub gap: u64,
}

/// The kind of access of a touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The first touch is a read, or an instruction fetch.
    Read,
    /// The first touch is a write.
    Write,
    /// The first write to a page that was first read.
    LaterWrite,
}

/// What touches a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Toucher {
    /// An instruction of the guest.
    Instruction,
    /// The processor, walking the guest's page tables.
    Walk,
    /// A device of the microVM: the monitor, or KVM itself.
    Device,
}

/// Why touches are not a valid trace.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TraceError {
    /// The zero map belongs to another memory.
    #[error("a zero map of {zero_map} pages for guest memory of {memory} pages")]
    ZeroMap {
        /// Pages of the zero map.
        zero_map: u64,
        /// Pages of guest memory.
        memory: u64,
    },
    /// The free set belongs to another memory.
    #[error("a free set of {free} pages for guest memory of {memory} pages")]
    FreeSet {
        /// Pages of the free set.
        free: u64,
        /// Pages of guest memory.
        memory: u64,
    },
    /// Repeated accesses that contradict the touches, or each other.
    #[error("the repeated accesses are not valid: {0}")]
    Again(&'static str),
    /// A page outside guest memory.
    #[error("touch {index} is of guest page {page:#x}, which is outside guest memory")]
    Outside {
        /// Index of the touch.
        index: usize,
        /// The guest page.
        page: u64,
    },
    /// A page is touched for the first time twice, or written a second time.
    #[error(
        "touch {index}, of guest page {page:#x}, is neither a first touch nor a first write after a read"
    )]
    Repeated {
        /// Index of the touch.
        index: usize,
        /// The guest page.
        page: u64,
    },
}

impl Trace {
    /// A trace of touches in memory of this layout, whose zero pages (image pages) are in
    /// `zero_map`.
    ///
    /// # Errors
    /// [`TraceError`] unless every page is in guest memory, has one first touch, and at most one
    /// later write, after a first read.
    pub fn new(
        origin: TraceOrigin,
        layout: MemoryLayout,
        zero_map: PageSet,
        touches: Vec<Touch>,
    ) -> Result<Self, TraceError> {
        let memory = layout.pages();
        if zero_map.pages() != memory {
            return Err(TraceError::ZeroMap { zero_map: zero_map.pages(), memory });
        }
        let (mut touched, mut writable) = (PageSet::new(memory), PageSet::new(memory));
        for (index, touch) in touches.iter().enumerate() {
            let page = touch.page;
            let image = image_page(&layout, page).ok_or(TraceError::Outside { index, page })?;
            let fits = match touch.access {
                Access::Read | Access::Write => !touched.get(image),
                Access::LaterWrite => touched.get(image) && !writable.get(image),
            };
            if !fits {
                return Err(TraceError::Repeated { index, page });
            }
            touched.insert(image);
            if touch.access != Access::Read {
                writable.insert(image);
            }
        }
        Ok(Self { origin, layout, zero_map, touches, free: None, again: None })
    }

    /// The trace with the image pages that the guest's allocator held free at the freeze.
    ///
    /// # Errors
    /// [`TraceError::FreeSet`] where the set belongs to another memory.
    pub fn with_free(mut self, free: PageSet) -> Result<Self, TraceError> {
        let memory = self.layout.pages();
        if free.pages() != memory {
            return Err(TraceError::FreeSet { free: free.pages(), memory });
        }
        self.free = Some(free);
        Ok(self)
    }

    /// The origin of the trace.
    #[must_use]
    pub fn origin(&self) -> &TraceOrigin {
        &self.origin
    }

    /// The guest memory.
    #[must_use]
    pub fn layout(&self) -> &MemoryLayout {
        &self.layout
    }

    /// The image pages that were zero in the snapshot.
    #[must_use]
    pub fn zero_map(&self) -> &PageSet {
        &self.zero_map
    }

    /// The image pages that the guest's allocator held free at the freeze: the guest does not use
    /// their contents. `None` where they are unknown.
    #[must_use]
    pub fn free(&self) -> Option<&PageSet> {
        self.free.as_ref()
    }

    /// The touches, in order.
    #[must_use]
    pub fn touches(&self) -> &[Touch] {
        &self.touches
    }

    /// The number of touched pages.
    #[must_use]
    pub fn touched_pages(&self) -> u64 {
        self.touches.iter().filter(|touch| touch.access != Access::LaterWrite).count() as u64
    }

    /// The work from the thaw to the last touch: the sum of the gaps, in what they count.
    #[must_use]
    pub fn work(&self) -> u64 {
        self.touches.iter().map(|touch| touch.gap).sum()
    }

    /// The number of written pages.
    #[must_use]
    pub fn written_pages(&self) -> u64 {
        self.touches.iter().filter(|touch| touch.access != Access::Read).count() as u64
    }
}

/// The image page of a guest page; `None` outside guest memory.
fn image_page(layout: &MemoryLayout, page: u64) -> Option<u64> {
    let address = page.checked_mul(PAGE_SIZE)?;
    layout.image_offset(address).map(|offset| offset / PAGE_SIZE)
}

#[cfg(test)]
mod tests;
