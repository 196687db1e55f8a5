//! Planners: each makes a plan for a snapshot by the rules of one system.

mod dram_cached;
mod error;
mod faasnap;
mod faast;
mod facts;
mod firecracker;
mod firn;
mod packing;
mod pass;
mod pass_shared;
mod preloaded;
mod reap;
mod registry;
mod snapbpf;
mod vanilla_dax;

pub(crate) use dram_cached::DramCached;
pub use error::PlannerError;
pub use faasnap::FaaSnap;
pub(crate) use faast::Faast;
pub use facts::{ExtentFacts, ImageFacts};
pub(crate) use firecracker::Firecracker;
pub(crate) use firn::Firn;
#[cfg(test)]
pub(crate) use firn::plan as firn_plan;
pub use packing::{PackError, PackReport, Packing, pack, pack_signed};
pub(crate) use pass::Pass;
pub(crate) use pass_shared::PassShared;
pub use preloaded::Preloaded;
pub(crate) use reap::Reap;
pub use registry::{ParsePlannerError, Selection, parse, select, split_list};
pub(crate) use snapbpf::{Prefetch, SnapBpf};
pub(crate) use vanilla_dax::VanillaDax;

use std::io;
use std::path::PathBuf;

use firn_snapshot::{Copies, Grant, MemoryLayout, OpenError, PageSet, Profile, Snapshot};
use thiserror::Error;

use crate::copy_ahead::{Rule, lacks_copy};
use crate::host_facts::{HostFacts, HostFactsError};
use crate::plan::Plan;

/// The input of a planner.
#[derive(Clone, Copy, Debug)]
pub struct PlanInput<'a> {
    /// The guest memory to restore.
    pub layout: &'a MemoryLayout,
    /// The image.
    pub image: ImageFacts,
    /// The pages of the image that are all zero.
    pub zero_map: &'a PageSet,
    /// The profile of earlier runs, for a planner that [uses](Planner::uses_profile) it, or that
    /// found no copy.
    pub profile: Option<&'a Profile>,
    /// The snapshot, for a planner that needs a packed file ([`Snapshot::packed`]).
    pub snapshot: Option<&'a Snapshot>,
    /// The copies that a pool made for the run, for a planner that requests them.
    pub copies: Option<&'a Copies>,
    /// This host.
    pub host: &'a HostFacts,
}

/// Mappings that are reserved for the rest of the process, and for pages that the guest discards.
const SPARE_MAPPINGS: u64 = 20_000;

/// Checks that this process may have the mappings of a plan. The kernel's limit applies at any
/// time, even where a later layer replaces many mappings, as a merged region of a loading set does.
fn check_mappings(plan: &Plan, host: &HostFacts) -> Result<(), PlannerError> {
    let needed = plan.most_mappings();
    let limit = host.max_mappings.saturating_sub(SPARE_MAPPINGS);
    if needed > limit {
        let planner = plan.planner.clone();
        return Err(PlannerError::TooManyMappings { planner, needed, limit });
    }
    Ok(())
}

/// Why there is no plan for a snapshot.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PlanSnapshotError {
    /// The facts about the host could not be read.
    #[error(transparent)]
    Host(#[from] HostFactsError),
    /// The facts about the image could not be read.
    #[error("cannot examine the image of {}", .path.display())]
    Image {
        /// The snapshot.
        path: PathBuf,
        /// The error of the system call.
        source: io::Error,
    },
    /// The profile is not valid.
    #[error(transparent)]
    Profile(#[from] OpenError),
    /// The planner returns none.
    #[error(transparent)]
    Planner(#[from] PlannerError),
}

/// Makes the plan for an open snapshot on this host. A snapshot in a pool needs a
/// `grant`.
///
/// # Errors
///
/// [`PlanSnapshotError`].
pub fn plan(
    snapshot: &Snapshot,
    grant: Option<&Grant>,
    planner: &dyn Planner,
) -> Result<Plan, PlanSnapshotError> {
    let copies = grant.and_then(Grant::copies);
    let profile = if planner.uses_profile() {
        snapshot.profile()?
    } else if copies.is_some_and(lacks_copy) {
        // Without it the guest has more page faults.
        snapshot.profile().unwrap_or_default()
    } else {
        None
    };
    let image = ImageFacts::of_snapshot(snapshot, grant)
        .map_err(|source| PlanSnapshotError::Image { path: snapshot.path().to_owned(), source })?;
    Ok(planner.plan(&PlanInput {
        layout: &snapshot.manifest().layout,
        image,
        zero_map: snapshot.zero_map(),
        profile: profile.as_ref(),
        snapshot: Some(snapshot),
        copies,
        host: HostFacts::of_process()?,
    })?)
}

/// Where a planner maps guest memory from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// The image file of a snapshot in a directory.
    Directory,
    /// The sealed extent of a snapshot in a pool.
    Extent,
    /// A replica of such an extent.
    Replica,
}

/// Makes plans by the rules of one system.
pub trait Planner: Send + Sync {
    /// The name with its options, as on the command line: `firecracker:readahead=off`.
    fn name(&self) -> String;

    /// Where it maps guest memory from.
    fn store(&self) -> Store {
        Store::Directory
    }

    /// Whether its plans need the snapshot's profile.
    fn uses_profile(&self) -> bool {
        false
    }

    /// Whether a recorded profile affects a start: the plan, or the copies that are made ahead.
    fn learns(&self) -> bool {
        self.uses_profile() || self.copy_rule().is_some()
    }

    /// Whether its plans leave ranges of the image to a BPF program, which the process that starts
    /// the microVM attaches ([`Prefetch`](crate::Prefetch)).
    fn has_program(&self) -> bool {
        false
    }

    /// The contents of the file that is packed for its plans; `None` for a planner without a packed
    /// file.
    ///
    /// # Errors
    ///
    /// [`PlannerError`] when the profile lacks a required part.
    fn packing(&self, _input: &PlanInput<'_>) -> Result<Option<Packing>, PlannerError> {
        Ok(None)
    }

    /// Which chunks of 2 MiB are copied ahead, for a planner that runs on copies:
    /// [`request_copy`](crate::copy_ahead::request_copy) is called before the plan is made.
    fn copy_rule(&self) -> Option<Rule> {
        None
    }

    /// Makes the plan for a snapshot on this host. The plan is valid.
    ///
    /// # Errors
    ///
    /// [`PlannerError`] when this planner cannot restore this snapshot on this host.
    fn plan(&self, input: &PlanInput<'_>) -> Result<Plan, PlannerError>;
}

#[cfg(test)]
mod tests;
