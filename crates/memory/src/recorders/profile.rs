//! The parts of a [`Profile`], and the interface of their recorders.

use std::fmt;
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::str::FromStr;

use firn_snapshot::{Profile, Snapshot};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::{Cached, Groups};
use crate::bpf::BpfError;
use crate::page_cache::{Residency, evict};
use crate::pager::{PageStore, PagerError};

/// A part of a [`Profile`] that is recorded from a run of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
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
    /// All parts.
    pub const ALL: [Self; 4] = [Self::Faults, Self::Writes, Self::Groups, Self::Cache];

    /// The name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Faults => "faults",
            Self::Writes => "writes",
            Self::Groups => "groups",
            Self::Cache => "cache",
        }
    }

    /// Whether it can be recorded from a snapshot in a pool: it needs no page cache.
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

/// The text is not the name of a part.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("a profile has no part {0:?}; use {known} or free", known = Part::ALL.map(Part::name).join(", "))]
pub struct ParsePartError(String);

impl FromStr for Part {
    type Err = ParsePartError;

    fn from_str(text: &str) -> Result<Self, ParsePartError> {
        let mut all = Self::ALL.into_iter();
        all.find(|part| part.name() == text).ok_or_else(|| ParsePartError(text.to_owned()))
    }
}

/// Why a part of a profile was not recorded from the page cache.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ProfileRecordError {
    /// The page cache cannot be watched.
    #[error(transparent)]
    Bpf(#[from] BpfError),
    /// The state of the page cache cannot be read or changed.
    #[error("cannot read or evict the cached pages of the image of {}", .snapshot.display())]
    PageCache {
        /// The snapshot.
        snapshot: PathBuf,
        /// The error of the system call.
        source: io::Error,
    },
    /// The image's pages stay in the page cache.
    #[error(
        "{} of {} pages of the image of {} stay cached after an eviction, so the pages that a run brings in cannot be \
         recorded; stop the microVMs of this snapshot, or copy it to a file system that can evict (not tmpfs)",
        residency.cached,
        residency.pages,
        .snapshot.display()
    )]
    NotCold {
        /// The snapshot.
        snapshot: PathBuf,
        /// The cached pages, by mincore.
        residency: Residency,
    },
    /// There is no image file.
    #[error(
        "{part} is recorded from the page cache of an image file, but this snapshot is in a pool; freeze it into a \
         directory, or leave {part} out"
    )]
    NoImageFile {
        /// The part.
        part: Part,
    },
    /// The resident memory of the guest's process could not be read.
    #[error("cannot read the resident memory of the guest's monitor")]
    Resident(#[source] io::Error),
    /// A recorder's thread could not be started.
    #[error("cannot start the recorder's thread")]
    Thread(#[source] io::Error),
    /// The image is damaged.
    #[error("the check of the image of {} before the run failed", .snapshot.display())]
    Check {
        /// The snapshot.
        snapshot: PathBuf,
        /// The page, and why it failed.
        source: PagerError,
    },
    /// The image's descriptor could not be duplicated.
    #[error("cannot duplicate the image's descriptor")]
    Image(#[source] io::Error),
}

impl ProfileRecordError {
    /// Whether the cause is a limitation of this host, so that other parts can still be recorded.
    #[must_use]
    pub fn is_host_limitation(&self) -> bool {
        matches!(self, Self::Bpf(_) | Self::NotCold { .. })
    }
}

/// What records one run of a frozen guest.
pub enum ProfileRecorder {
    /// [`Touches`](super::Touches) of these parts, in the process of the guest.
    Touches(Vec<Part>),
    /// Another process, beside the guest's.
    PageCache(Box<dyn PageCacheRecorder>),
}

impl ProfileRecorder {
    /// The parts that it fills.
    #[must_use]
    pub fn parts(&self) -> Vec<Part> {
        match self {
            Self::Touches(parts) => parts.clone(),
            Self::PageCache(recorder) => vec![recorder.part()],
        }
    }
}

/// Records from the page cache what one run of a frozen guest brings into it. The guest runs in
/// another process: only the owner of the image, which that process is not, may ask which of its
/// pages are cached, and only root may watch them.
///
/// The caller calls [`prepare`](Self::prepare), restores the machine by the
/// [`planner`](Self::planner), calls [`begin`](Self::begin), resumes the guest, calls
/// [`end`](Self::end) after the response, and calls [`finish`](Self::finish).
pub trait PageCacheRecorder: Send {
    /// The part that it fills.
    fn part(&self) -> Part;

    /// The planner of the run.
    fn planner(&self) -> &'static str;

    /// Brings the page cache into the state that the recording requires. Called once.
    ///
    /// # Errors
    /// [`ProfileRecordError`].
    fn prepare(&mut self, snapshot: &Snapshot) -> Result<(), ProfileRecordError>;

    /// Where in the kernel the recorder is attached, if that depends on the kernel; known after
    /// [`prepare`](Self::prepare).
    fn watches_at(&self) -> Option<String> {
        None
    }

    /// Called right before the vCPUs of the guest in this process run.
    ///
    /// # Errors
    /// [`ProfileRecordError`].
    fn begin(&mut self, snapshot: &Snapshot, process: u32) -> Result<(), ProfileRecordError>;

    /// Ends the recorded part of the run: later touches are not part of the profile. It may be
    /// called while a vCPU waits. A failure is kept and returned by [`finish`](Self::finish).
    fn end(&mut self);

    /// Fills its part of the profile. It also ends a recording that was abandoned, whose profile
    /// the caller discards.
    ///
    /// # Errors
    /// [`ProfileRecordError`]; no part is filled.
    fn finish(self: Box<Self>, profile: &mut Profile) -> Result<(), ProfileRecordError>;
}

/// The recorders that fill these parts, one for each required run.
#[must_use]
pub fn of(parts: &[Part]) -> Vec<ProfileRecorder> {
    let mut recorders = Vec::new();
    let touches: Vec<Part> =
        [Part::Faults, Part::Writes].into_iter().filter(|part| parts.contains(part)).collect();
    if !touches.is_empty() {
        recorders.push(ProfileRecorder::Touches(touches));
    }
    if parts.contains(&Part::Groups) {
        recorders.push(ProfileRecorder::PageCache(Box::new(Groups::default())));
    }
    if parts.contains(&Part::Cache) {
        recorders.push(ProfileRecorder::PageCache(Box::new(Cached::default())));
    }
    recorders
}

/// Checks every page of a snapshot's image, because the kernel maps them unchecked in the run.
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
pub(super) fn evict_image(snapshot: &Snapshot, image: &File) -> Result<(), ProfileRecordError> {
    let path = || snapshot.path().to_owned();
    let residency = evict(image)
        .map_err(|source| ProfileRecordError::PageCache { snapshot: path(), source })?;
    if !residency.is_cold() {
        return Err(ProfileRecordError::NotCold { snapshot: path(), residency });
    }
    Ok(())
}
