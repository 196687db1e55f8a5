//! A planner's plan without its preload, for an image that is already in the page cache.

use super::{Packing, PlanInput, Planner, PlannerError, Store};
use crate::copy_ahead::Rule;
use crate::plan::Plan;

/// Another planner's plan, without the steps that preload the image. A measurement preloads the
/// image before its clock starts, once for all microVMs of a snapshot.
pub struct Preloaded(pub Box<dyn Planner>);

impl Planner for Preloaded {
    /// The name of the other planner.
    fn name(&self) -> String {
        self.0.name()
    }

    fn store(&self) -> Store {
        self.0.store()
    }

    fn uses_profile(&self) -> bool {
        self.0.uses_profile()
    }

    fn packing(&self, input: &PlanInput<'_>) -> Result<Option<Packing>, PlannerError> {
        self.0.packing(input)
    }

    fn copy_rule(&self) -> Option<Rule> {
        self.0.copy_rule()
    }

    fn plan(&self, input: &PlanInput<'_>) -> Result<Plan, PlannerError> {
        let mut plan = self.0.plan(input)?;
        plan.schedule.retain(|step| !step.work.is_preload());
        Ok(plan)
    }
}
