//! `vanilla_dax`: the memory file on a DAX file system, mapped privately, and every page on demand.
//!
//! PASS's "Vanilla" (PASS 5.1): as [`firecracker`](super::Firecracker), but what a fault maps is the medium itself: the page cache holds none of
//! it. How large a leaf a DAX fault makes is the file system's affair: 2 MiB where the file lies so.

use super::{Firecracker, PlanInput, Planner, PlannerError};
use crate::plan::Plan;

/// The planner `vanilla_dax`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VanillaDax;

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
