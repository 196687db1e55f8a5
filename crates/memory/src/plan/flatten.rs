//! Flattening: which layer is on top, for every byte of guest memory.

use std::collections::{BTreeMap, BinaryHeap};

use super::{GuestRange, Layer};

/// A range of guest memory and the index of the layer on top of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Visible {
    pub(super) guest: GuestRange,
    pub(super) layer: usize,
}

/// What is visible of the layers when they are applied in order: disjoint ranges in ascending order, at
/// most two for each layer. A sweep over the layers' ends with a heap of the layers under the sweep:
/// O(n log n).
pub(super) fn flatten(layers: &[Layer]) -> Vec<Visible> {
    let mut starts: Vec<usize> = (0..layers.len()).collect();
    starts.sort_by_key(|&i| layers[i].guest.start);
    let mut bounds: Vec<u64> =
        layers.iter().flat_map(|layer| [layer.guest.start, layer.guest.end()]).collect();
    bounds.sort_unstable();
    bounds.dedup();

    let mut starts = starts.into_iter().peekable();
    // The latest of the layers under the sweep is on top. Layers that have ended leave the heap when they
    // come to its top.
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

/// The most ranges that are visible at a time while the layers are applied in order. A later layer may hide many at once, so in the end they can be
/// far fewer. O(n log n).
pub(super) fn most_visible(layers: &[Layer]) -> usize {
    // Where each ends, by where it starts.
    let mut visible: BTreeMap<u64, u64> = BTreeMap::new();
    let mut most = 0;
    for layer in layers {
        let (start, end) = (layer.guest.start, layer.guest.end());
        // What starts before the layer and reaches into it is cut.
        let before = visible.range_mut(..start).next_back().filter(|(_, before)| **before > start);
        let mut reached = before.map(|(_, before)| std::mem::replace(before, start));
        // What starts within it goes.
        while let Some((&within, _)) = visible.range(start..end).next() {
            reached = visible.remove(&within);
        }
        // Of the last of them there may be a rest behind it.
        if let Some(rest) = reached.filter(|reached| *reached > end) {
            visible.insert(end, rest);
        }
        visible.insert(start, end);
        most = most.max(visible.len());
    }
    most
}
