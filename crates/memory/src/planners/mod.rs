//! Planners: each makes a plan of a snapshot, by one system's rules.

mod dram_cached;
mod faasnap;
mod faast;
mod firecracker;
mod firn;
mod packing;
mod pass;
mod pass_shared;
mod preloaded;
mod reap;
mod snapbpf;
mod vanilla_dax;
mod written;

pub use dram_cached::DramCached;
pub use faasnap::FaaSnap;
pub use faast::Faast;
pub use firecracker::Firecracker;
pub use firn::Firn;
#[cfg(test)]
pub(crate) use firn::plan as firn_plan;
pub use packing::{PackError, PackReport, Packing, pack};
pub use pass::Pass;
pub use pass_shared::PassShared;
pub use preloaded::Preloaded;
pub use reap::Reap;
pub use snapbpf::SnapBpf;
pub use vanilla_dax::VanillaDax;
pub use written::{ParsePlannerError, Selection, parse, select};

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use firn_snapshot::{Copies, Grant, MemoryLayout, OpenError, PageSet, Profile, Snapshot};
use rustix::fs::{AtFlags, StatxAttributes, StatxFlags, statx};
use serde::Serialize;
use thiserror::Error;

use crate::copy_ahead::Rule;
use crate::host_facts::{HostFacts, HostFactsError};
use crate::plan::{Leaf, Plan};

/// What is known of an image without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ImageFacts {
    /// Length in bytes.
    pub len: u64,
    /// Bytes that it takes on its medium: less than its length where it has holes.
    pub stored: u64,
    /// Whether it is a file of a DAX file system, which is mapped without a page cache (statx(2), `STATX_ATTR_DAX`).
    pub dax: bool,
    /// Where it lies in a pool, if it does; else it is a file.
    pub extent: Option<ExtentFacts>,
}

/// What is known of an extent that holds an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ExtentFacts {
    /// Where guest memory begins in the medium, in bytes.
    pub offset: u64,
    /// The largest leaf at which this host maps the medium.
    pub leaf: Leaf,
    /// Whether the kernel has private mappings of the medium: a device of persistent memory can only be shared.
    pub private: bool,
    /// Whether it is a replica, which belongs to one VM and is written by it.
    pub replica: bool,
    /// Whether its bytes were checked since the medium was opened.
    pub checked: bool,
}

impl ImageFacts {
    /// What is known of a snapshot's image: of the extent that a pool granted, or of the image file.
    ///
    /// # Errors
    ///
    /// The error of `fstat`, or [`NotFound`](io::ErrorKind::NotFound) for a snapshot in a pool
    /// without a grant.
    pub fn of_snapshot(snapshot: &Snapshot, grant: Option<&Grant>) -> io::Result<Self> {
        let Some(place) = grant.map(Grant::extent) else {
            let image = snapshot.image_file().ok_or_else(|| {
                io::Error::new(io::ErrorKind::NotFound, "the snapshot has no image file")
            })?;
            return Self::of(image);
        };
        let leaves = [Leaf::Size1G, Leaf::Size2M].into_iter();
        let extent = ExtentFacts {
            offset: place.offset,
            leaf: leaves.filter(|leaf| leaf.bytes() <= place.leaf).max().unwrap_or(Leaf::Size4K),
            private: place.private,
            replica: place.replica_of.is_some(),
            checked: place.checked,
        };
        Ok(Self::in_pool(snapshot.manifest().layout.total_bytes(), extent))
    }

    /// An image of `len` bytes in a pool.
    pub fn in_pool(len: u64, extent: ExtentFacts) -> Self {
        Self { len, stored: len, dax: false, extent: Some(extent) }
    }

    /// Asks the file system.
    ///
    /// # Errors
    ///
    /// What the kernel said to `fstat` or `statx`.
    pub fn of(image: &File) -> io::Result<Self> {
        let metadata = image.metadata()?;
        let found = statx(image, c"", AtFlags::EMPTY_PATH, StatxFlags::empty())?;
        let dax = found.stx_attributes.contains(StatxAttributes::DAX);
        // stat(2) counts blocks of 512 bytes, whatever the file system's own are.
        Ok(Self { len: metadata.len(), stored: metadata.blocks() * 512, dax, extent: None })
    }
}

/// What a planner makes a plan of.
#[derive(Clone, Copy, Debug)]
pub struct PlanInput<'a> {
    /// The guest memory to restore.
    pub layout: &'a MemoryLayout,
    /// The image.
    pub image: ImageFacts,
    /// The pages of the image that are all zero.
    pub zero_map: &'a PageSet,
    /// What earlier runs touched, for a planner that [uses](Planner::uses_profile) it.
    pub profile: Option<&'a Profile>,
    /// The snapshot itself, for a planner that needs a file packed beside its image ([`Snapshot::packed`]).
    pub snapshot: Option<&'a Snapshot>,
    /// The copies that a pool made for the run, for a planner that requests them.
    pub copies: Option<&'a Copies>,
    /// This host.
    pub host: &'a HostFacts,
}

/// Why a planner makes no plan.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PlannerError {
    /// The host has too little memory.
    #[error(
        "{planner} keeps the whole image in DRAM: {needed} bytes, but this host has {total}; \
         use a planner that pages on demand"
    )]
    TooLittleMemory {
        /// The planner, as written.
        planner: String,
        /// Bytes that the image takes.
        needed: u64,
        /// Bytes of DRAM.
        total: u64,
    },
    /// It pages from a file, and there is none.
    #[error(
        "{planner} pages from an image file, but this snapshot lies in a pool; \
         use pass or pass_shared, or freeze into a directory"
    )]
    NoFile {
        /// The planner, as written.
        planner: String,
    },
    /// This process may not serve page faults.
    #[error(
        "{planner} serves page faults by userfaultfd, which this process may not: run as root, or set the sysctl \
         vm.unprivileged_userfaultfd to 1"
    )]
    NoUserfaultfd {
        /// The planner, as written.
        planner: String,
    },
    /// It maps the medium itself, and the file system has a page cache between.
    #[error(
        "{planner} maps an image on a DAX file system, and this one is on another: put it on an ext4 or xfs that is mounted \
         with -o dax (statx(2) shows STATX_ATTR_DAX)"
    )]
    NoDax {
        /// The planner, as written.
        planner: String,
    },
    /// It maps an extent, and there is none.
    #[error(
        "{planner} maps the extent of a pool, but this snapshot is a directory; freeze it into a pool"
    )]
    NoExtent {
        /// The planner, as written.
        planner: String,
    },
    /// It writes to the extent, which is not its VM's own.
    #[error(
        "{planner} runs on a replica of its own, and was given the sealed extent: ask the pool for a replica"
    )]
    NoReplica {
        /// The planner, as written.
        planner: String,
    },
    /// A part of the profile is missing.
    #[error(
        "{planner} needs {part} in the snapshot's profile; record it with `firn profile record --part {option}`"
    )]
    NoProfile {
        /// The planner, as written.
        planner: String,
        /// The part, in words.
        part: &'static str,
        /// The part, as the command is given it.
        option: &'static str,
    },
    /// The file that was packed from the image is missing.
    #[error(
        "{planner} needs the snapshot's {file}; make it with `firn profile pack --planner {planner}`"
    )]
    NoPackedFile {
        /// The planner, as written.
        planner: String,
        /// The file's name.
        file: &'static str,
    },
    /// The packed file is refused.
    #[error(
        "{planner} cannot use the snapshot's packed file: {reason}; `firn profile pack --planner {planner}`"
    )]
    PackedFile {
        /// The planner, as written.
        planner: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The packed file was made from another profile, or with other options.
    #[error(
        "the snapshot's {file} was packed by another profile, or for other options, than {planner} has; \
         make it anew with `firn profile pack --planner {planner}`"
    )]
    OtherPackedFile {
        /// The planner, as written.
        planner: String,
        /// The file's name.
        file: &'static str,
    },
    /// More mappings than a process may have.
    #[error(
        "{planner} needs {needed} mappings, and {limit} can be had; raise vm.max_map_count, or use a planner \
         that maps the image whole"
    )]
    TooManyMappings {
        /// The planner, as written.
        planner: String,
        /// Mappings of the plan, while its layers are applied.
        needed: u64,
        /// Mappings that this process may have for it.
        limit: u64,
    },
    /// The medium cannot be mapped privately, nor in chunks that the monitor could copy.
    #[error(
        "{planner} copies chunks of 2 MiB of this medium, which is mapped at leaves of {leaf}: guest memory has to be \
         whole chunks, and the device's alignment at most 2 MiB (ndctl: --align=2M); or use pass"
    )]
    NoChunks {
        /// The planner, as written.
        planner: String,
        /// The leaf at which the host maps the snapshot's memory.
        leaf: Leaf,
    },
}

/// Mappings that are left to the rest of the process and to what the guest gives back.
const SPARE_MAPPINGS: u64 = 20_000;

/// Checks that this process may have the mappings of a plan. The kernel refuses one too many at any time, also where a later layer
/// hides many, as one merged region of a loading set does.
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
    /// The host could not be examined.
    #[error(transparent)]
    Host(#[from] HostFactsError),
    /// How the image is stored could not be found out.
    #[error("reading how the image of {} is stored", .path.display())]
    Image {
        /// The snapshot.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The profile is refused.
    #[error(transparent)]
    Profile(#[from] OpenError),
    /// The planner makes none.
    #[error(transparent)]
    Planner(#[from] PlannerError),
}

/// The plan that a planner makes for an open snapshot on this host. A snapshot in a pool needs a
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
    let profile = if planner.uses_profile() { snapshot.profile()? } else { None };
    let image = ImageFacts::of_snapshot(snapshot, grant)
        .map_err(|source| PlanSnapshotError::Image { path: snapshot.path().to_owned(), source })?;
    Ok(planner.plan(&PlanInput {
        layout: &snapshot.manifest().layout,
        image,
        zero_map: snapshot.zero_map(),
        profile: profile.as_ref(),
        snapshot: Some(snapshot),
        copies: grant.and_then(Grant::copies),
        host: &HostFacts::read()?,
    })?)
}

/// What a planner maps guest memory from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// The image file of a snapshot in a directory.
    Directory,
    /// The sealed extent of a snapshot in a pool.
    Extent,
    /// A replica of such an extent.
    Replica,
}

/// Makes plans by one system's rules.
pub trait Planner: Send + Sync {
    /// As it is written on the command line, with its options: `firecracker:readahead=off`.
    fn name(&self) -> String;

    /// What it maps guest memory from.
    fn store(&self) -> Store {
        Store::Directory
    }

    /// Whether its plans depend on the snapshot's profile.
    fn uses_profile(&self) -> bool {
        false
    }

    /// Whether a recorded profile makes a difference to a start: to the plan, or to what was copied ahead for it.
    fn learns(&self) -> bool {
        self.uses_profile() || self.copy_rule().is_some()
    }

    /// What goes into the file that is packed for its plans; `None` for a planner without one.
    ///
    /// # Errors
    ///
    /// [`PlannerError`] when the profile lacks what decides it.
    fn packing(&self, _input: &PlanInput<'_>) -> Result<Option<Packing>, PlannerError> {
        Ok(None)
    }

    /// Which chunks of 2 MiB are copied ahead, for a planner that runs on copies: [`request_copy`](crate::copy_ahead::request_copy)
    /// is called before the plan is made.
    fn copy_rule(&self) -> Option<Rule> {
        None
    }

    /// The plan for a snapshot on this host. It validates.
    ///
    /// # Errors
    ///
    /// [`PlannerError`] when this planner cannot restore this snapshot on this host.
    fn plan(&self, input: &PlanInput<'_>) -> Result<Plan, PlannerError>;
}

#[cfg(test)]
mod tests;
