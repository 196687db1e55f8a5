//! Parts of an image that a pool's manager copied in advance for one microVM.

use std::fs::File;

use firn_base::{PAGE_SIZE, PageRange};
use firn_pool::NoCopy;
use serde::Serialize;

/// The parts of an image that a copy contains, one after the other in ascending order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct CopyTable {
    /// Each part and its offset in the copy, in bytes.
    parts: Vec<(PageRange, u64)>,
}

impl CopyTable {
    /// The table of a copy with these parts, which must be ascending and must not overlap. The
    /// first part that breaks this rule and all parts after it are left out.
    #[must_use]
    pub fn new(parts: impl IntoIterator<Item = PageRange>) -> Self {
        let (mut end, mut place) = (0, 0_u64);
        let mut table = Vec::new();
        for part in parts {
            let bytes = part.pages.checked_mul(PAGE_SIZE);
            let next = bytes.and_then(|bytes| place.checked_add(bytes));
            let Some(next) = next.filter(|_| part.pages > 0 && part.first >= end) else { break };
            end = part.range().end;
            table.push((part, place));
            place = next;
        }
        Self { parts: table }
    }

    /// The parts in image pages, each with its offset in the copy in bytes.
    pub fn parts(&self) -> impl Iterator<Item = (PageRange, u64)> {
        self.parts.iter().copied()
    }

    /// Whether the copy is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Size of the copy in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.parts.last().map_or(0, |(part, place)| place + part.pages * PAGE_SIZE)
    }

    /// The offset in the copy of the bytes at an image offset, if the copy contains them.
    #[must_use]
    pub fn place(&self, image_offset: u64) -> Option<u64> {
        let page = image_offset / PAGE_SIZE;
        let next = self.parts.partition_point(|(part, _)| part.first <= page);
        let (part, place) = self.parts.get(next.checked_sub(1)?)?;
        part.range().contains(&page).then(|| place + (image_offset - part.first * PAGE_SIZE))
    }
}

/// The chunk set of a microVM, and the copy of it that a pool's manager lent.
#[derive(Debug, Default)]
pub struct Copies {
    /// The key of the chunk set.
    pub key: String,
    /// Image pages of the chunk set, in whole chunks of 2 MiB, ascending.
    pub expected: Vec<PageRange>,
    /// The parts in the copy; empty if no copy was ready.
    pub table: CopyTable,
    /// The copy, which only this microVM uses; map it shared, at leaves of 2 MiB.
    pub file: Option<File>,
    /// Why there is no copy.
    pub absent: Option<NoCopy>,
}

#[cfg(test)]
#[path = "copies_tests.rs"]
mod tests;
