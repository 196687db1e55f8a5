//! What a copy costs, and the runs of pages for which it costs least.
//!
//! The cost of a start is the time that it waits, and the time that the pool's manager works for
//! its copy before. DRAM is counted by the latter: both grow with the bytes of the copy.

use std::ops::Range;

use firn_base::PageRange;
use firn_snapshot::{CHUNK_PAGES, PageSet};

/// Mapping a run at the request, and removing the mapping, ns.
const MAPPING: u64 = 4_000;
/// The entry of a page in the host's page tables, built at the request, ns.
const ENTRY: u64 = 300;
/// A page of a copy, which the manager makes: 60 MiB in 5 ms.
const PAGE: u64 = 330;
/// Maximum number of runs of a copy: each takes two of the mappings of a process
/// (`vm.max_map_count`, 65,530 by default). With more, whole chunks are copied.
const MOST_RUNS: usize = 8192;

/// Runs of pages that contain the expected pages (ascending runs out of `pages` pages), merged
/// where the gap between them costs less than a mapping. With `whole`, a chunk is copied as a whole
/// where that costs less than its runs.
pub(super) fn runs(expected: &[PageRange], pages: u64, whole: bool) -> Vec<PageRange> {
    let mut runs = Vec::new();
    let mut chunks = Vec::new();
    let wanted = PageSet::of(expected, pages);
    let mut at = 0;
    while let Some(first) = wanted.ranges_in(at..pages).next() {
        let start = first.start - first.start % CHUNK_PAGES;
        at = (start + CHUNK_PAGES).min(pages);
        let chunk = PageRange::from(start..at);
        let parts = merged(wanted.ranges_in(start..at));
        let is_cheaper = chunk.pages == CHUNK_PAGES && whole_chunk() <= cost(&parts);
        runs.extend(if whole && is_cheaper { vec![chunk] } else { parts });
        chunks.push(chunk);
    }
    let set = |runs: &[PageRange]| PageSet::of(runs, pages).to_ranges();
    if runs.len() > MOST_RUNS { set(&chunks) } else { set(&runs) }
}

/// The cost of a chunk that is copied as a whole, ns: one entry of the page tables maps it.
fn whole_chunk() -> u64 {
    MAPPING + ENTRY + CHUNK_PAGES * PAGE
}

/// The cost of runs, ns.
fn cost(runs: &[PageRange]) -> u64 {
    runs.iter().map(|run| MAPPING + run.pages * (ENTRY + PAGE)).sum()
}

/// Ascending runs, without the gaps that cost less than a mapping.
fn merged(runs: impl Iterator<Item = Range<u64>>) -> Vec<PageRange> {
    let mut merged: Vec<PageRange> = Vec::new();
    for run in runs {
        match merged.last_mut() {
            Some(last) if (run.start - last.range().end) * (ENTRY + PAGE) < MAPPING => {
                last.pages = run.end - last.first;
            }
            _ => merged.push(run.into()),
        }
    }
    merged
}

#[cfg(test)]
#[path = "cost_tests.rs"]
mod tests;
