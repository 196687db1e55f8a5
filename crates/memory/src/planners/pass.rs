//! `pass`: one extent of a pool for each VM, mapped shared, with a complete index before the start.
//!
//! PASS gives each VM a region of persistent memory of its own (PASS 3 and 4). Guest memory is the
//! region, without copies, page cache or file system. The complete address index is built before
//! the guest runs and lives as long as the VM. The region is a replica of the snapshot's extent,
//! because the run writes to it.

use firn_base::GuestRange;
use firn_snapshot::{CopyTable, ImageRegion, MemoryLayout};

use super::{ExtentFacts, PlanInput, Planner, PlannerError, Store};
use crate::plan::{
    Advice, Integrity, Layer, Leaf, Plan, Segment, Sharing, Source, Step, When, Work,
};

/// The planner `pass`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pass;

impl Planner for Pass {
    fn name(&self) -> String {
        "pass".to_owned()
    }

    fn store(&self) -> Store {
        Store::Replica
    }

    fn plan(&self, input: &PlanInput<'_>) -> Result<Plan, PlannerError> {
        let planner = self.name();
        let Some(extent) = input.image.extent else {
            return Err(PlannerError::NoExtent { planner });
        };
        if !extent.replica {
            return Err(PlannerError::NoReplica { planner });
        }
        let leaf = extent.leaf;
        // These media, devices and reserved huge pages, have no smaller mappings.
        if !extent.private && !in_whole(leaf, input.layout, extent) {
            let bytes = input.layout.total_bytes();
            return Err(PlannerError::PartOfLeaf { planner, leaf, bytes });
        }
        Ok(whole_extent(planner, input, extent, Sharing::Exclusive))
    }
}

/// Whether every region of guest memory in an extent is made of whole leaves.
pub(super) fn in_whole(leaf: Leaf, layout: &MemoryLayout, extent: ExtentFacts) -> bool {
    layout.regions().all(|region| {
        [region.guest_addr, region.len, extent.offset + region.image_offset]
            .iter()
            .all(|bytes| bytes.is_multiple_of(leaf.bytes()))
    })
}

/// The plan that maps an extent with one layer for each region of guest memory, and indexes all of
/// it before the resume.
pub(super) fn whole_extent(
    planner: String,
    input: &PlanInput<'_>,
    extent: ExtentFacts,
    sharing: Sharing,
) -> Plan {
    let mut plan = Plan {
        planner,
        layout: input.layout.clone(),
        copies: CopyTable::default(),
        populated: Vec::new(),
        segments: Vec::new(),
        layers: Vec::new(),
        schedule: Vec::new(),
        pager: None,
    };
    for region in input.layout.regions() {
        let guest = GuestRange::from(region.guest_range());
        let source = Source::Extent { offset: extent.offset + region.image_offset };
        plan.segments.extend(segments(region, extent, sharing));
        plan.layers.push(Layer { guest, source, sharing, advice: Advice::Normal });
        plan.schedule.push(Step { when: When::BeforeResume, work: Work::Index { guest } });
    }
    plan
}

/// A region, or a part of one, at the largest leaf that fits; the remainder at its end at 4 KiB.
pub(super) fn segments(
    region: ImageRegion,
    extent: ExtentFacts,
    sharing: Sharing,
) -> impl Iterator<Item = Segment> {
    let offset = extent.offset + region.image_offset;
    let mut large = [Leaf::Size1G, Leaf::Size2M].into_iter().filter(|leaf| *leaf <= extent.leaf);
    let fits = |leaf: &Leaf| {
        [region.guest_addr, offset].iter().all(|start| start.is_multiple_of(leaf.bytes()))
            && region.len >= leaf.bytes()
    };
    let leaf = large.find(fits).unwrap_or(Leaf::Size4K);
    let whole = region.len - region.len % leaf.bytes();
    let integrity = if extent.checked { Integrity::CheckedAtSeal } else { Integrity::Unchecked };
    let start = region.guest_addr;
    [(0, whole, leaf), (whole, region.len - whole, Leaf::Size4K)]
        .into_iter()
        .filter(|(_, len, _)| *len > 0)
        .map(move |(at, len, leaf)| Segment {
            guest: GuestRange { start: start + at, len },
            source: Source::Extent { offset: offset + at },
            sharing,
            leaf,
            integrity,
        })
}
