//! What records the parts of a [`Profile`], and how.

use std::fmt;
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use firn_snapshot::{Profile, Snapshot};
use thiserror::Error;

use super::{BpfError, Cached, Groups, RecordError, Touches};
use crate::executor::{ExecuteError, Sources, execute};
use crate::guest_memory::GuestMemory;
use crate::page_cache::{Residency, evict};
use crate::pager::{PageStore, PagerError};
use crate::planners::{self, PlanSnapshotError, Planner};

/// A part of a [`Profile`] that a run of the guest is recorded for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// [`Profile::faults`].
    Faults,
    /// [`Profile::written`].
    Writes,
    /// [`Profile::groups`].
    Groups,
    /// [`Profile::cached`].
    Cache,
}

impl Part {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Faults, Self::Writes, Self::Groups, Self::Cache];

    /// As it is written on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Faults => "faults",
            Self::Writes => "writes",
            Self::Groups => "groups",
            Self::Cache => "cache",
        }
    }

    /// Whether it can be recorded of a snapshot in a pool, too: it needs no page cache.
    #[must_use]
    pub const fn in_pools(self) -> bool {
        match self {
            Self::Faults | Self::Writes => true,
            Self::Groups | Self::Cache => false,
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A part was written that there is not.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("there is no part {0:?} of a profile: use {known} or free", known = Part::ALL.map(Part::name).join(", "))]
pub struct ParsePartError(String);

impl FromStr for Part {
    type Err = ParsePartError;

    fn from_str(text: &str) -> Result<Self, ParsePartError> {
        let mut all = Self::ALL.into_iter();
        all.find(|part| part.name() == text).ok_or_else(|| ParsePartError(text.to_owned()))
    }
}

/// Why parts of a profile were not recorded.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ProfileRecordError {
    /// There is no plan for the run.
    #[error(transparent)]
    Plan(#[from] PlanSnapshotError),
    /// The plan could not be carried out.
    #[error(transparent)]
    Execute(#[from] ExecuteError),
    /// The touches could not be recorded.
    #[error(transparent)]
    Touches(#[from] RecordError),
    /// The page cache cannot be watched.
    #[error(transparent)]
    Bpf(#[from] BpfError),
    /// The page cache does not answer.
    #[error("finding out what the page cache holds of the image of {}", .snapshot.display())]
    PageCache {
        /// The snapshot.
        snapshot: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The image's pages stay in the page cache.
    #[error(
        "{} of {} pages of the image of {} stay cached after they were evicted, so what a run brings in would not be \
         seen: stop the microVMs of this snapshot, or copy it to a file system that can evict (not tmpfs)",
        residency.cached,
        residency.pages,
        .snapshot.display()
    )]
    NotCold {
        /// The snapshot.
        snapshot: PathBuf,
        /// What mincore says.
        residency: Residency,
    },
    /// There is no image file.
    #[error(
        "{part} are what the page cache takes in of an image file, but this snapshot lies in a pool; freeze it into a \
         directory, or leave {part} out"
    )]
    NoImageFile {
        /// The part.
        part: Part,
    },
    /// The resident memory of this process could not be read.
    #[error("reading how much memory of this process is resident")]
    Resident(#[source] io::Error),
    /// A recorder's thread could not be started.
    #[error("starting the recorder's thread")]
    Thread(#[source] io::Error),
    /// The image is not what was frozen.
    #[error("checking the image of {} before the run", .snapshot.display())]
    Check {
        /// The snapshot.
        snapshot: PathBuf,
        /// Which page, and why.
        source: PagerError,
    },
    /// The image's descriptor could not be duplicated.
    #[error("opening the image again")]
    Image(#[source] io::Error),
}

impl ProfileRecordError {
    /// Whether it is this host that refuses, so that other parts can be recorded all the same.
    #[must_use]
    pub fn is_of_the_host(&self) -> bool {
        matches!(self, Self::Bpf(_) | Self::NotCold { .. })
    }
}

/// Records one run of a frozen guest: one thaw in this process, of one input.
///
/// Whoever runs the guest calls [`memory`](Self::memory), restores the machine over it, then [`begin`](Self::begin), resumes,
/// calls [`end`](Self::end) when the answer is there, stops the guest, and calls [`finish`](Self::finish).
pub trait ProfileRecorder: Send {
    /// The parts that it fills.
    fn parts(&self) -> Vec<Part>;

    /// Whether every fault must be met in the vCPU's own thread: KVM's asynchronous page faults, which always ask for a
    /// page to be written, would be taken for writes.
    fn faults_in_vcpu_threads(&self) -> bool {
        false
    }

    /// Guest memory for the run; brings the page cache into the state that the recording needs. Called once.
    ///
    /// # Errors
    /// [`ProfileRecordError`]; nothing is left over.
    fn memory(&mut self, snapshot: &Snapshot) -> Result<GuestMemory, ProfileRecordError>;

    /// Where in the kernel it watches, if that depends on the kernel; known once there is [`memory`](Self::memory).
    fn watches_at(&self) -> Option<String> {
        None
    }

    /// Right before the vCPUs run.
    ///
    /// # Errors
    /// [`ProfileRecordError`].
    fn begin(
        &mut self,
        snapshot: &Snapshot,
        memory: &Arc<GuestMemory>,
    ) -> Result<(), ProfileRecordError>;

    /// The last touch was made, or the answer is there: what is touched from here on is no part of the profile. It may be
    /// called while a vCPU waits, and keeps what fails for [`finish`](Self::finish).
    fn end(&mut self);

    /// Fills its parts, once nobody touches guest memory any more. Also ends a recording that was given up: what it
    /// filled is then thrown away.
    ///
    /// # Errors
    /// [`ProfileRecordError`]; no part is filled.
    fn finish(self: Box<Self>, profile: &mut Profile) -> Result<(), ProfileRecordError>;
}

/// The recorders that fill these parts: one for each run that it takes.
#[must_use]
pub fn of(parts: &[Part]) -> Vec<Box<dyn ProfileRecorder>> {
    let mut recorders: Vec<Box<dyn ProfileRecorder>> = Vec::new();
    let touches: Vec<Part> =
        [Part::Faults, Part::Writes].into_iter().filter(|part| parts.contains(part)).collect();
    if !touches.is_empty() {
        recorders.push(Box::new(Touches::new(touches)));
    }
    if parts.contains(&Part::Groups) {
        recorders.push(Box::new(Groups::default()));
    }
    if parts.contains(&Part::Cache) {
        recorders.push(Box::new(Cached::default()));
    }
    recorders
}

/// Guest memory of a snapshot in a directory, as a planner lays it out, for recorders that watch an
/// ordinary run.
///
/// # Errors
/// [`ProfileRecordError`].
pub fn planned(
    snapshot: &Snapshot,
    planner: &dyn Planner,
) -> Result<GuestMemory, ProfileRecordError> {
    let plan = planners::plan(snapshot, None, planner)?;
    Ok(execute(&plan, &Sources::of(snapshot, None)?)?.memory)
}

/// Checks every page of a snapshot's image, which the kernel brings in unchecked in the run to come.
pub(super) fn check(snapshot: &Snapshot) -> Result<(), ProfileRecordError> {
    let checked = PageStore::of(snapshot).check_all(snapshot.manifest().layout.pages());
    let path = || snapshot.path().to_owned();
    checked.map_err(|source| ProfileRecordError::Check { snapshot: path(), source })
}

/// The image file of a snapshot, for a recorder of the page cache.
pub(super) fn image_file(snapshot: &Snapshot, part: Part) -> Result<&File, ProfileRecordError> {
    snapshot.image_file().ok_or(ProfileRecordError::NoImageFile { part })
}

/// Evicts a snapshot's image from the page cache.
pub(super) fn cool(snapshot: &Snapshot, image: &File) -> Result<(), ProfileRecordError> {
    let path = || snapshot.path().to_owned();
    let residency = evict(image)
        .map_err(|source| ProfileRecordError::PageCache { snapshot: path(), source })?;
    if !residency.is_cold() {
        return Err(ProfileRecordError::NotCold { snapshot: path(), residency });
    }
    Ok(())
}
