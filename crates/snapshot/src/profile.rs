//! The profile section: what earlier runs of a function touched, encoded with postcard.
//!
//! A profile is recorded from runs of a snapshot and stored in its container by
//! [`set_profile`](crate::set_profile). Image and machine state do not change. Each recorder makes
//! one part of the profile. A planner returns an error when a part that it needs is missing.
//!
//! All pages are image pages (offset in the image / 4096). Every type here is part of the profile
//! version, which an assertion at the end of the file checks.

use firn_base::PageRange;
use postcard_schema::Schema;
use postcard_schema::key::hash::fnv1a64::hash_ty_path;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use uuid::Uuid;

use crate::page_set::PageSet;
use crate::section::PROFILE_VERSION;

/// What earlier runs of a snapshot touched.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub struct Profile {
    /// The recorded snapshot: [`Description::id`](crate::Description).
    pub snapshot: Uuid,
    /// Names of the runs' inputs, for information.
    pub inputs: Vec<String>,
    /// Touched pages in the order of their first touch (userfaultfd). No page occurs twice.
    pub faults: Option<Vec<PageRange>>,
    /// Working-set groups (FaaSnap, 4.2): pages that became resident, including the host's
    /// read-ahead, grouped by the mincore sample that first reported them. No page is in two
    /// groups.
    pub groups: Option<Vec<Vec<PageRange>>>,
    /// Written pages, ascending.
    pub written: Option<Vec<PageRange>>,
    /// Pages that entered the page cache (SnapBPF, 3.1), in that order. No page occurs twice.
    pub cached: Option<Vec<CachedRun>>,
    /// Pages that the guest's allocator held free at the freeze according to its metadata,
    /// ascending.
    pub free: Option<Vec<PageRange>>,
    /// Pages that the guest had reported free (free page reporting) and not touched until the
    /// freeze, ascending. They are zero in the image.
    pub reported: Option<Vec<PageRange>>,
    /// Touched pages that the guest's page tables mapped by 4 KiB leaves at the freeze, ascending,
    /// as far as the tables were recognised. Other pages are mapped by larger leaves or were mapped
    /// later.
    pub small_leaves: Option<Vec<PageRange>>,
}

/// Pages that entered the page cache together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Schema)]
pub struct CachedRun {
    /// The pages.
    pub run: PageRange,
    /// When the first page entered, in ns after the guest was resumed.
    pub at_ns: u64,
}

/// Why a profile does not match its snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// The profile was recorded from another snapshot.
    #[error(
        "the profile was recorded of snapshot {found}, this one is {expected}; record it again"
    )]
    OtherSnapshot {
        /// The snapshot that it names.
        found: Uuid,
        /// The snapshot to use it with.
        expected: Uuid,
    },
    /// A run is empty.
    #[error("{part} of the profile holds an empty run at page {page:#x}; record it again")]
    EmptyRun {
        /// The part.
        part: &'static str,
        /// The run's first page.
        page: u64,
    },
    /// A page is beyond guest memory.
    #[error(
        "{part} of the profile names page {page:#x}, guest memory has {pages:#x} pages; record it again"
    )]
    Beyond {
        /// The part.
        part: &'static str,
        /// The page.
        page: u64,
        /// Pages of guest memory.
        pages: u64,
    },
    /// A page occurs twice or out of order.
    #[error("{part} of the profile names page {page:#x} twice, or out of order; record it again")]
    Repeated {
        /// The part.
        part: &'static str,
        /// The first such page.
        page: u64,
    },
}

impl Profile {
    /// The empty profile of a snapshot.
    #[must_use]
    pub fn of(snapshot: Uuid) -> Self {
        Self { snapshot, ..Self::default() }
    }

    /// Checks that the profile belongs to the snapshot with this id and that every part is valid
    /// for guest memory of `pages` pages. [`Snapshot::profile`](crate::Snapshot::profile) returns
    /// checked profiles.
    ///
    /// # Errors
    /// The first [`ProfileError`] found.
    pub fn check(&self, snapshot: Uuid, pages: u64) -> Result<(), ProfileError> {
        if self.snapshot != snapshot {
            return Err(ProfileError::OtherSnapshot { found: self.snapshot, expected: snapshot });
        }
        let runs = |part, runs: &Option<Vec<PageRange>>, ascending| {
            runs.as_ref().map_or(Ok(()), |runs| check_runs(part, runs.iter(), pages, ascending))
        };
        runs("the fault order", &self.faults, false)?;
        runs("the write set", &self.written, true)?;
        runs("the free set", &self.free, true)?;
        runs("the reported set", &self.reported, true)?;
        runs("the set of small leaves", &self.small_leaves, true)?;
        if let Some(groups) = &self.groups {
            check_runs("the working-set groups", groups.iter().flatten(), pages, false)?;
        }
        if let Some(cached) = &self.cached {
            let runs = cached.iter().map(|cached| &cached.run);
            check_runs("the order of the page cache", runs, pages, false)?;
        }
        Ok(())
    }
}

/// Checks that no run is empty, that all are within `pages` pages, and that no page occurs twice.
pub(crate) fn check_runs<'a>(
    part: &'static str,
    runs: impl Iterator<Item = &'a PageRange>,
    pages: u64,
    ascending: bool,
) -> Result<(), ProfileError> {
    let mut seen = PageSet::new(pages);
    let mut end = 0;
    for run in runs {
        let page = run.first;
        if run.pages == 0 {
            return Err(ProfileError::EmptyRun { part, page });
        }
        let range = run.range();
        if range.end > pages {
            return Err(ProfileError::Beyond { part, page: range.end - 1, pages });
        }
        let repeated = seen.ranges_in(range.clone()).next();
        if let Some(repeated) = repeated {
            return Err(ProfileError::Repeated { part, page: repeated.start });
        }
        if ascending && page < end {
            return Err(ProfileError::Repeated { part, page });
        }
        end = range.end;
        seen.insert_range(range);
    }
    Ok(())
}

/// Fingerprint of the profile's fields, in order and recursively, for each profile version with
/// fields.
const SCHEMAS: [(u32, u64); 2] = [(2, 0x46072a3e074b99ca), (3, 0xda164fdec57d1cbd)];

const _: () = {
    let (version, fingerprint) = SCHEMAS[SCHEMAS.len() - 1];
    assert!(version == PROFILE_VERSION, "add a line to SCHEMAS for the new profile version");
    assert!(
        fingerprint == u64::from_le_bytes(hash_ty_path::<Profile>("firn profile")),
        "the profile's fields changed: raise PROFILE_VERSION, keep a reader for the old version, \
         add a golden snapshot, and add the new fingerprint to SCHEMAS"
    );
};

#[cfg(test)]
#[path = "profile_tests.rs"]
mod tests;
