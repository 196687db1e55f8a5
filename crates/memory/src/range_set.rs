//! A set of addresses, kept as disjoint ranges.

use std::collections::BTreeMap;
use std::ops::Range;

/// Disjoint ranges that do not touch each other: their starts and their ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RangeSet(BTreeMap<u64, u64>);

impl RangeSet {
    /// Adds a range, and merges it with those it overlaps or touches. O(log n) for each range merged.
    pub(crate) fn insert(&mut self, mut range: Range<u64>) {
        while let Some((&start, &end)) = self.0.range(..=range.end).next_back() {
            if end < range.start {
                break;
            }
            self.0.remove(&start);
            range = range.start.min(start)..range.end.max(end);
        }
        self.0.insert(range.start, range.end);
    }

    /// The parts of a range in ascending order, each with whether the set holds it.
    pub(crate) fn split(&self, range: Range<u64>) -> Vec<(Range<u64>, bool)> {
        let before = self.0.range(..range.start).next_back();
        let within = self.0.range(range.start..range.end);
        let mut parts = Vec::new();
        let mut at = range.start;
        for (&start, &end) in before.into_iter().chain(within) {
            let (start, end) = (start.max(range.start), end.min(range.end));
            if start >= end {
                continue;
            }
            if at < start {
                parts.push((at..start, false));
            }
            parts.push((start..end, true));
            at = end;
        }
        if at < range.end {
            parts.push((at..range.end, false));
        }
        parts
    }

    /// Number of ranges.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

impl FromIterator<Range<u64>> for RangeSet {
    fn from_iter<I: IntoIterator<Item = Range<u64>>>(ranges: I) -> Self {
        let mut set = Self::default();
        for range in ranges {
            set.insert(range);
        }
        set
    }
}

#[cfg(test)]
#[path = "range_set_tests.rs"]
mod tests;
