//! Bytes that a batch read for pages that the guest's allocator held free at the freeze. These
//! reads are wasted: the guest overwrites such a page before it reads it (SnapBPF 3.2).

use std::io;
use std::path::Path;

use firn_base::PAGE_SIZE;
use firn_memory::page_cache::cached;
use firn_snapshot::{PackedFile, PageSet, Snapshot};

use firn_run::StartReport;

/// The free pages of a snapshot, and the files from which a planner may read them.
#[derive(Debug)]
pub(crate) struct FreeReads {
    snapshot: Snapshot,
    packed: Option<PackedFile>,
    free: PageSet,
}

/// The number of free pages in the page cache and in the packed file.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FreePages {
    cached: u64,
    packed: u64,
}

impl FreeReads {
    /// `None` if the snapshot's profile does not list the free pages, or if there is no snapshot;
    /// the thaw then reports that.
    pub(crate) fn of(snapshot: &Path, packed: Option<PackedFile>) -> Option<Self> {
        let snapshot = Snapshot::open(snapshot).ok()?;
        let free = snapshot.profile().ok()??.free.filter(|free| !free.is_empty())?;
        let free = PageSet::of(&free, snapshot.manifest().layout.pages());
        Some(Self { snapshot, packed, free })
    }

    /// Counts the free pages in the page cache and in the packed file.
    pub(crate) fn count(&self) -> io::Result<FreePages> {
        let image = self.snapshot.image_file().ok_or(io::ErrorKind::NotFound)?;
        let image = cached(image, self.free.pages())?;
        let mut pages = FreePages {
            cached: self.free.iter().filter(|page| image.get(*page)).count() as u64,
            packed: 0,
        };
        let packed = self.packed.map(|file| self.snapshot.packed(file));
        let Some(Ok(Some(packed))) = packed else { return Ok(pages) };
        let file = cached(packed.file(), packed.data().end / PAGE_SIZE)?;
        for run in packed.runs() {
            for (place, page) in (run.offset / PAGE_SIZE..).zip(run.run.range()) {
                if self.free.get(page) {
                    pages.packed += 1;
                    pages.cached += u64::from(file.get(place));
                }
            }
        }
        Ok(pages)
    }
}

/// Bytes of free pages that were read: those in the page cache once for each snapshot, and those of
/// the packed file for each microVM that reads it past the page cache. The microVMs take turns with
/// the snapshots.
pub(crate) fn bytes(places: &[FreePages], reports: &[StartReport]) -> u64 {
    let cached: u64 = places.iter().map(|pages| pages.cached).sum();
    let direct =
        |report: &StartReport| report.counters.pager.is_some_and(|pager| pager.direct_reads > 0);
    let read = reports.iter().zip(places.iter().cycle()).filter(|(report, _)| direct(report));
    (cached + read.map(|(_, pages)| pages.packed).sum::<u64>()) * PAGE_SIZE
}
