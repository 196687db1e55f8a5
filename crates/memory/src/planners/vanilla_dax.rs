//! `vanilla_dax`: the memory file is on a DAX file system and mapped privately, every page on
//! demand.
//!
//! PASS's "Vanilla" (PASS 5.1): as [`firecracker`](super::Firecracker), but a fault maps the medium
//! itself, without the page cache. The file system chooses the leaf of a DAX fault: 2 MiB where the
//! file's extents are aligned.

use super::{Firecracker, PlanInput, Planner, PlannerError};
use crate::plan::Plan;

/// The planner `vanilla_dax`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VanillaDax;

impl Planner for VanillaDax {
    fn name(&self) -> String {
        "vanilla_dax".to_owned()
    }

    fn plan(&self, input: &PlanInput<'_>) -> Result<Plan, PlannerError> {
        let planner = self.name();
        if input.image.extent.is_some() {
            return Err(PlannerError::NoFile { planner });
        }
        if !input.image.dax {
            return Err(PlannerError::NoDax { planner });
        }
        let plan = Firecracker { readahead: true }.plan(input)?;
        Ok(Plan { planner, ..plan })
    }
}
