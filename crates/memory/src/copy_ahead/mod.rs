//! Copies that exist before a microVM starts: what the planner `firn` runs
//! on.
//!
//! A pool's manager keeps copies of some pages of a sealed extent. A microVM maps its copy in place
//! of those pages and writes without a page fault. The manager stores copy sets under keys and
//! attaches no meaning to either. This module decides which pages a set holds:
//!
//! - a [`Rule`] selects granules from a recorded profile, and is the key of the set;
//! - a prediction starts with these granules and changes with what each run wrote. The manager
//!   stores its state;
//! - `cost` makes runs of pages of the expected granules;
//! - [`observe`] finds out what a run wrote.
//!
//! A start calls [`request_copy`] before it plans; after the run, [`learn`] updates the prediction.

mod cost;
mod observation;
mod prediction;
mod rule;

pub use observation::{ObserveError, WriteReport, observe};
pub use rule::{Granule, Rule};

use std::path::Path;

use firn_base::PageRange;
use firn_snapshot::{
    CHUNK_PAGES, Checks, ClientError, Copies, Grant, NoCopy, OpenError, OpenPooledError, PageSet,
    Profile, Snapshot, open_pooled,
};
use prediction::Prediction;
use thiserror::Error;

/// Why a start could not request a copy.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RequestCopyError {
    /// The pool's manager failed or refused.
    #[error(transparent)]
    Manager(#[from] ClientError),
    /// The profile, which selects the first copy set, cannot be read.
    #[error(transparent)]
    Profile(#[from] OpenError),
}

/// Takes a copy of the pages that a run is expected to write, where the pool's manager has one
/// ready: [`Grant::copies`] returns it then. The first request for a snapshot and a rule stores the
/// copy set that the snapshot's profile gives.
///
/// # Errors
///
/// [`RequestCopyError`]. A missing copy is not an error.
pub fn request_copy(
    snapshot: &Snapshot,
    grant: &mut Grant,
    rule: Rule,
) -> Result<(), RequestCopyError> {
    let rule = rule.for_medium(grant.extent().private);
    let key = rule.key();
    if grant.copies().is_some_and(|copies| copies.key == key) {
        return Ok(());
    }
    while !grant.take_copy(&key)? {
        let profile = snapshot.profile()?.unwrap_or_default();
        store_first(snapshot, grant, rule, &profile)?;
    }
    Ok(())
}

/// Whether the kernel should copy [`expected_pages`] before the guest runs, for want of a copy. Not
/// where the arena is full: pages that are only read would take DRAM beyond its limit.
pub(crate) fn lacks_copy(copies: &Copies) -> bool {
    matches!(copies.absent, Some(NoCopy::BeingMade | NoCopy::NoHugePages))
}

/// The image pages that a start without a copy expects to touch, as ascending runs: those of the
/// profile that are still expected. Without a profile they are the expected runs below the size of
/// a chunk.
///
/// They are single pages, unlike those of a copy: to copy a page takes 1.6 µs of the start here,
/// and KVM's fault, which the neighbours of a granule share, 3.
pub(crate) fn expected_pages(
    copies: &Copies,
    profile: Option<&Profile>,
    pages: u64,
) -> Vec<PageRange> {
    let Some(rule) = Rule::of_key(&copies.key) else { return Vec::new() };
    let Some(profile) = profile else {
        let runs = copies.expected.iter().copied();
        return runs.filter(|run| run.pages < CHUNK_PAGES).collect();
    };
    // The rule has expected the page's granule already.
    let rule = Rule { written: 1, granule: Granule::Size4K, ..rule };
    let expected = PageSet::of(&copies.expected, pages);
    let mut found = PageSet::new(pages);
    let profiled = rule.granules(profile).into_iter();
    profiled.filter(|page| expected.get(*page)).for_each(|page| found.insert(page));
    found.to_ranges()
}

/// Updates the prediction with the pages that a run wrote ([`WriteReport::written`]), for the next
/// runs by the same rule. Without a [requested](request_copy) copy, and by a rule that does not
/// learn, nothing is done.
///
/// # Errors
///
/// [`ClientError`]: the pool's manager failed. Later starts use the prediction without this run.
pub fn learn(
    snapshot: &Snapshot,
    grant: &mut Grant,
    written: &[PageRange],
) -> Result<(), ClientError> {
    let rule = grant.copies().and_then(|copies| Rule::of_key(&copies.key));
    let Some(rule) = rule.filter(|rule| rule.learn) else { return Ok(()) };
    let granules = rule.written_granules(written);
    let used = match snapshot.profile() {
        // Pages of a copy that are only read serve the run, although it does not write to them.
        Ok(Some(profile)) if rule.read > 0 => rule.with_read_granules(granules, &profile),
        _ => granules.into_iter().collect(),
    };
    let pages = snapshot.manifest().layout.pages();
    let unit = rule.granule.pages();
    let used = prediction::within(used, unit, pages);
    let key = rule.key();
    // The manager forgets sets that are not used; another run may store a newer prediction.
    while let Some((revision, state)) = grant.copy_set(&key)? {
        let mut prediction = Prediction::decode(&state).unwrap_or_default();
        prediction.observe(&used);
        let runs = rule.runs(&prediction.expected(unit), pages);
        if grant.store_copy_set(&key, Some(revision), &runs, prediction.encode())? {
            break;
        }
    }
    Ok(())
}

/// Has the pool's manager make copies by a new profile of the snapshot `name`, so that the next
/// start finds one ready. `checks` are those of its opening.
///
/// # Errors
///
/// [`OpenPooledError`]: copies are made at the first start instead.
pub fn prepare_copies<'a>(
    socket: &Path,
    name: &str,
    checks: impl Into<Checks<'a>>,
    rule: Rule,
    profile: &Profile,
) -> Result<(), OpenPooledError> {
    let (snapshot, mut grant) = open_pooled(socket, name, checks)?;
    let rule = rule.for_medium(grant.extent().private);
    store_first(&snapshot, &mut grant, rule, profile)?;
    Ok(())
}

/// Stores the copy set that a profile gives, unless there is a set already.
fn store_first(
    snapshot: &Snapshot,
    grant: &mut Grant,
    rule: Rule,
    profile: &Profile,
) -> Result<(), ClientError> {
    let pages = snapshot.manifest().layout.pages();
    let unit = rule.granule.pages();
    let prediction = Prediction::of(&prediction::within(rule.granules(profile), unit, pages));
    let runs = rule.runs(&prediction.expected(unit), pages);
    grant.store_copy_set(&rule.key(), None, &runs, prediction.encode())?;
    Ok(())
}
