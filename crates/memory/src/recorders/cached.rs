//! The part `cached` of a profile: which pages of the image entered the page cache, and when
//! (SnapBPF, 3.1).
//!
//! The run uses `firecracker:readahead=off` on a cold page cache, so that only pages that the guest
//! touches enter. A BPF program records when each page enters. The pages are grouped into
//! contiguous ranges, sorted by the earliest access of any of their pages.

use firn_base::{PageRange, now_ns};
use firn_snapshot::{CachedRun, PageSet, Profile, Snapshot};

use super::profile::{check, evict_image, image_file};
use super::{PageCacheRecorder, Part, ProfileRecordError};
use crate::bpf::{Capture, Entered, Hook};
use firn_base::num::usize_of;

/// Records the part `cached`.
#[derive(Debug, Default)]
pub(crate) struct Cached {
    hook: Option<Hook>,
    capture: Option<Capture>,
    /// When the vCPUs started to run, ns of CLOCK_MONOTONIC.
    begun_ns: u64,
}

impl PageCacheRecorder for Cached {
    fn part(&self) -> Part {
        Part::Cache
    }

    fn planner(&self) -> &'static str {
        "firecracker:readahead=off"
    }

    fn prepare(&mut self, snapshot: &Snapshot) -> Result<(), ProfileRecordError> {
        let image = image_file(snapshot, Part::Cache)?;
        check(snapshot)?;
        evict_image(snapshot, image)?;
        let hook = Hook::find(image)?;
        // Finding the hook may have cached a page.
        evict_image(snapshot, image)?;
        // Includes the pages that the restore of the devices touches: every start needs them.
        let pages = snapshot.manifest().layout.pages();
        self.capture = Some(Capture::start(&hook, image, pages)?);
        self.hook = Some(hook);
        Ok(())
    }

    fn watches_at(&self) -> Option<String> {
        self.hook.as_ref().map(Hook::to_string)
    }

    fn begin(&mut self, _: &Snapshot, _: u32) -> Result<(), ProfileRecordError> {
        self.begun_ns = now_ns();
        Ok(())
    }

    fn end(&mut self) {
        if let Some(capture) = &mut self.capture {
            capture.stop();
        }
    }

    fn finish(mut self: Box<Self>, profile: &mut Profile) -> Result<(), ProfileRecordError> {
        self.end();
        if let Some(capture) = self.capture {
            profile.cached = Some(ranges(&capture.entered()?, self.begun_ns));
        }
        Ok(())
    }
}

/// Contiguous ranges of the pages that entered, sorted by the earliest time of any page of a range.
fn ranges(entered: &[Option<Entered>], begun_ns: u64) -> Vec<CachedRun> {
    let pages = entered.len() as u64;
    // The pages of a large folio entered with its first.
    let mut all = PageSet::new(pages);
    for (first, entered) in (0..).zip(entered) {
        if let Some(entered) = entered {
            all.insert_range(first..first.saturating_add(entered.pages).min(pages));
        }
    }
    let earliest = |run: &PageRange| {
        let of_run = &entered[usize_of(run.range().start)..usize_of(run.range().end)];
        of_run.iter().flatten().map(|entered| entered.at_ns).min().unwrap_or(0)
    };
    let ranges = all.ranges().map(PageRange::from);
    let mut ranges: Vec<(u64, PageRange)> = ranges.map(|run| (earliest(&run), run)).collect();
    // Sorted by absolute time: in the profile all pages that entered before the vCPUs ran have the
    // time 0.
    ranges.sort_unstable_by_key(|(at_ns, run)| (*at_ns, run.first));
    let since = |at_ns: u64| at_ns.saturating_sub(begun_ns);
    ranges.into_iter().map(|(at_ns, run)| CachedRun { run, at_ns: since(at_ns) }).collect()
}

#[cfg(test)]
#[path = "cached_tests.rs"]
mod tests;
