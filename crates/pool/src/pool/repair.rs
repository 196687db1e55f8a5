//! Making a damaged pool usable again, without what is lost.

use std::sync::Arc;

use serde::Serialize;

use super::problem::Problem;
use super::scan::{Scan, length, read_superblock, search, superblock};
use super::{OpenError, Pool, RepairError};
use crate::layout::{COUNTER_AT, MAGIC, Superblock, Word};
use crate::media::Medium;

/// How far the generation counter is set beyond what was found: generations whose extents are lost must not come back.
const COUNTER_LEAP: u64 = 1 << 32;

/// What a repair did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RepairReport {
    /// The superblock was restored from its twin.
    pub superblock: bool,
    /// What was wrong; snapshots that are called lost were removed.
    pub problems: Vec<Problem>,
}

impl Pool {
    /// Repairs the pool on a medium, which must be open for writing, and opens it. The superblock is restored from its twin; names whose
    /// snapshots are lost are removed. A repair that is cut off can be done again.
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
        // Removing one of two that overlap may show the next; each round removes one name at least.
        loop {
            let scan = Scan::read(&*medium, &superblock);
            let problems = scan.problems(&superblock);
            if problems.is_empty() {
                break;
            }
            for problem in &problems {
                mend(&*medium, &superblock, &scan, problem);
            }
            medium.fence().map_err(failed)?;
            report.problems.extend(problems);
        }
        Ok((Self::open(medium)?, report))
    }
}

/// As creation does: the mark last.
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

fn mend(medium: &dyn Medium, superblock: &Superblock, scan: &Scan, problem: &Problem) {
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
        // Opening restores the one; the other is the caller's to judge.
        Problem::Twin | Problem::Content { .. } => {}
    }
}
