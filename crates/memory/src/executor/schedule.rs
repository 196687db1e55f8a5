//! The steps of a schedule.

use std::fs::File;
use std::io;
use std::time::Instant;

use firn_base::{GuestRange, ImageRange};
use firn_snapshot::{PackedError, PackedFile, Snapshot};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::{Sources, ns_since};
use crate::guest_memory::GuestMemory;
use crate::page_cache;
use crate::pager::PagerError;
use crate::plan::{Step, Work};

/// The cost of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepReport {
    /// The step.
    pub step: Step,
    /// Its duration, ns.
    pub ns: u64,
    /// Bytes read into the page cache.
    pub preloaded_bytes: u64,
    /// Bytes of guest memory that were mapped, or copied and mapped.
    pub indexed_bytes: u64,
}

/// Why a step failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StepError {
    /// The image could not be read.
    #[error("cannot preload {range} of the image")]
    Preload {
        /// The range to read.
        range: ImageRange,
        /// The error of the madvise.
        #[source]
        source: io::Error,
    },
    /// The plan preloads the image file, and the image is in a pool.
    #[error("the plan preloads an image file, but the image is in a pool")]
    NoImageFile,
    /// A packed file could not be installed: no page of it is wrong, but some may be missing.
    #[error("cannot install {}", packed.name())]
    Install {
        /// The file.
        packed: PackedFile,
        /// The cause.
        #[source]
        source: PagerError,
    },
    /// A packed file is not valid.
    #[error(transparent)]
    Packed(#[from] PackedError),
    /// There is no such packed file, or no pager to install it.
    #[error("there is no {} to install", packed.name())]
    NoPacked {
        /// The file.
        packed: PackedFile,
    },
    /// The index could not be built.
    #[error("cannot build the index of guest memory {range}")]
    Index {
        /// The range to map.
        range: GuestRange,
        /// The error of the read.
        #[source]
        source: io::Error,
    },
}

/// The steps to run while the guest runs, in order. It keeps its own descriptor of the image and
/// can be sent to another thread.
#[derive(Debug)]
pub struct AfterResume {
    steps: Vec<Step>,
    /// The image file, if a step preloads it.
    image: Option<File>,
}

impl AfterResume {
    pub(super) fn new(steps: Vec<Step>, sources: &Sources<'_>) -> io::Result<Self> {
        let preloads = steps.iter().any(|step| step.work.is_preload());
        let image = sources.image.file().filter(|_| preloads).map(File::try_clone).transpose()?;
        Ok(Self { steps, image })
    }

    /// The steps, in order.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Runs the steps and returns the cost of each.
    ///
    /// # Errors
    ///
    /// [`StepError`] of the first step that fails; later steps are not run. The guest is not
    /// affected: the steps only do in advance what a page fault would do.
    pub fn run(self, memory: &GuestMemory) -> Result<Vec<StepReport>, StepError> {
        let image = self.image.as_ref();
        self.steps.into_iter().map(|step| run(step, memory, image, None)).collect()
    }
}

/// Runs one step of a validated plan.
pub(super) fn run(
    step: Step,
    memory: &GuestMemory,
    image: Option<&File>,
    snapshot: Option<&Snapshot>,
) -> Result<StepReport, StepError> {
    let begun = Instant::now();
    let (mut preloaded_bytes, mut indexed_bytes) = (0, 0);
    match step.work {
        Work::Preload { image: range } => {
            let image = image.ok_or(StepError::NoImageFile)?;
            preloaded_bytes = page_cache::preload(image, range.offset..range.offset + range.len)
                .map_err(|source| StepError::Preload { range, source })?;
        }
        // The loader or the kernel runs it: a validated plan has none here.
        Work::Load { .. } | Work::Prefetch { .. } => {}
        Work::Index { guest: range } => {
            memory.build_index(range).map_err(|e| StepError::Index { range, source: e.into() })?;
            indexed_bytes = range.len;
        }
        Work::IndexCopy { guest } => {
            for range in memory.copied_in(guest) {
                let built = memory.build_index(range);
                built.map_err(|e| StepError::Index { range, source: e.into() })?;
                indexed_bytes += range.len;
            }
        }
        Work::Populate { guest } => {
            // Where the kernel cannot copy a page, it may when the guest writes to it, and a page
            // that is lost fails the guest then.
            let mut ranges = memory.populated_in(guest);
            while let Some(range) = ranges.next().filter(|range| memory.populate(*range).is_ok()) {
                indexed_bytes += range.len;
            }
        }
        Work::Install { packed } => {
            let file = snapshot.map(|snapshot| snapshot.packed(packed)).transpose()?;
            let (Some(file), Some(pager)) = (file.flatten(), memory.pager()) else {
                return Err(StepError::NoPacked { packed });
            };
            pager.install(file).map_err(|source| StepError::Install { packed, source })?;
        }
    }
    Ok(StepReport { step, ns: ns_since(begun), preloaded_bytes, indexed_bytes })
}
