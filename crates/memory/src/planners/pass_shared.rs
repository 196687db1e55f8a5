//! `pass_shared`: one sealed extent of a pool serves many VMs.
//!
//! It extends PASS, which gives each VM a region. Every VM maps the same extent and reads from it
//! directly. Pages that a VM writes are copied: by the kernel at 4 KiB where the medium supports
//! private mappings, otherwise by the monitor in chunks of 2 MiB. No process has a writable mapping
//! of the sealed bytes.

use super::pass::{in_whole, whole_extent};
use super::{ExtentFacts, PlanInput, Planner, PlannerError, Store};
use crate::plan::{Leaf, Plan, Sharing};

/// The planner `pass_shared`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PassShared;

impl Planner for PassShared {
    fn name(&self) -> String {
        "pass_shared".to_owned()
    }

    fn store(&self) -> Store {
        Store::Extent
    }

    fn plan(&self, input: &PlanInput<'_>) -> Result<Plan, PlannerError> {
        let planner = self.name();
        let Some(extent) = input.image.extent else {
            return Err(PlannerError::NoExtent { planner });
        };
        let sharing = sharing(&planner, input, extent)?;
        Ok(whole_extent(planner, input, extent, sharing))
    }
}

/// The sharing of a sealed extent on its medium.
pub(super) fn sharing(
    planner: &str,
    input: &PlanInput<'_>,
    extent: ExtentFacts,
) -> Result<Sharing, PlannerError> {
    let sharing = if extent.private { Sharing::PrivateCow } else { Sharing::Shared };
    // The monitor replaces a chunk of 2 MiB by a copy.
    let has_chunks = || extent.leaf <= Leaf::Size2M && in_whole(Leaf::Size2M, input.layout, extent);
    if sharing == Sharing::Shared && !has_chunks() {
        return Err(PlannerError::NoChunks { planner: planner.to_owned(), leaf: extent.leaf });
    }
    Ok(sharing)
}
