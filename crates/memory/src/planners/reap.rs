//! `reap`: the working set of earlier runs is installed before the guest runs; every other page is
//! served by userfaultfd.
//!
//! REAP (FaaSnap 2.5; SnapBPF 2.1) records the pages of an invocation in the order of their faults
//! and saves them in a compact working-set file. "In subsequent invocations, the working set pages
//! are prefetched and installed in the guest memory, reducing the number of later page faults and
//! disk reads. The working set pages […] can be fetched in a single batch read" (FaaSnap 2.5). REAP
//! "loads the entire working set file into memory immediately before executing the function"
//! (FaaSnap 3.1), and its "fetching process includes not only synchronously reading the working
//! set, but also installing the pages" (FaaSnap 6.4). So the step runs before the resume. The read
//! is direct and bypasses the page cache (SnapBPF 2.1). "Pages that are not in the working set
//! file" are handled "at user level" (FaaSnap 3.1), one by one, from the memory file.
//!
//! Difference to the papers: every page is checked against its digest. `granule` (1 by default, as
//! in the papers) is the number of pages that a fault fills.

use firn_base::{GuestRange, PageRange};
use firn_snapshot::{CopyTable, PackedFile};

use super::packing::{Packing, recipe};
use super::{PlanInput, Planner, PlannerError};
use crate::pager::PagerPolicy;
use crate::plan::{
    Advice, Integrity, Layer, Leaf, Plan, Segment, Sharing, Source, Step, When, Work,
};

/// The planner `reap`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reap {
    /// How faults outside the working set are served (`granule=`, a power of two up to 512; 1 by
    /// default).
    pub(crate) policy: PagerPolicy,
}

impl Planner for Reap {
    fn name(&self) -> String {
        format!("reap:granule={}", self.policy.granule())
    }

    fn uses_profile(&self) -> bool {
        true
    }

    /// One segment and one layer for each region of guest memory, and the step that installs the
    /// working set.
    fn plan(&self, input: &PlanInput<'_>) -> Result<Plan, PlannerError> {
        plan(input, self, self.policy)
    }

    /// The pages of the faults, in their order, with adjacent pages in one run.
    fn packing(&self, input: &PlanInput<'_>) -> Result<Option<Packing>, PlannerError> {
        let faults = faults(input, &self.name())?;
        let runs = merged(faults.iter().copied());
        Ok(Some(Packing {
            file: PackedFile::WorkingSet,
            runs,
            runs_before_merging: faults.len() as u64,
            recipe: recipe(&("reap", faults)),
        }))
    }
}

/// The faults of earlier runs.
pub(super) fn faults<'a>(
    input: &PlanInput<'a>,
    planner: &str,
) -> Result<&'a [PageRange], PlannerError> {
    let faults = input.profile.and_then(|profile| profile.faults.as_deref());
    faults.ok_or_else(|| PlannerError::NoProfile {
        planner: planner.to_owned(),
        part: "the order of faults",
        option: "faults",
    })
}

/// A plan in which the pager serves all guest memory, and the planner's working set is installed
/// first.
pub(super) fn plan(
    input: &PlanInput<'_>,
    by: &dyn Planner,
    policy: PagerPolicy,
) -> Result<Plan, PlannerError> {
    let planner = by.name();
    if input.image.extent.is_some() {
        return Err(PlannerError::NoFile { planner });
    }
    if !input.host.userfaultfd {
        return Err(PlannerError::NoUserfaultfd { planner });
    }
    let file = match by.packing(input)? {
        Some(packing) => check_packed(input, &planner, &packing)?,
        None => return Err(PlannerError::NoPackedFile { planner, file: "working set" }),
    };
    let (segments, layers) = input
        .layout
        .regions()
        .map(|region| {
            let guest = GuestRange::from(region.guest_range());
            let source = Source::Pager { offset: region.image_offset };
            let (sharing, leaf) = (Sharing::Exclusive, Leaf::Size4K);
            let integrity = Integrity::CheckedOnFill;
            (
                Segment { guest, source, sharing, leaf, integrity },
                Layer { guest, source, sharing, advice: Advice::Normal },
            )
        })
        .unzip();
    Ok(Plan {
        planner,
        layout: input.layout.clone(),
        segments,
        layers,
        schedule: vec![Step { when: When::BeforeResume, work: Work::Install { packed: file } }],
        pager: Some(policy.to_string()),
        copies: CopyTable::default(),
        populated: Vec::new(),
    })
}

/// Checks that the packed file exists and has the same recipe.
fn check_packed(
    input: &PlanInput<'_>,
    planner: &str,
    packing: &Packing,
) -> Result<PackedFile, PlannerError> {
    let (planner, file) = (planner.to_owned(), packing.file.name());
    let packed = input.snapshot.map(|snapshot| snapshot.packed(packing.file));
    match packed.transpose().map(Option::flatten) {
        Ok(Some(packed)) if packed.recipe() == packing.recipe => Ok(packing.file),
        Ok(Some(_)) => Err(PlannerError::OtherPackedFile { planner, file }),
        Ok(None) => Err(PlannerError::NoPackedFile { planner, file }),
        Err(error) => Err(PlannerError::PackedFile { planner, reason: error.to_string() }),
    }
}

/// Merges each run with the previous run where it starts at its end. The order is kept.
pub(super) fn merged(runs: impl Iterator<Item = PageRange>) -> Vec<PageRange> {
    let mut merged: Vec<PageRange> = Vec::new();
    for run in runs {
        match merged.last_mut() {
            Some(last) if last.range().end == run.first => last.pages += run.pages,
            _ => merged.push(run),
        }
    }
    merged
}
