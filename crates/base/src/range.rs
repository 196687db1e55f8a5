//! Ranges of pages, of guest-physical memory and of an image.

use std::fmt;
use std::ops::Range;

use postcard_schema::Schema;
use serde::{Deserialize, Serialize};

use crate::PAGE_SIZE;

/// Consecutive pages, by page number: image pages unless stated otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, Schema)]
pub struct PageRange {
    /// The first page.
    pub first: u64,
    /// Number of pages.
    pub pages: u64,
}

impl PageRange {
    /// The page numbers. The end is `u64::MAX` when it does not fit.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.first..self.first.saturating_add(self.pages)
    }
}

impl From<Range<u64>> for PageRange {
    fn from(range: Range<u64>) -> Self {
        Self { first: range.start, pages: range.end.saturating_sub(range.start) }
    }
}

/// A range of guest-physical memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GuestRange {
    /// The guest-physical address of the first byte.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
}

impl GuestRange {
    /// The address after the last byte; `u64::MAX` when it does not fit.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.start.saturating_add(self.len)
    }

    /// The number of whole pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.len / PAGE_SIZE
    }
}

impl From<Range<u64>> for GuestRange {
    fn from(range: Range<u64>) -> Self {
        Self { start: range.start, len: range.end.saturating_sub(range.start) }
    }
}

/// `0x100000-0x200000`, end excluded.
impl fmt::Display for GuestRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}-{:#x}", self.start, self.end())
    }
}

/// A range of an image, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ImageRange {
    /// The offset of the first byte.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

impl ImageRange {
    /// The offset after the last byte; `u64::MAX` when it does not fit.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.len)
    }
}

/// `0x100000-0x200000`, end excluded.
impl fmt::Display for ImageRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}-{:#x}", self.offset, self.end())
    }
}
