//! Memory that a pager serves.

use firn_base::GuestRange;
use firn_snapshot::Snapshot;

use crate::guest_memory::GuestMemory;
use crate::pager::{Area, OnFailure, PageStore, Pager, PagerError, PagerJob, PagerPolicy};
use crate::plan::{Plan, Source};
use crate::uffd::{Features, RegisterMode, Uffd};

/// Starts a pager for the segments of a plan that have one as their source. The plan's layers are
/// mapped.
pub(super) fn start_pager(
    memory: &GuestMemory,
    plan: &Plan,
    snapshot: &Snapshot,
    on_failure: OnFailure,
) -> Result<Pager, PagerError> {
    let uffd = Uffd::open(Features::REMOVE)?;
    let mut ranges: Vec<GuestRange> = Vec::new();
    for segment in &plan.segments {
        let guest = segment.guest;
        if !matches!(segment.source, Source::Pager { .. }) {
            continue;
        }
        match ranges.last_mut() {
            // The next region lies elsewhere in this process.
            Some(last)
                if last.end() == guest.start && memory.is_one_piece(last.start, guest.start) =>
            {
                last.len += guest.len;
            }
            _ => ranges.push(guest),
        }
    }
    let mut areas = Vec::with_capacity(ranges.len());
    for range in ranges {
        let address = memory.register_range(range, &uffd, RegisterMode::MISSING)?;
        let image_offset = plan.layout.image_offset(range.start).unwrap_or_default();
        areas.push(Area { address, len: range.len, image_offset });
    }
    let policy = plan.pager.as_deref().and_then(PagerPolicy::parse).unwrap_or_default();
    let (store, pages) = (PageStore::of(snapshot), plan.layout.pages());
    Pager::start(PagerJob { uffd, areas, store, pages, policy, on_failure })
}
