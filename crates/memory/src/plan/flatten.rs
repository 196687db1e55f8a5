//! Flattening: which layer is on top, for every byte of guest memory.

use std::collections::BinaryHeap;

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
