//! A set of numbers, kept as disjoint ranges.

use std::collections::BTreeMap;
use std::ops::Range;

/// A set of numbers, such as addresses, as disjoint ranges that are not adjacent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RangeSet(
    /// The start and the end of each range.
    BTreeMap<u64, u64>,
);

impl RangeSet {
    /// Adds a range and merges it with the ranges that it overlaps or is adjacent to, in O(log n)
    /// per merged range.
    pub fn insert(&mut self, mut range: Range<u64>) {
        while let Some((&start, &end)) = self.0.range(..=range.end).next_back() {
            if end < range.start {
                break;
            }
            self.0.remove(&start);
            range = range.start.min(start)..range.end.max(end);
        }
        self.0.insert(range.start, range.end);
    }

    /// Splits a range at the ends of the set's ranges: ascending parts, each with whether it is in
    /// the set.
    #[must_use]
    pub fn split(&self, range: Range<u64>) -> Vec<(Range<u64>, bool)> {
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
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
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
