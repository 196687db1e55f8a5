//! Files that are packed from an image for planners.

use std::path::Path;

use firn_base::PageRange;
use firn_snapshot::{AttachError, OpenError, PackedFile, Snapshot, Verifier, recipe_of};
use serde::Serialize;
use thiserror::Error;

use super::{HostFacts, HostFactsError, ImageFacts, PlanInput, Planner, PlannerError};

/// The contents of a packed file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packing {
    /// The file.
    pub file: PackedFile,
    /// The pages, in order.
    pub runs: Vec<PageRange>,
    /// The number of runs before merging.
    pub runs_before_merging: u64,
    /// The [`recipe_of`] the part of the profile and the options.
    pub recipe: u64,
}

/// The result of packing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PackReport {
    /// The planner, with its options.
    pub planner: String,
    /// The file.
    pub file: PackedFile,
    /// The number of runs of pages in it.
    pub runs: u64,
    /// The number of runs before merging.
    pub runs_before_merging: u64,
    /// The number of pages in it.
    pub pages: u64,
    /// Whether the file already existed with the same recipe.
    pub was_there: bool,
}

/// Why nothing was packed. The snapshot is unchanged.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PackError {
    /// The snapshot or its profile is not valid.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The facts about the host could not be read.
    #[error(transparent)]
    Host(#[from] HostFactsError),
    /// The facts about the image could not be read.
    #[error("cannot examine the snapshot's image")]
    Image(#[source] std::io::Error),
    /// The planner returns no packing.
    #[error(transparent)]
    Planner(#[from] PlannerError),
    /// The file could not be written.
    #[error(transparent)]
    Write(#[from] AttachError),
}

/// Packs the file that a planner maps, from the image and the profile of the snapshot at `path`.
/// Returns `None` for a planner without a packed file. A file with the same recipe is kept.
///
/// # Errors
///
/// [`PackError`].
pub fn pack(path: &Path, planner: &dyn Planner) -> Result<Option<PackReport>, PackError> {
    pack_signed(path, planner, None)
}

/// The same, if the verifier confirms the snapshot where there is one.
///
/// # Errors
///
/// [`PackError`].
pub fn pack_signed(
    path: &Path,
    planner: &dyn Planner,
    verifier: Option<&Verifier>,
) -> Result<Option<PackReport>, PackError> {
    let snapshot = Snapshot::open_signed(path, verifier)?;
    let profile = snapshot.profile()?;
    let input = PlanInput {
        layout: &snapshot.manifest().layout,
        image: ImageFacts::of_snapshot(&snapshot, None).map_err(PackError::Image)?,
        zero_map: snapshot.zero_map(),
        profile: profile.as_ref(),
        snapshot: Some(&snapshot),
        copies: None,
        host: &HostFacts::read()?,
    };
    let Some(Packing { file, runs, runs_before_merging, recipe }) = planner.packing(&input)? else {
        return Ok(None);
    };
    // A damaged file is packed anew.
    let packed = snapshot.packed(file).ok().flatten();
    let was_there = packed.is_some_and(|packed| packed.recipe() == recipe);
    if !was_there {
        firn_snapshot::pack(&snapshot, file, recipe, &runs)?;
    }
    Ok(Some(PackReport {
        planner: planner.name(),
        file,
        runs: runs.len() as u64,
        runs_before_merging,
        pages: runs.iter().map(|run| run.pages).sum(),
        was_there,
    }))
}

/// [`recipe_of`]; a file from a profile that cannot be encoded is never reused.
pub(super) fn recipe(by: &impl Serialize) -> u64 {
    recipe_of(by).unwrap_or(u64::MAX)
}
