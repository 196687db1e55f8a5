//! Opening a pool, and recovery after a loss of power or a killed manager.

use std::io;
use std::sync::Arc;

use firn_base::RangeSet;
use serde::{Deserialize, Serialize};

use super::inner::Inner;
use super::scan::{Scan, bytes_of, extent_range, length, superblock};
use super::zeroed::scrub;
use super::{OpenError, Pool};
use crate::layout::{FREE, Superblock};
use crate::media::Medium;

/// What recovery changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recovery {
    /// Freed extents: no name referred to them. They were not yet published, superseded, or
    /// replicas.
    pub freed_extents: u64,
    /// Bytes of the freed extents.
    pub freed_bytes: u64,
    /// Cleared slots of removed names.
    pub cleared_slots: u32,
}

impl Pool {
    /// Opens the pool on a medium, which must be open for writing, and recovers it: frees the
    /// extents to which no name refers. The next opening completes an interrupted recovery.
    ///
    /// # Errors
    /// See [`OpenError`]. Nothing was changed, unless the medium failed.
    pub fn open(medium: Arc<dyn Medium>) -> Result<Self, OpenError> {
        let (superblock, twin) = superblock(&*medium)?;
        let scan = Scan::read(&*medium, &superblock);
        let mut problems = scan.problems(&superblock).into_iter();
        let name = medium.facts().name.clone();
        if let Some(problem) = problems.next() {
            return Err(OpenError::Damaged { name: name.clone(), problem, others: problems.len() });
        }
        let failed = |source| OpenError::Medium { name: name.clone(), source };
        let mut recovery = free_orphans(&*medium, &superblock, &scan, twin).map_err(failed)?;
        let inner = Inner::from_scan(medium, superblock, &scan);
        recovery.cleared_slots = inner.gc().map_err(|error| failed(io::Error::other(error)))?;
        Ok(Self { inner: Arc::new(inner), recovery })
    }
}

/// Frees the extents to which no slot's word refers. Clearing one word is independent of clearing
/// the others, so they may become durable in any order.
fn free_orphans(
    medium: &dyn Medium,
    superblock: &Superblock,
    scan: &Scan,
    twin: bool,
) -> io::Result<Recovery> {
    let mut recovery = Recovery::default();
    if !twin {
        let block = superblock.encode();
        medium.store(superblock.twin_at(), &block);
        medium.flush(superblock.twin_at(), length(&block));
    }
    if superblock.scrub {
        scrub_orphans(medium, superblock, scan)?;
    }
    for (granule, record) in &scan.records {
        if record.is_some_and(|record| scan.is_published(*granule, &record)) {
            continue;
        }
        let at = superblock.record_at(*granule);
        medium.store_word(at, FREE);
        medium.flush(at, 8);
        recovery.freed_extents += 1;
        let range = record.and_then(|record| extent_range(superblock, *granule, &record));
        let granules = range.map_or(0, |range| range.end - range.start);
        recovery.freed_bytes += bytes_of(superblock, granules);
    }
    if recovery.freed_extents > 0 || !twin {
        medium.fence()?;
    }
    Ok(recovery)
}

/// Writes zeros over the extents that [`free_orphans`] frees, where no snapshot is. The end of an
/// extent whose record is damaged is unknown: it may be the end of the medium.
fn scrub_orphans(medium: &dyn Medium, superblock: &Superblock, scan: &Scan) -> io::Result<()> {
    let size = superblock.granule;
    let snapshots: RangeSet = scan
        .snapshots()
        .filter_map(|(_, granule, record)| extent_range(superblock, granule, record))
        .collect();
    let data = superblock.data().unwrap_or_default();
    for (granule, record) in &scan.records {
        if record.is_some_and(|record| scan.is_published(*granule, &record)) {
            continue;
        }
        let range = record.and_then(|record| extent_range(superblock, *granule, &record));
        let range = range.unwrap_or(u64::from(*granule).max(data.start)..data.end);
        for (part, _) in snapshots.split(range).into_iter().filter(|(_, kept)| !kept) {
            scrub(medium, &(part.start * size..part.end * size))?;
        }
    }
    Ok(())
}
