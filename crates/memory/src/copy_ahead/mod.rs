//! Copies that exist before a microVM starts: what the planner `firn` runs
//! on.
//!
//! A pool's manager keeps copies of some chunks (2 MiB) of a sealed extent. A microVM maps its copy
//! in place of those chunks and writes without a page fault. The manager stores chunk sets under
//! keys and attaches no meaning to either. This module decides which chunks a set holds:
//!
//! - a [`Rule`] selects chunks from a recorded profile, and is the key of the set;
//! - a prediction starts with these chunks and changes with what each run wrote. The manager stores
//!   its state;
//! - [`observe`] finds out what a run wrote.
//!
//! A start calls [`request_copy`] before it plans; after the run, [`learn`] updates the prediction.

mod observation;
mod prediction;
mod rule;

pub use observation::{ObserveError, WriteReport, observe};
pub use rule::Rule;

use std::path::Path;

use firn_base::PageRange;
use firn_snapshot::{
    ClientError, Grant, OpenError, OpenPooledError, Profile, Snapshot, Verify, open_pooled,
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
    /// The profile, which selects the first chunk set, cannot be read.
    #[error(transparent)]
    Profile(#[from] OpenError),
}

/// Takes a copy of the chunks that a run is expected to write, where the pool's manager has one
/// ready: [`Grant::copies`] returns it then. The first request for a snapshot and a rule stores the
/// chunk set that the snapshot's profile gives. Without a copy the kernel copies page by page.
///
/// # Errors
///
/// [`RequestCopyError`]. A missing copy is not an error.
pub fn request_copy(
    snapshot: &Snapshot,
    grant: &mut Grant,
    rule: Rule,
) -> Result<(), RequestCopyError> {
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

/// Updates the prediction with the chunks that a run wrote ([`WriteReport::written`]), for the next
/// runs by the same rule. Without a [requested](request_copy) copy nothing is done.
///
/// # Errors
///
/// [`ClientError`]: the pool's manager failed. Later starts use the prediction without this run.
pub fn learn(
    snapshot: &Snapshot,
    grant: &mut Grant,
    written: &[PageRange],
) -> Result<(), ClientError> {
    let Some(rule) = grant.copies().and_then(|copies| Rule::of_key(&copies.key)) else {
        return Ok(());
    };
    let pages = snapshot.manifest().layout.pages();
    let used = match snapshot.profile() {
        // The copy of a chunk that is mostly read serves the run, although the run does not write
        // to it.
        Ok(Some(profile)) if rule.read > 0 => rule.with_read_chunks(written, &profile, pages),
        _ => written.to_vec(),
    };
    let key = rule.key();
    // The manager forgets sets that are not used; another run may store a newer prediction.
    while let Some((revision, state)) = grant.chunk_set(&key)? {
        let mut prediction = Prediction::decode(&state).unwrap_or_default();
        prediction.observe(&prediction::chunks_of(&used, pages));
        if grant.set_chunks(&key, Some(revision), &prediction.expected(), prediction.encode())? {
            break;
        }
    }
    Ok(())
}

/// Has the pool's manager make copies by a new profile of the snapshot `name`, so that the next
/// start finds one ready.
///
/// # Errors
///
/// [`OpenPooledError`]: copies are made at the first start instead.
pub fn prepare_copies(
    socket: &Path,
    name: &str,
    rule: Rule,
    profile: &Profile,
) -> Result<(), OpenPooledError> {
    let (snapshot, mut grant) = open_pooled(socket, name, Verify::Never)?;
    store_first(&snapshot, &mut grant, rule, profile)?;
    Ok(())
}

/// Stores the chunk set that a profile gives, unless there is a set already.
fn store_first(
    snapshot: &Snapshot,
    grant: &mut Grant,
    rule: Rule,
    profile: &Profile,
) -> Result<(), ClientError> {
    let pages = snapshot.manifest().layout.pages();
    let prediction = Prediction::of(&prediction::chunks_of(&rule.chunks(profile), pages));
    grant.set_chunks(&rule.key(), None, &prediction.expected(), prediction.encode())?;
    Ok(())
}
