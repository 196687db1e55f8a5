//! Traces: the page accesses of one invocation of a real function.
//!
//! A trace says which guest pages an invocation touched for the first time after a thaw, in order, and which of
//! the pages that it first read it wrote later; what else a touch needs to be repeated (the size of the guest's
//! own leaf, the work since the touch before); and which pages of the snapshot are zero. The player repeats it
//! without the function, without Linux, on any KVM. It may also say which pages the guest's allocator held free.
//!
//! A file holds the magic, a version, and a deflated body behind its CRC-32. The CRC finds damage; against a hostile file stand the bounds
//! of what is unfolded and the checks of [`Trace::new`].

mod file;

pub use file::{DecodeTraceError, EncodeTraceError, TRACE_VERSION};

use firn_base::PAGE_SIZE;
use firn_snapshot::{MemoryLayout, PageSet};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::plan::Leaf;

/// The page accesses of one invocation, in order, and the memory in which they happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    origin: TraceOrigin,
    layout: MemoryLayout,
    zero_map: PageSet,
    touches: Vec<Touch>,
    free: Option<PageSet>,
}

/// Where a trace comes from: enough to record it again.
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
    /// What [`Touch::gap`] counts.
    pub gaps: GapUnit,
}

/// What the gap between two touches counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GapUnit {
    /// Instructions of the guest: the lab's clock counts them.
    Instructions,
    /// Nanoseconds in guest mode.
    Nanoseconds,
}

/// One touch of a guest page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touch {
    /// The guest page: guest-physical address / 4096.
    pub page: u64,
    /// What was done to it.
    pub access: Access,
    /// Who did it.
    pub by: Toucher,
    /// The size of the leaf of the guest's own page tables through which it was done; 4 KiB where no leaf was
    /// used, or where it is not known.
    pub leaf: Leaf,
    /// What the guest worked since the touch before it, in the trace's [`GapUnit`].
    pub gap: u64,
}

/// What a touch does to its page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The first touch is a read, or an instruction fetch.
    Read,
    /// The first touch is a write.
    Write,
    /// The first write to a page that was first read.
    LaterWrite,
}

/// Who touches a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Toucher {
    /// An instruction of the guest.
    Instruction,
    /// The processor, walking the guest's page tables.
    Walk,
    /// A device of the microVM: the monitor, or KVM itself.
    Device,
}

/// Why touches are no trace of a guest memory.
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
        /// Pages of which the free set speaks.
        free: u64,
        /// Pages of guest memory.
        memory: u64,
    },
    /// A page outside guest memory.
    #[error("touch {index} is of guest page {page:#x}, where no guest memory is")]
    Outside {
        /// Index of the touch.
        index: usize,
        /// The guest page.
        page: u64,
    },
    /// A page is touched for the first time twice, or written a second time.
    #[error(
        "touch {index}, of guest page {page:#x}, is no first touch and no first write after a read"
    )]
    Repeated {
        /// Index of the touch.
        index: usize,
        /// The guest page.
        page: u64,
    },
}

impl Trace {
    /// A trace of touches in memory of this layout, whose zero pages (image pages) are in `zero_map`.
    ///
    /// # Errors
    /// [`TraceError`]: every page lies in memory, is touched first once, and written later at most once, after a
    /// first read.
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
        Ok(Self { origin, layout, zero_map, touches, free: None })
    }

    /// The same trace, and the image pages that the guest's allocator held free at the freeze.
    ///
    /// # Errors
    /// [`TraceError::FreeSet`] where it is the set of another memory.
    pub fn with_free(mut self, free: PageSet) -> Result<Self, TraceError> {
        let memory = self.layout.pages();
        if free.pages() != memory {
            return Err(TraceError::FreeSet { free: free.pages(), memory });
        }
        self.free = Some(free);
        Ok(self)
    }

    /// Where the trace comes from.
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

    /// The image pages that the guest's allocator held free at the freeze: a guest does not need what they hold. `None` where
    /// that is not known.
    #[must_use]
    pub fn free(&self) -> Option<&PageSet> {
        self.free.as_ref()
    }

    /// The touches, in order.
    #[must_use]
    pub fn touches(&self) -> &[Touch] {
        &self.touches
    }

    /// How many pages were touched.
    #[must_use]
    pub fn touched_pages(&self) -> u64 {
        self.touches.iter().filter(|touch| touch.access != Access::LaterWrite).count() as u64
    }

    /// How many pages were written.
    #[must_use]
    pub fn written_pages(&self) -> u64 {
        self.touches.iter().filter(|touch| touch.access != Access::Read).count() as u64
    }
}

/// The image page of a guest page; `None` where no memory is.
fn image_page(layout: &MemoryLayout, page: u64) -> Option<u64> {
    let address = page.checked_mul(PAGE_SIZE)?;
    layout.image_offset(address).map(|offset| offset / PAGE_SIZE)
}

#[cfg(test)]
mod tests;
