//! Which pages of a profile are copied ahead.

use std::collections::{BTreeMap, BTreeSet};

use firn_base::PageRange;
use firn_snapshot::{CHUNK_PAGES, Profile};

use super::cost;

/// How fine copies are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Granule {
    /// 16 KiB, or whole chunks of 2 MiB where they cost less.
    Auto,
    /// Single pages: the least memory.
    Size4K,
    /// 16 KiB: KVM prefetches within it.
    Size16K,
    /// 64 KiB.
    Size64K,
    /// Whole chunks of 2 MiB.
    Size2M,
}

impl Granule {
    /// Every granule, by its name.
    const NAMES: [(&'static str, Self); 5] = [
        ("2m", Self::Size2M),
        ("auto", Self::Auto),
        ("4k", Self::Size4K),
        ("16k", Self::Size16K),
        ("64k", Self::Size64K),
    ];

    /// The name: `16k`.
    #[must_use]
    pub fn name(self) -> &'static str {
        let found = Self::NAMES.iter().find(|(_, granule)| *granule == self);
        found.map_or("", |(name, _)| name)
    }

    /// The granule of a name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|(_, granule)| *granule)
    }

    /// Pages in which a rule counts and learns.
    pub(super) fn pages(self) -> u64 {
        match self {
            Self::Size4K => 1,
            Self::Auto | Self::Size16K => 4,
            Self::Size64K => 16,
            Self::Size2M => CHUNK_PAGES,
        }
    }
}

/// Which pages are copied ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rule {
    /// The least number of pages of a granule that a run writes, 1 to 512; a granule of fewer pages
    /// counts when all of them are written.
    pub written: u64,
    /// The least number of pages of a chunk that a run touches through leaves of 4 KiB, where it
    /// writes none; 0 selects no page that is only read.
    pub read: u64,
    /// How fine copies are.
    pub granule: Granule,
    /// Whether runs change what is expected. Without it, only the profile decides.
    pub learn: bool,
}

impl Rule {
    /// The default, by measurement (docs/concepts/firn-planner.md).
    pub const DEFAULT: Self = Self { written: 1, read: 32, granule: Granule::Size2M, learn: true };

    /// The rule on a host with nested paging (VT-x, SVM), or without it: pages that are only read
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

    /// The rule on a medium with private mappings, or without them: there, a page that was not
    /// expected in a chunk with runs costs a fault that the monitor serves, so whole chunks are
    /// copied unless the planner's options say otherwise.
    pub(super) fn for_medium(self, private: bool) -> Self {
        match self.granule {
            Granule::Auto if !private => Self { granule: Granule::Size2M, ..self },
            _ => self,
        }
    }

    /// The key of the copy set at the pool's manager.
    #[must_use]
    pub fn key(self) -> String {
        let mut key = format!("written={},read={}", self.written, self.read);
        // What is not the default is part of the key: firns that copied only chunks, and always
        // learnt, find their sets.
        if self.granule != Granule::Size2M {
            key = format!("{key},granule={}", self.granule.name());
        }
        if !self.learn {
            key.push_str(FROZEN);
        }
        key
    }

    /// The rule of [`Self::key`]; `None` for another key.
    pub(crate) fn of_key(key: &str) -> Option<Self> {
        let (written, rest) = key.strip_prefix("written=")?.split_once(",read=")?;
        let (rest, learn) = match rest.strip_suffix(FROZEN) {
            Some(rest) => (rest, false),
            None => (rest, true),
        };
        let (read, granule) = match rest.split_once(",granule=") {
            Some((read, granule)) => (read, Granule::of_name(granule)?),
            None => (rest, Granule::Size2M),
        };
        Some(Self { written: written.parse().ok()?, read: read.parse().ok()?, granule, learn })
    }

    /// The granules that the rule selects from a profile, by number, ascending.
    pub(super) fn granules(self, profile: &Profile) -> Vec<u64> {
        let written = self.written_granules(profile.written.as_deref().unwrap_or_default());
        self.with_read_granules(written, profile)
    }

    /// The granules of which enough pages are in runs, which must not overlap.
    pub(super) fn written_granules(self, runs: &[PageRange]) -> BTreeSet<u64> {
        let counts = pages_by(self.granule.pages(), runs);
        let least = self.written.min(self.granule.pages());
        counts
            .into_iter()
            .filter(|(_, pages)| *pages >= least)
            .map(|(granule, _)| granule)
            .collect()
    }

    /// The granules that a run writes, and those that it reads according to a profile:
    ///
    /// - in chunks that it writes to, all that it touches. The chunk is mapped in small leaves;
    /// - in chunks that no recorded run writes to, and of which it touches enough pages through
    ///   small leaves, these pages.
    pub(super) fn with_read_granules(
        self,
        mut granules: BTreeSet<u64>,
        profile: &Profile,
    ) -> Vec<u64> {
        if self.read > 0 {
            let unit = self.granule.pages();
            let chunk_of = |granule: u64| granule * unit / CHUNK_PAGES;
            let written: BTreeSet<u64> = granules.iter().copied().map(chunk_of).collect();
            let small = profile.small_leaves.as_deref().unwrap_or_default();
            let recorded = pages_by(CHUNK_PAGES, profile.written.as_deref().unwrap_or_default());
            let mut dense = pages_by(CHUNK_PAGES, small);
            dense.retain(|chunk, pages| *pages >= self.read && !recorded.contains_key(chunk));
            let touched = profile.faults.as_deref().unwrap_or_default();
            let (small, touched) = (pages_by(unit, small), pages_by(unit, touched));
            let of_written = small.keys().chain(touched.keys());
            let of_written = of_written.filter(|granule| written.contains(&chunk_of(**granule)));
            let of_dense = small.keys().filter(|granule| dense.contains_key(&chunk_of(**granule)));
            granules.extend(of_written.chain(of_dense));
        }
        granules.into_iter().collect()
    }

    /// The runs of pages to copy, for the pages that are expected, ascending, out of `pages` pages
    /// of guest memory.
    pub(super) fn runs(self, expected: &[PageRange], pages: u64) -> Vec<PageRange> {
        match self.granule {
            Granule::Size2M => expected.to_vec(),
            granule => cost::runs(expected, pages, granule == Granule::Auto),
        }
    }
}

/// The end of the key of a set that no run changes.
const FROZEN: &str = ",learn=off";

/// The number of pages of each unit of `unit` pages in runs that do not overlap.
fn pages_by(unit: u64, runs: &[PageRange]) -> BTreeMap<u64, u64> {
    let mut counts = BTreeMap::new();
    for run in runs {
        let range = run.range();
        let mut page = range.start;
        while page < range.end {
            let number = page / unit;
            let end = ((number + 1) * unit).min(range.end);
            *counts.entry(number).or_default() += end - page;
            page = end;
        }
    }
    counts
}

#[cfg(test)]
#[path = "rule_tests.rs"]
mod tests;
