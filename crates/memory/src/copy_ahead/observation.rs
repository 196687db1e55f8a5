//! Which granules a run wrote, and which of those were expected.

use std::io;
use std::ops::Range;

use firn_base::num::usize_of;
use firn_base::{GuestRange, PAGE_SIZE, PageRange};
use firn_snapshot::{CHUNK_PAGES, Copies, Grant, NoCopy, PageSet, ReadAt, Snapshot};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use vm_memory::{Bytes, GuestAddress};

use super::Rule;
use crate::guest_memory::GuestMemory;
use crate::plan::{Plan, Sharing, Source};

/// Bytes that are compared at once.
const PIECE: usize = 64 << 10;

/// Which parts of guest memory a run was expected to write, and which it wrote. It counts granules:
/// the unit in which the rule of the run's copies learns.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteReport {
    /// Why there was no copy.
    pub no_copy: Option<NoCopy>,
    /// Bytes of a granule.
    pub granule: u64,
    /// Granules that were expected to be written.
    pub predicted: u64,
    /// Granules in the copy that was ready: DRAM of this microVM.
    pub copied: u64,
    /// Granules that were written and not expected: the kernel copied their pages.
    pub missed: u64,
    /// Granules that were expected and not written: the rule also selects some that are read, and
    /// gaps that cost less than a mapping.
    pub unused: u64,
    /// The granules that were written, as runs of image pages.
    pub written: Vec<PageRange>,
}

/// Why the written pages are not known.
#[derive(Debug, Error)]
#[error("cannot find out what the guest wrote")]
pub struct ObserveError(#[from] io::Error);

/// Finds out which granules a guest has written. A granule of the extent counts when as many of its
/// pages were copied on write as the rule requires; a granule of a copy counts when it differs from
/// the extent. Where the monitor copies whole chunks and fills pages that are only read, a page
/// that a finer rule counts has to differ, too, and so has one that the plan populated. The guest
/// may run: a concurrent write may or may not count. Returns `None` for a grant for which no copy
/// was requested.
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
    let unit = rule.granule.pages();
    let granule = |page: u64| page / unit * unit..((page / unit + 1) * unit).min(pages);
    let mut buffers = [vec![0; PIECE], vec![0; PIECE]];
    let private = memory.private_pages()?;
    let shared = plan.extent_sharing() == Some(Sharing::Shared);
    let compared: Vec<GuestRange> = if shared && unit < CHUNK_PAGES {
        plan.layout.regions().map(|region| region.guest_range().into()).collect()
    } else {
        plan.populated.clone()
    };
    let mut unchanged = PageSet::new(pages);
    for range in compared {
        let first = plan.layout.image_offset(range.start).unwrap_or_default() / PAGE_SIZE;
        let private = private.ranges_in(first..first + range.len / PAGE_SIZE);
        for piece in private.flat_map(|run| parts(run, PIECE as u64 / PAGE_SIZE)) {
            let guest = range.start + (piece.start - first) * PAGE_SIZE;
            let len = (piece.end - piece.start) * PAGE_SIZE;
            let (is, was) =
                read_both(memory, guest, image, piece.start * PAGE_SIZE, len, &mut buffers)?;
            let bytes = usize_of(PAGE_SIZE);
            let pages = piece.zip(is.chunks(bytes).zip(was.chunks(bytes)));
            pages.filter(|(_, (is, was))| is == was).for_each(|(page, _)| unchanged.insert(page));
        }
    }
    let mut changed = PageSet::new(pages);
    private.iter().filter(|page| !unchanged.get(*page)).for_each(|page| changed.insert(page));
    let mut written = PageSet::new(pages);
    for number in rule.written_granules(&changed.to_ranges()) {
        written.insert_range(granule(number * unit));
    }
    for segment in &plan.segments {
        let (Source::Copy { .. }, Some(offset)) =
            (segment.source, plan.layout.image_offset(segment.guest.start))
        else {
            continue;
        };
        for part in parts(offset..offset + segment.guest.len, unit * PAGE_SIZE) {
            let guest = segment.guest.start + (part.start - offset);
            let len = part.end - part.start;
            if differs(memory, guest, image, part.start, len, &mut buffers)? {
                written.insert_range(granule(part.start / PAGE_SIZE));
            }
        }
    }
    let expected = PageSet::of(&copies.expected, pages);
    let granules = |count: &dyn Fn(u64) -> bool| {
        let firsts = (0..pages).step_by(usize_of(unit));
        u64::try_from(firsts.filter(|page| count(*page)).count()).unwrap_or(u64::MAX)
    };
    Ok(WriteReport {
        no_copy: copies.absent,
        granule: unit * PAGE_SIZE,
        predicted: granules(&|page| expected.get(page)),
        copied: copies.table.bytes() / (unit * PAGE_SIZE),
        missed: granules(&|page| written.get(page) && !expected.get(page)),
        unused: granules(&|page| expected.get(page) && !written.get(page)),
        written: written.to_ranges(),
    })
}

/// A range of the image, cut at multiples of `unit`.
fn parts(range: Range<u64>, unit: u64) -> impl Iterator<Item = Range<u64>> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        let end = (at / unit + 1) * unit;
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
    buffers: &mut [Vec<u8>; 2],
) -> io::Result<bool> {
    for at in (0..len).step_by(PIECE) {
        let bytes = (len - at).min(PIECE as u64);
        let (is, was) = read_both(memory, guest + at, sealed, image + at, bytes, buffers)?;
        if is != was {
            return Ok(true);
        }
    }
    Ok(false)
}

/// At most [`PIECE`] bytes of guest memory, and those of the sealed extent.
fn read_both<'a>(
    memory: &GuestMemory,
    guest: u64,
    sealed: &dyn ReadAt,
    image: u64,
    len: u64,
    [is, was]: &'a mut [Vec<u8>; 2],
) -> io::Result<(&'a [u8], &'a [u8])> {
    let (is, was) = (&mut is[..usize_of(len)], &mut was[..usize_of(len)]);
    sealed.read_exact_at(was, image)?;
    memory.vm_memory().read_slice(is, GuestAddress(guest)).map_err(io::Error::other)?;
    Ok((is, was))
}

#[cfg(test)]
#[path = "observation_tests.rs"]
mod tests;
