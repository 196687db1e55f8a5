//! `firecracker`: the memory file is mapped privately, and every page is read on demand.
//!
//! Firecracker's own restore maps the memory file `MAP_PRIVATE | MAP_NORESERVE` and prefetches
//! nothing (PASS 3.2, "lazy loading"; FaaSnap 3.1, "Firecracker"). With the kernel's read-ahead on,
//! this is SnapBPF's Linux-RA; with it off, its Linux-NoRA (SnapBPF 4).

use firn_base::GuestRange;
use firn_snapshot::CopyTable;

use super::{PlanInput, Planner, PlannerError};
use crate::plan::{Advice, Integrity, Layer, Leaf, Plan, Segment, Sharing, Source};

/// The planner `firecracker`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Firecracker {
    /// Whether the kernel may read ahead on a fault (`readahead=on|off`, on by default). Off is
    /// `MADV_RANDOM`.
    pub(crate) readahead: bool,
}

impl Planner for Firecracker {
    fn name(&self) -> String {
        format!("firecracker:readahead={}", if self.readahead { "on" } else { "off" })
    }

    /// One segment and one layer for each region of guest memory, whatever its size.
    fn plan(&self, input: &PlanInput<'_>) -> Result<Plan, PlannerError> {
        if input.image.extent.is_some() {
            return Err(PlannerError::NoFile { planner: self.name() });
        }
        let advice = if self.readahead { Advice::Normal } else { Advice::Random };
        let (segments, layers) = input
            .layout
            .regions()
            .map(|region| {
                let guest = GuestRange::from(region.guest_range());
                let source = Source::Image { offset: region.image_offset };
                let sharing = Sharing::PrivateCow;
                let leaf = Leaf::Size4K;
                let integrity = Integrity::of_file(input.image.protected);
                (
                    Segment { guest, source, sharing, leaf, integrity },
                    Layer { guest, source, sharing, advice },
                )
            })
            .unzip();
        Ok(Plan {
            planner: self.name(),
            layout: input.layout.clone(),
            copies: CopyTable::default(),
            populated: Vec::new(),
            segments,
            layers,
            schedule: Vec::new(),
            pager: None,
        })
    }
}
