//! `dram_cached`: the memory file is read into the page cache before the start, then mapped as by
//! `firecracker`.
//!
//! The papers' reference point: no reads from storage remain, only minor faults that map cached
//! pages (FaaSnap 3.1 and 3.3, "Cached"; PASS 2.2, "DRAM-cached", whose footprint is the whole
//! memory file).

use firn_base::ImageRange;

use super::{Firecracker, PlanInput, Planner, PlannerError};
use crate::plan::{Plan, Step, When, Work};

/// The planner `dram_cached`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DramCached;

impl Planner for DramCached {
    fn name(&self) -> String {
        "dram_cached".to_owned()
    }

    /// The plan of [`Firecracker`], with one step that preloads the image.
    fn plan(&self, input: &PlanInput<'_>) -> Result<Plan, PlannerError> {
        if input.image.extent.is_some() {
            return Err(PlannerError::NoFile { planner: self.name() });
        }
        let (needed, total) = (input.image.stored, input.host.memory_total);
        if needed > total {
            return Err(PlannerError::TooLittleMemory { planner: self.name(), needed, total });
        }
        let image = ImageRange { offset: 0, len: input.layout.total_bytes() };
        Ok(Plan {
            planner: self.name(),
            schedule: vec![Step { when: When::BeforeResume, work: Work::Preload { image } }],
            ..Firecracker { readahead: true }.plan(input)?
        })
    }
}
