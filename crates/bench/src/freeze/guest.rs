//! The guest of a freeze: a player with used and untouched pages.

use firn_base::PAGE_SIZE;
use firn_memory::Leaf;
use firn_memory::trace::{Access, GapUnit, Touch, Toucher, Trace, TraceError, TraceOrigin};
use firn_snapshot::{LayoutError, MemoryLayout, PageSet};
use thiserror::Error;

use crate::player::{PlayerInputs, PlayerInputsError};
use crate::traces::NamedTrace;

/// Used pages in a row. The traces hello, json and pyaes have runs of 82 to 86 pages in the mean.
const RUN: u64 = 64;

/// Why there is no guest of these sizes.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum GuestError {
    /// The used memory is not a part of guest memory.
    #[error(
        "{used} bytes cannot be in use of {memory} bytes of guest memory: use 1 page to all of it"
    )]
    Used {
        /// Bytes in use.
        used: u64,
        /// Bytes of guest memory.
        memory: u64,
    },
    /// Guest memory cannot have that size.
    #[error("guest memory cannot have {memory} bytes")]
    Layout {
        /// Bytes of guest memory.
        memory: u64,
        /// The reason.
        source: LayoutError,
    },
    /// The touches are not a valid trace: a defect.
    #[error("cannot generate the guest's touches")]
    Touches(#[from] TraceError),
    /// The player refuses the trace: a defect.
    #[error(transparent)]
    Inputs(#[from] PlayerInputsError),
}

/// A player of `memory` bytes, of which `used` have content, in runs that are spread evenly.
pub(super) fn inputs(memory: u64, used: u64) -> Result<PlayerInputs, GuestError> {
    let layout =
        MemoryLayout::for_size(memory).map_err(|source| GuestError::Layout { memory, source })?;
    let (pages, in_use) = (layout.pages(), used / PAGE_SIZE);
    if !(1..=pages).contains(&in_use) {
        return Err(GuestError::Used { used, memory });
    }
    let mut content = PageSet::new(pages);
    let runs = in_use.div_ceil(RUN);
    for run in 0..runs {
        // The last run may be shorter.
        let len = RUN.min(in_use - run * RUN);
        let begin = (pages - in_use) * run / runs + run * RUN;
        content.insert_range(begin..begin + len);
    }
    let mut zero_map = PageSet::new(pages);
    content.gaps().for_each(|gap| zero_map.insert_range(gap));
    let mut touches = Vec::new();
    for region in layout.regions() {
        let image = region.image_pages();
        let first = region.guest_addr / PAGE_SIZE;
        for page in content.ranges_in(image.clone()).flatten() {
            touches.push(Touch {
                page: first + (page - image.start),
                access: Access::Write,
                by: Toucher::Instruction,
                leaf: Leaf::Size4K,
                gap: 0,
            });
        }
    }
    let name = format!("freeze:{used}-of-{memory}");
    let origin = TraceOrigin {
        function: name.clone(),
        input: String::new(),
        command: "firn bench freeze".to_owned(),
        host: "generated, not recorded".to_owned(),
        gaps: GapUnit::Instructions,
    };
    let trace = Trace::new(origin, layout, zero_map, touches)?;
    Ok(PlayerInputs::new(vec![NamedTrace { name, trace }])?)
}
