//! `pass_shared`: one sealed extent of a pool serves many VMs.
//!
//! Beyond PASS, which gives each VM a region: every VM maps the same extent, reads go straight to it, and the kernel copies
//! what a VM writes, 4 KiB at a time where the medium allows. Nobody has a writable mapping of the sealed bytes.

use super::pass::whole_extent;
use super::{PlanInput, Planner, PlannerError, Store};
use crate::plan::{Plan, Sharing};

/// The planner `pass_shared`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassShared;

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
        if !extent.private {
            return Err(PlannerError::NoPrivateMappings { planner });
        }
        Ok(whole_extent(planner, input, extent, Sharing::PrivateCow))
    }
}
