//! Placement of extents.

use std::ops::Range;

/// The first granule of the best place for `need` granules at a multiple of `align`: in the
/// smallest sufficient gap, the first of several. `used` lists the extents in ascending order. All
/// values are in granules.
///
/// # Errors
/// The number of granules missing in the largest usable gap.
pub(crate) fn best_fit(
    used: impl Iterator<Item = Range<u64>>,
    data: &Range<u64>,
    need: u64,
    align: u64,
) -> Result<u64, u64> {
    let mut best: Option<Range<u64>> = None;
    let mut largest = 0;
    for gap in gaps(used, data) {
        let begin = gap.start.next_multiple_of(align);
        let room = gap.end.saturating_sub(begin);
        largest = largest.max(room);
        let size = |range: &Range<u64>| range.end - range.start;
        if room >= need && best.as_ref().is_none_or(|best| size(&gap) < size(best)) {
            best = Some(gap);
        }
    }
    best.map(|gap| gap.start.next_multiple_of(align)).ok_or(need - largest.min(need))
}

/// The free ranges between `used`, in ascending order.
pub(crate) fn gaps(
    used: impl Iterator<Item = Range<u64>>,
    data: &Range<u64>,
) -> impl Iterator<Item = Range<u64>> {
    let end = data.end;
    let mut at = data.start;
    used.chain(std::iter::once(end..end)).filter_map(move |range| {
        let gap = at..range.start.min(end);
        at = at.max(range.end);
        (gap.start < gap.end).then_some(gap)
    })
}

#[cfg(test)]
#[path = "space_tests.rs"]
mod tests;
