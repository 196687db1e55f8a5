//! Flattening: the topmost layer of every byte of guest memory.

use std::collections::{BTreeMap, BinaryHeap};

use firn_base::GuestRange;

use super::Layer;

/// A range of guest memory and the index of its topmost layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Visible {
    pub(super) guest: GuestRange,
    pub(super) layer: usize,
}

/// The visible ranges of the layers when they are applied in order: disjoint, ascending, at most
/// two for each layer. A sweep over the layers' ends with a heap of the layers under the sweep: O(n
/// log n).
pub(super) fn flatten(layers: &[Layer]) -> Vec<Visible> {
    let mut starts: Vec<usize> = (0..layers.len()).collect();
    starts.sort_by_key(|&i| layers[i].guest.start);
    let mut bounds: Vec<u64> =
        layers.iter().flat_map(|layer| [layer.guest.start, layer.guest.end()]).collect();
    bounds.sort_unstable();
    bounds.dedup();

    let mut starts = starts.into_iter().peekable();
    // The latest layer under the sweep is on top. Layers that have ended are removed when they
    // reach the top of the heap.
    let mut under: BinaryHeap<usize> = BinaryHeap::new();
    let mut visible: Vec<Visible> = Vec::new();
    for pair in bounds.windows(2) {
        let (start, end) = (pair[0], pair[1]);
        while let Some(layer) = starts.next_if(|&i| layers[i].guest.start == start) {
            under.push(layer);
        }
        while under.peek().is_some_and(|&top| layers[top].guest.end() <= start) {
            under.pop();
        }
        let Some(&layer) = under.peek() else { continue };
        match visible.last_mut() {
            Some(last) if last.layer == layer && last.guest.end() == start => {
                last.guest.len = end - last.guest.start;
            }
            _ => visible.push(Visible { guest: GuestRange { start, len: end - start }, layer }),
        }
    }
    visible
}

/// The largest number of visible ranges while the layers are applied in order. A later layer may
/// hide many at once, so the final number can be far smaller. O(n log n).
pub(super) fn most_visible(layers: &[Layer]) -> usize {
    // The end of each range, by its start.
    let mut visible: BTreeMap<u64, u64> = BTreeMap::new();
    let mut most = 0;
    for layer in layers {
        let (start, end) = (layer.guest.start, layer.guest.end());
        // A range that starts before the layer and reaches into it is cut.
        let before = visible.range_mut(..start).next_back().filter(|(_, before)| **before > start);
        let mut reached = before.map(|(_, before)| std::mem::replace(before, start));
        // Ranges that start within the layer are removed.
        while let Some((&within, _)) = visible.range(start..end).next() {
            reached = visible.remove(&within);
        }
        // The last of them may continue after the layer.
        if let Some(rest) = reached.filter(|reached| *reached > end) {
            visible.insert(end, rest);
        }
        visible.insert(start, end);
        most = most.max(visible.len());
    }
    most
}
