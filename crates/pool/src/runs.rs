//! Runs of pages: as messages and annexes have them, and as a copy packs them.

use firn_base::{PAGE_SIZE, PageRange};

/// Pages of a chunk of 2 MiB, the largest leaf of a copy.
const CHUNK_PAGES: u64 = COPY_CHUNK / PAGE_SIZE;
/// Bytes of a chunk.
pub const COPY_CHUNK: u64 = 2 << 20;

/// A run of pages in a message: the first page and the number of pages.
pub(crate) type PageRun = (u32, u32);

/// Runs as in a message. Pages beyond 16 TiB are left out.
pub(crate) fn encode_runs(runs: &[PageRange]) -> Vec<PageRun> {
    let run =
        |run: &PageRange| Some((u32::try_from(run.first).ok()?, u32::try_from(run.pages).ok()?));
    runs.iter().filter_map(run).collect()
}

/// The runs of a message.
pub(crate) fn decode_runs(runs: &[PageRun]) -> Vec<PageRange> {
    let run =
        |(first, pages): &PageRun| PageRange { first: (*first).into(), pages: (*pages).into() };
    runs.iter().map(run).collect()
}

/// The runs within guest memory of `pages` pages, ascending and as few as possible.
pub(crate) fn normal(mut runs: Vec<PageRange>, pages: u64) -> Vec<PageRange> {
    runs.sort_unstable_by_key(|run| run.first);
    let mut merged: Vec<PageRange> = Vec::new();
    for run in runs {
        let (start, end) = (run.first, run.range().end.min(pages));
        match merged.last_mut() {
            Some(last) if start <= last.range().end => {
                last.pages = end.max(last.range().end) - last.first;
            }
            _ if start < end => merged.push((start..end).into()),
            _ => {}
        }
    }
    merged
}

/// The first pages of runs, `pages` at most.
pub(crate) fn first_pages(runs: &[PageRange], mut pages: u64) -> Vec<PageRange> {
    let mut first = Vec::new();
    for run in runs {
        let kept = run.pages.min(pages);
        pages -= kept;
        if kept > 0 {
            first.push(PageRange { pages: kept, ..*run });
        }
    }
    first
}

/// The bytes of runs that do not overlap.
pub(crate) fn bytes_of(runs: &[PageRange]) -> u64 {
    runs.iter().map(|run| run.pages * PAGE_SIZE).sum()
}

/// Where runs of pages lie in a copy: parts, ascending, each with its offset in the copy in bytes.
/// The copy has no gap.
///
/// Whole chunks of 2 MiB, at multiples of 2 MiB, come first, so that they can be mapped at 2 MiB.
/// All other parts follow. Both are in ascending order. The runs must be ascending and must not
/// overlap.
#[must_use]
pub fn pack_copy(runs: &[PageRange]) -> Vec<(PageRange, u64)> {
    let mut parts: Vec<(PageRange, u64)> = Vec::new();
    for run in runs.iter().map(PageRange::range) {
        let chunks = run.start.next_multiple_of(CHUNK_PAGES)..run.end - run.end % CHUNK_PAGES;
        let pieces = if chunks.is_empty() {
            [run, 0..0, 0..0]
        } else {
            [run.start..chunks.start, chunks.clone(), chunks.end..run.end]
        };
        let pieces = pieces.into_iter().filter(|piece| !piece.is_empty());
        parts.extend(pieces.map(|piece| (PageRange::from(piece), 0)));
    }
    let mut end = 0;
    for whole in [true, false] {
        for (part, place) in parts.iter_mut().filter(|(part, _)| is_whole(part) == whole) {
            *place = end;
            end += part.pages * PAGE_SIZE;
        }
    }
    parts
}

/// Whether a part consists of whole chunks.
pub(crate) fn is_whole(part: &PageRange) -> bool {
    part.first.is_multiple_of(CHUNK_PAGES) && part.pages.is_multiple_of(CHUNK_PAGES)
}

#[cfg(test)]
#[path = "runs_tests.rs"]
mod tests;
