//! Repairing a damaged pool by removing lost snapshots.

use std::sync::Arc;

use serde::Serialize;

use super::problem::Problem;
use super::scan::{Scan, length, read_superblock, search, superblock};
use super::{OpenError, Pool, RepairError};
use crate::layout::{COUNTER_AT, MAGIC, Superblock, Word};
use crate::media::Medium;

/// Distance by which a repair advances the generation counter beyond the highest generation found,
/// so that generations of lost extents are not used again.
const COUNTER_LEAP: u64 = 1 << 32;

/// What a repair changed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RepairReport {
    /// The superblock was restored from its twin.
    pub superblock: bool,
    /// The problems found. Snapshots described as lost were removed.
    pub problems: Vec<Problem>,
}

impl Pool {
    /// Repairs the pool on a medium, which must be open for writing, and opens it. Restores the
    /// superblock from its twin and removes names of lost snapshots. An interrupted repair can be
    /// repeated.
    ///
    /// # Errors
    /// See [`RepairError`].
    pub fn repair(medium: Arc<dyn Medium>) -> Result<(Self, RepairReport), RepairError> {
        let mut report = RepairReport::default();
        let failed = |source| RepairError::Medium { name: medium.facts().name.clone(), source };
        let superblock = match superblock(&*medium) {
            Ok((found, _)) => found,
            Err(OpenError::Superblock(_)) => {
                restore_superblock(&*medium).map_err(failed)?;
                report.superblock = true;
                superblock(&*medium)?.0
            }
            Err(error) => return Err(error.into()),
        };
        // Removing one of two overlapping extents may reveal another overlap. Each round removes at
        // least one name.
        loop {
            let scan = Scan::read(&*medium, &superblock);
            let problems = scan.problems(&superblock);
            if problems.is_empty() {
                break;
            }
            for problem in &problems {
                repair_problem(&*medium, &superblock, &scan, problem);
            }
            medium.fence().map_err(failed)?;
            report.problems.extend(problems);
        }
        Ok((Self::open(medium)?, report))
    }
}

/// Writes the magic number last, as creation does.
fn restore_superblock(medium: &dyn Medium) -> std::io::Result<()> {
    let twin = Superblock::twin_of(medium.facts().size);
    let Ok(found) = read_superblock(medium, twin) else { return Ok(()) };
    let block = found.encode();
    medium.store_word(0, 0);
    medium.flush(0, 8);
    medium.fence()?;
    medium.store(8, &block[8..]);
    medium.flush(0, length(&block));
    medium.fence()?;
    medium.store_word(0, u64::from_le_bytes(MAGIC));
    medium.flush(0, 8);
    medium.fence()
}

fn repair_problem(medium: &dyn Medium, superblock: &Superblock, scan: &Scan, problem: &Problem) {
    let set = |slot: u32| {
        let at = superblock.slot_at(slot);
        medium.store_word(at, Word::Removed.encode());
        medium.flush(at, 8);
    };
    match problem {
        Problem::Slot { slot }
        | Problem::Name { slot }
        | Problem::Extent { slot, .. }
        | Problem::Overlap { slot, .. }
        | Problem::Twice { slot, .. } => set(*slot),
        Problem::Unreachable { name, slot } => {
            let path = search(superblock, name).take_while(|other| other != slot);
            let ends = |slot: &u32| {
                scan.entries[firn_base::num::usize_of(u64::from(*slot))].word == Some(Word::Empty)
            };
            path.filter(ends).for_each(set);
        }
        Problem::Counter { found, .. } => {
            medium.store_word(COUNTER_AT, found.saturating_add(COUNTER_LEAP));
            medium.flush(COUNTER_AT, 8);
        }
        // Opening the pool restores the twin. The caller handles invalid content.
        Problem::Twin | Problem::Content { .. } => {}
    }
}
