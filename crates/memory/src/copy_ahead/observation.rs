//! Which chunks a run wrote, and which of those were expected.

use std::io;
use std::ops::Range;

use firn_base::PageRange;
use firn_base::num::usize_of;
use firn_snapshot::{CHUNK_PAGES, CHUNK_SIZE, Copies, Grant, NoCopy, PageSet, ReadAt, Snapshot};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use vm_memory::{Bytes, GuestAddress};

use super::Rule;
use crate::guest_memory::GuestMemory;
use crate::plan::{Plan, Source};

/// Bytes that are compared at once.
const PIECE: usize = 64 << 10;

/// Which chunks (2 MiB) a run was expected to write, and which it wrote.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteReport {
    /// Why there was no copy.
    pub no_copy: Option<NoCopy>,
    /// Chunks that were expected to be written.
    pub predicted: u64,
    /// Chunks in the copy that was ready: DRAM of this microVM, 2 MiB each.
    pub copied: u64,
    /// Chunks that were written and not expected: the kernel copied them page by page.
    pub missed: u64,
    /// Chunks that were expected and not written, and chunks that the rule selected because they
    /// are read.
    pub unused: u64,
    /// The chunks that were written, as runs of image pages.
    pub written: Vec<PageRange>,
}

/// Why the written chunks are not known.
#[derive(Debug, Error)]
#[error("cannot find out what the guest wrote")]
pub struct ObserveError(#[from] io::Error);

/// Finds out which chunks a guest has written. A chunk of the extent counts when at least as many
/// of its pages were copied on write as the rule requires; a chunk of a copy counts when it differs
/// from the extent. The guest may run: a concurrent write may or may not count. Returns `None` for
/// a grant for which no copy was requested.
///
/// # Errors
///
/// [`ObserveError`]: the kernel does not report private pages, or the image cannot be read.
pub fn observe(
    memory: &GuestMemory,
    plan: &Plan,
    snapshot: &Snapshot,
    grant: Option<&Grant>,
) -> Result<Option<WriteReport>, ObserveError> {
    let Some(copies) = grant.and_then(Grant::copies) else { return Ok(None) };
    let Some(rule) = Rule::of_key(&copies.key) else { return Ok(None) };
    observe_extent(memory, plan, rule, copies, snapshot.image()).map(Some)
}

/// [`observe`] for an image, which is the sealed extent.
fn observe_extent(
    memory: &GuestMemory,
    plan: &Plan,
    rule: Rule,
    copies: &Copies,
    image: &dyn ReadAt,
) -> Result<WriteReport, ObserveError> {
    let pages = plan.layout.pages();
    let mut written = PageSet::new(pages);
    let mut buffers = [vec![0; PIECE], vec![0; PIECE]];
    for segment in &plan.segments {
        let Some(offset) = plan.layout.image_offset(segment.guest.start) else { continue };
        for part in chunk_parts(offset..offset + segment.guest.len) {
            let guest = segment.guest.start + (part.start - offset);
            let len = part.end - part.start;
            let counts = match segment.source {
                Source::Copy { .. } => {
                    differs(memory, guest, image, part.start, len, &mut buffers)?
                }
                _ => {
                    let private = memory.private_pages(guest, len)?;
                    private >= rule.written
                }
            };
            if counts {
                let chunk = part.start / CHUNK_SIZE * CHUNK_PAGES;
                written.insert_range(chunk..(chunk + CHUNK_PAGES).min(pages));
            }
        }
    }
    let mut expected = PageSet::new(pages);
    for run in &copies.expected {
        expected.insert_range(run.range().start.min(pages)..run.range().end.min(pages));
    }
    let chunks = |count: &dyn Fn(u64) -> bool| {
        let firsts = (0..pages).step_by(usize_of(CHUNK_PAGES));
        u64::try_from(firsts.filter(|page| count(*page)).count()).unwrap_or(u64::MAX)
    };
    Ok(WriteReport {
        no_copy: copies.absent,
        predicted: chunks(&|page| expected.get(page)),
        copied: copies.table.bytes() / CHUNK_SIZE,
        missed: chunks(&|page| written.get(page) && !expected.get(page)),
        unused: chunks(&|page| expected.get(page) && !written.get(page)),
        written: written.to_ranges(),
    })
}

/// A range of the image, cut at the chunks' ends.
fn chunk_parts(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        let end = (at / CHUNK_SIZE + 1) * CHUNK_SIZE;
        let part = at..end.min(range.end);
        at = part.end;
        (!part.is_empty()).then_some(part)
    })
}

/// Whether `len` bytes of guest memory differ from the sealed extent.
fn differs(
    memory: &GuestMemory,
    guest: u64,
    sealed: &dyn ReadAt,
    image: u64,
    len: u64,
    [is, was]: &mut [Vec<u8>; 2],
) -> io::Result<bool> {
    let view = memory.vm_memory();
    for at in (0..len).step_by(PIECE) {
        let bytes = usize_of(len - at).min(PIECE);
        let (is, was) = (&mut is[..bytes], &mut was[..bytes]);
        sealed.read_exact_at(was, image + at)?;
        view.read_slice(is, GuestAddress(guest + at)).map_err(io::Error::other)?;
        if is != was {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
#[path = "observation_tests.rs"]
mod tests;
