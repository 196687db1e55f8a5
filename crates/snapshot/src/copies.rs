//! Parts of an image that a pool's manager copied in advance for one microVM.

use std::fs::File;

use firn_base::{PAGE_SIZE, PageRange};
use firn_pool::{NoCopy, pack_copy};
use serde::Serialize;

/// The parts of an image that a copy contains, ascending.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct CopyTable {
    /// Each part and its offset in the copy, in bytes.
    parts: Vec<(PageRange, u64)>,
}

impl CopyTable {
    /// The table of a copy of these pages ([`pack_copy`]). The runs must be ascending and must not
    /// overlap. The first run that breaks this rule and all runs after it are left out.
    #[must_use]
    pub fn new(runs: impl IntoIterator<Item = PageRange>) -> Self {
        let (mut end, mut pages) = (0, 0_u64);
        let mut table = Vec::new();
        for run in runs {
            let next = pages.checked_add(run.pages);
            let next = next.filter(|pages| pages.checked_mul(PAGE_SIZE).is_some());
            let Some(next) = next.filter(|_| run.pages > 0 && run.first >= end) else { break };
            (end, pages) = (run.range().end, next);
            table.push(run);
        }
        Self { parts: pack_copy(&table) }
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
        self.parts.iter().map(|(part, _)| part.pages * PAGE_SIZE).sum()
    }

    /// The offset in the copy of the bytes at an image offset, if the copy contains them.
    #[must_use]
    pub fn place(&self, image_offset: u64) -> Option<u64> {
        self.piece(image_offset).map(|(place, _)| place)
    }

    /// The same, and the number of bytes that follow in one part.
    #[must_use]
    pub fn piece(&self, image_offset: u64) -> Option<(u64, u64)> {
        let page = image_offset / PAGE_SIZE;
        let next = self.parts.partition_point(|(part, _)| part.first <= page);
        let (part, place) = self.parts.get(next.checked_sub(1)?)?;
        let at = image_offset - part.first * PAGE_SIZE;
        let left = (part.pages * PAGE_SIZE).checked_sub(at).filter(|left| *left > 0)?;
        Some((place + at, left))
    }
}

/// The copy set of a microVM, and the copy of it that a pool's manager lent.
#[derive(Debug, Default)]
pub struct Copies {
    /// The key of the copy set.
    pub key: String,
    /// Image pages of the copy set, ascending.
    pub expected: Vec<PageRange>,
    /// The parts in the copy; empty if no copy was ready.
    pub table: CopyTable,
    /// The copy, which only this microVM uses; map it shared.
    pub file: Option<File>,
    /// Why there is no copy.
    pub absent: Option<NoCopy>,
}

#[cfg(test)]
#[path = "copies_tests.rs"]
mod tests;
