//! Parts of an image that a pool's manager copied ahead for one microVM.

use std::fs::File;

use firn_base::{PAGE_SIZE, PageRange};
use firn_pool::NoCopy;
use serde::Serialize;

/// Which parts of an image a copy holds: packed one behind the other, in ascending order of the image.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct CopyTable {
    /// Each part, and where it begins in the copy, in bytes.
    parts: Vec<(PageRange, u64)>,
}

impl CopyTable {
    /// The table of a copy that holds these parts, which have to be in ascending order and apart from each other: what is
    /// not is left out, with all that follows.
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

    /// The parts, in image pages, each with where it begins in the copy, in bytes.
    pub fn parts(&self) -> impl Iterator<Item = (PageRange, u64)> {
        self.parts.iter().copied()
    }

    /// Whether it holds nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Bytes that the copy takes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.parts.last().map_or(0, |(part, place)| place + part.pages * PAGE_SIZE)
    }

    /// Where the bytes at an offset of the image are in the copy, if it holds them.
    #[must_use]
    pub fn place(&self, image_offset: u64) -> Option<u64> {
        let page = image_offset / PAGE_SIZE;
        let next = self.parts.partition_point(|(part, _)| part.first <= page);
        let (part, place) = self.parts.get(next.checked_sub(1)?)?;
        part.range().contains(&page).then(|| place + (image_offset - part.first * PAGE_SIZE))
    }
}

/// The chunk set that a microVM was started with, and the copy of it that a pool's manager lent.
#[derive(Debug, Default)]
pub struct Copies {
    /// The key of the chunk set.
    pub key: String,
    /// Image pages of the chunk set, in whole chunks of 2 MiB, ascending.
    pub expected: Vec<PageRange>,
    /// What the copy holds: nothing where none was ready.
    pub table: CopyTable,
    /// The copy, which belongs to the microVM alone; to be mapped shared, at leaves of 2 MiB.
    pub file: Option<File>,
    /// Why there is none.
    pub absent: Option<NoCopy>,
}

#[cfg(test)]
#[path = "copies_tests.rs"]
mod tests;
