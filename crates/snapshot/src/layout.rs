//! The layout of guest memory: guest-physical regions and their offsets in the image.

use std::ops::Range;

use firn_base::PAGE_SIZE;
use postcard_schema::Schema;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Pages in a chunk: 2 MiB of guest memory, the unit that one record of digests covers.
pub const CHUNK_PAGES: u64 = 512;
/// Bytes in a chunk.
pub const CHUNK_SIZE: u64 = CHUNK_PAGES * PAGE_SIZE;
/// Maximum size of guest memory in bytes (4 TiB). It limits what a reader allocates for a hostile
/// manifest.
pub const MAX_MEMORY: u64 = 4 << 40;

/// End of the first region: devices are between here and 4 GiB (local APIC, I/O APIC, virtio-mmio).
const LOW_MEMORY_END: u64 = 3 << 30;
/// Start of the second region.
const HIGH_MEMORY_START: u64 = 4 << 30;
/// Guest-physical addresses have at most 52 bits (AMD64 Architecture Programmer's Manual, volume 2,
/// 5.1).
const GUEST_ADDRESS_END: u64 = 1 << 52;
/// Maximum number of regions. It limits the list in a hostile manifest.
const MAX_REGIONS: usize = 64;

/// A range of guest-physical memory that is RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub struct MemoryRegion {
    /// First guest-physical address, a multiple of [`PAGE_SIZE`].
    pub guest_addr: u64,
    /// Length in bytes, a multiple of [`PAGE_SIZE`], not 0.
    pub len: u64,
}

/// A [`MemoryRegion`] and its offset in the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageRegion {
    /// First guest-physical address.
    pub guest_addr: u64,
    /// Length in bytes.
    pub len: u64,
    /// Offset of the region's first byte in the image.
    pub image_offset: u64,
}

impl ImageRegion {
    /// The guest-physical addresses of the region.
    #[must_use]
    pub fn guest_range(&self) -> Range<u64> {
        self.guest_addr..self.guest_addr + self.len
    }

    /// The region's range in the image, in bytes.
    #[must_use]
    pub fn image_range(&self) -> Range<u64> {
        self.image_offset..self.image_offset + self.len
    }

    /// The region's image pages.
    #[must_use]
    pub fn image_pages(&self) -> Range<u64> {
        let Range { start, end } = self.image_range();
        start / PAGE_SIZE..end / PAGE_SIZE
    }
}

/// The guest's RAM: at least one region; ascending, page-aligned and without overlap.
///
/// The image is their concatenation. A value of this type is always valid: decoding checks it too.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(try_from = "Vec<MemoryRegion>", into = "Vec<MemoryRegion>")]
pub struct MemoryLayout(Vec<MemoryRegion>);

/// Why a list of regions or a size is not a valid layout of guest memory.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LayoutError {
    /// The size is 0.
    #[error("guest memory of 0 bytes: give at least one page of 4096 bytes")]
    Empty,
    /// The size is not a multiple of the page size.
    #[error("guest memory of {0} bytes is not a multiple of the page size, 4096 bytes")]
    SizeNotPageAligned(u64),
    /// The size is more than [`MAX_MEMORY`].
    #[error("guest memory of {0} bytes: a snapshot holds at most {MAX_MEMORY} bytes (4 TiB)")]
    TooLarge(u64),
    /// A region is empty, is not page-aligned, or ends past the 52-bit guest-physical addresses.
    #[error(
        "memory region at {guest_addr:#x} of {len:#x} bytes: start and length must be multiples of 4096, \
         the length not 0, the end at most 2^52"
    )]
    BadRegion {
        /// Guest-physical start.
        guest_addr: u64,
        /// Length in bytes.
        len: u64,
    },
    /// A region starts before the previous region ends.
    #[error(
        "memory region at {guest_addr:#x} starts before the one in front of it ends, at {previous_end:#x}"
    )]
    NotAscending {
        /// Guest-physical start of the later region.
        guest_addr: u64,
        /// Guest-physical end of the earlier region.
        previous_end: u64,
    },
    /// There are more regions than allowed.
    #[error("{0} memory regions: at most {MAX_REGIONS} are allowed")]
    TooManyRegions(usize),
}

impl MemoryLayout {
    /// Makes a layout of `regions`.
    ///
    /// # Errors
    /// [`LayoutError`] when there are no regions or too many, when they are not page-aligned, not
    /// ascending or overlap, or when they are too large.
    pub fn new(regions: Vec<MemoryRegion>) -> Result<Self, LayoutError> {
        if regions.is_empty() {
            return Err(LayoutError::Empty);
        }
        if regions.len() > MAX_REGIONS {
            return Err(LayoutError::TooManyRegions(regions.len()));
        }
        let mut previous_end = 0;
        let mut total = 0_u64;
        for &MemoryRegion { guest_addr, len } in &regions {
            let aligned = guest_addr.is_multiple_of(PAGE_SIZE) && len.is_multiple_of(PAGE_SIZE);
            let end = guest_addr.checked_add(len).filter(|&end| end <= GUEST_ADDRESS_END);
            let Some(end) = end.filter(|_| aligned && len > 0) else {
                return Err(LayoutError::BadRegion { guest_addr, len });
            };
            if guest_addr < previous_end {
                return Err(LayoutError::NotAscending { guest_addr, previous_end });
            }
            previous_end = end;
            // Regions do not overlap and end below 2^52, so the sum cannot overflow.
            total += len;
        }
        if total > MAX_MEMORY {
            return Err(LayoutError::TooLarge(total));
        }
        Ok(Self(regions))
    }

    /// The layout that firn gives a guest of `bytes` of memory: `[0, min(bytes, 3 GiB))`, and the
    /// rest starting at 4 GiB.
    ///
    /// # Errors
    /// [`LayoutError`] when `bytes` is 0, not a multiple of [`PAGE_SIZE`], or above [`MAX_MEMORY`].
    pub fn for_size(bytes: u64) -> Result<Self, LayoutError> {
        if bytes == 0 {
            return Err(LayoutError::Empty);
        }
        if !bytes.is_multiple_of(PAGE_SIZE) {
            return Err(LayoutError::SizeNotPageAligned(bytes));
        }
        if bytes > MAX_MEMORY {
            return Err(LayoutError::TooLarge(bytes));
        }
        let low = bytes.min(LOW_MEMORY_END);
        let mut regions = vec![MemoryRegion { guest_addr: 0, len: low }];
        if bytes > low {
            regions.push(MemoryRegion { guest_addr: HIGH_MEMORY_START, len: bytes - low });
        }
        Self::new(regions)
    }

    /// Bytes of guest memory, and the length of the image.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.0.iter().map(|region| region.len).sum()
    }

    /// Pages of guest memory, and of the image.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.total_bytes() / PAGE_SIZE
    }

    /// Chunks of the image; the last may be short.
    #[must_use]
    pub fn chunks(&self) -> u64 {
        self.pages().div_ceil(CHUNK_PAGES)
    }

    /// The regions in ascending order, each with its offset in the image.
    pub fn regions(&self) -> impl Iterator<Item = ImageRegion> + '_ {
        self.0.iter().scan(0, |next_offset, &MemoryRegion { guest_addr, len }| {
            let image_offset = *next_offset;
            *next_offset += len;
            Some(ImageRegion { guest_addr, len, image_offset })
        })
    }

    /// The offset in the image of guest-physical address `guest_addr`; `None` if there is no RAM at
    /// the address.
    #[must_use]
    pub fn image_offset(&self, guest_addr: u64) -> Option<u64> {
        self.regions()
            .find(|region| region.guest_range().contains(&guest_addr))
            .map(|region| region.image_offset + (guest_addr - region.guest_addr))
    }

    /// The guest-physical address of the byte at `image_offset`; `None` past the end of the image.
    #[must_use]
    pub fn guest_addr(&self, image_offset: u64) -> Option<u64> {
        self.regions()
            .find(|region| region.image_range().contains(&image_offset))
            .map(|region| region.guest_addr + (image_offset - region.image_offset))
    }
}

impl TryFrom<Vec<MemoryRegion>> for MemoryLayout {
    type Error = LayoutError;

    fn try_from(regions: Vec<MemoryRegion>) -> Result<Self, LayoutError> {
        Self::new(regions)
    }
}

impl From<MemoryLayout> for Vec<MemoryRegion> {
    fn from(layout: MemoryLayout) -> Self {
        layout.0
    }
}

#[cfg(test)]
#[path = "layout_tests.rs"]
mod tests;
