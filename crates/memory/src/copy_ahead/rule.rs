//! Which chunks of a profile are copied ahead.

use std::collections::BTreeMap;

use firn_base::PageRange;
use firn_snapshot::{CHUNK_PAGES, PageSet, Profile};

/// Which chunks of 2 MiB are copied ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rule {
    /// The least number of pages of a chunk that a run writes, 1 to 512.
    pub written: u64,
    /// The least number of pages of a chunk that a run touches through leaves of 4 KiB, where it
    /// writes none; 0 selects no such chunk.
    pub read: u64,
}

impl Rule {
    /// The default, by measurement (docs/concepts/firn-planner.md): a page that is written splits
    /// its whole leaf.
    pub const DEFAULT: Self = Self { written: 1, read: 32 };

    /// The rule on a host with nested paging (VT-x, SVM), or without it: chunks that are only read
    /// are copied for KVM's software page tables alone.
    ///
    /// Those prefetch the entries around a fault (Linux `paging_tmpl.h`, `FNAME(prefetch_gpte)`)
    /// only in memory that this process may write, and sealed bytes are mapped for reading. So each
    /// page of the guest's small leaves costs a page fault. With nested paging a shared leaf of 2
    /// MiB takes one.
    #[must_use]
    pub fn for_paging(self, nested: bool) -> Self {
        Self { read: if nested { 0 } else { self.read }, ..self }
    }

    /// The chunks that the rule selects from a profile, as image pages, ascending.
    #[must_use]
    pub fn chunks(self, profile: &Profile) -> Vec<PageRange> {
        let mut chunks = self.written_chunks(profile);
        chunks.extend(self.read_chunks(profile));
        chunks.sort_unstable_by_key(|chunk| chunk.first);
        chunks
    }

    /// The key of the chunk set at the pool's manager.
    #[must_use]
    pub fn key(self) -> String {
        format!("written={},read={}", self.written, self.read)
    }

    /// The rule of [`Self::key`]; `None` for another key.
    pub(super) fn of_key(key: &str) -> Option<Self> {
        let (written, read) = key.strip_prefix("written=")?.split_once(",read=")?;
        Some(Self { written: written.parse().ok()?, read: read.parse().ok()? })
    }

    /// The chunks that a run wrote, and those of the profile that it reads, out of `pages` image
    /// pages.
    pub(super) fn with_read_chunks(
        self,
        written: &[PageRange],
        profile: &Profile,
        pages: u64,
    ) -> Vec<PageRange> {
        let mut set = PageSet::new(pages);
        for run in written.iter().chain(&self.read_chunks(profile)).map(PageRange::range) {
            set.insert_range(run.start.min(pages)..run.end.min(pages));
        }
        set.to_ranges()
    }

    /// The chunks of which the profile has enough written pages.
    fn written_chunks(self, profile: &Profile) -> Vec<PageRange> {
        let counts = pages_by_chunk(profile.written.as_deref().unwrap_or_default());
        chunks(counts.into_iter().filter(|(_, pages)| *pages >= self.written).map(|(at, _)| at))
    }

    /// The chunks of which the profile has enough pages in small leaves, and no written page. A
    /// profile without small leaves has none.
    fn read_chunks(self, profile: &Profile) -> Vec<PageRange> {
        if self.read == 0 {
            return Vec::new();
        }
        let written = pages_by_chunk(profile.written.as_deref().unwrap_or_default());
        let small = pages_by_chunk(profile.small_leaves.as_deref().unwrap_or_default());
        let dense = small
            .into_iter()
            .filter(|(chunk, pages)| *pages >= self.read && !written.contains_key(chunk));
        chunks(dense.map(|(chunk, _)| chunk))
    }
}

/// The number of pages of each chunk in runs that do not overlap.
fn pages_by_chunk(runs: &[PageRange]) -> BTreeMap<u64, u64> {
    let mut counts = BTreeMap::new();
    for run in runs {
        let range = run.range();
        let mut page = range.start;
        while page < range.end {
            let chunk = page / CHUNK_PAGES;
            let end = ((chunk + 1) * CHUNK_PAGES).min(range.end);
            *counts.entry(chunk).or_default() += end - page;
            page = end;
        }
    }
    counts
}

fn chunks(numbers: impl Iterator<Item = u64>) -> Vec<PageRange> {
    numbers.map(|chunk| PageRange { first: chunk * CHUNK_PAGES, pages: CHUNK_PAGES }).collect()
}

#[cfg(test)]
#[path = "rule_tests.rs"]
mod tests;
