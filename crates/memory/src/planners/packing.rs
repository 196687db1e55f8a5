//! Files that planners have packed from an image.

use std::path::Path;

use firn_base::PageRange;
use firn_snapshot::{AttachError, OpenError, PackedFile, Snapshot, recipe_of};
use serde::Serialize;
use thiserror::Error;

use super::{HostFacts, HostFactsError, ImageFacts, PlanInput, Planner, PlannerError};

/// What goes into a packed file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packing {
    /// The file.
    pub file: PackedFile,
    /// Which pages, in which order.
    pub runs: Vec<PageRange>,
    /// How many runs they were before neighbours were merged.
    pub runs_before_merging: u64,
    /// What decided it: the part of the profile and the options, by [`recipe_of`].
    pub recipe: u64,
}

/// What was packed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PackReport {
    /// The planner that it is for, with its options.
    pub planner: String,
    /// The file.
    pub file: PackedFile,
    /// Runs of pages in it.
    pub runs: u64,
    /// How many they were before neighbours were merged.
    pub runs_before_merging: u64,
    /// Pages in it.
    pub pages: u64,
    /// Whether the file was there already, packed from the same.
    pub was_there: bool,
}

/// Why nothing was packed. The snapshot is as it was.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PackError {
    /// The snapshot or its profile is refused.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The host could not be examined.
    #[error(transparent)]
    Host(#[from] HostFactsError),
    /// How the image is stored could not be found out.
    #[error("reading how the snapshot's image is stored")]
    Image(#[source] std::io::Error),
    /// The planner lacks something.
    #[error(transparent)]
    Planner(#[from] PlannerError),
    /// The file could not be written.
    #[error(transparent)]
    Write(#[from] AttachError),
}

/// Packs the file that a planner maps, from the image of the snapshot at `path` and by its profile; `None` for a planner
/// without one. A file that was packed from the same stays.
///
/// # Errors
///
/// [`PackError`].
pub fn pack(path: &Path, planner: &dyn Planner) -> Result<Option<PackReport>, PackError> {
    let snapshot = Snapshot::open(path)?;
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
    // One that is damaged is not there.
    let packed = snapshot.packed(file).ok().flatten();
    let was_there = packed.is_some_and(|packed| packed.recipe() == recipe);
    if !was_there {
        firn_snapshot::pack(path, file, recipe, &runs)?;
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

/// [`recipe_of`]; what is packed of a profile that cannot be encoded is never found again.
pub(super) fn recipe(by: &impl Serialize) -> u64 {
    recipe_of(by).unwrap_or(u64::MAX)
}
