//! Why a plan was not executed.

use firn_base::GuestRange;
use thiserror::Error;

use super::StepError;
use crate::guest_memory::ViewError;
use crate::own_files::OwnFilesError;
use crate::pager::PagerError;
use crate::plan::{PlanError, Source};

/// Why a plan was not executed. Nothing stays mapped.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ExecuteError {
    /// The plan is not valid.
    #[error("the plan of {planner} is not valid")]
    Plan {
        /// The planner that made it.
        planner: String,
        /// The defect.
        #[source]
        source: PlanError,
    },
    /// A snapshot in a pool has no grant.
    #[error("the snapshot is in a pool, and the pool granted no extent for this run")]
    NoGrant,
    /// The plan maps the extent of a pool, and the image is a file.
    #[error("the plan of {planner} maps the extent of a pool, but the image is a file")]
    NoMedium {
        /// The planner that made it.
        planner: String,
    },
    /// The plan maps the image file, and the image is in a pool.
    #[error("the plan of {planner} maps an image file, but the image is in a pool")]
    NoImageFile {
        /// The planner that made it.
        planner: String,
    },
    /// The files of this process cannot be opened.
    #[error(transparent)]
    OwnFiles(#[from] OwnFilesError),
    /// The image's descriptor cannot be examined or duplicated.
    #[error("cannot examine or duplicate the image's descriptor")]
    Image(#[source] std::io::Error),
    /// The image is shorter than guest memory: reading its end would kill this process.
    #[error(
        "the image has {len} bytes, but guest memory has {expected}: the snapshot is truncated, or the image belongs to another"
    )]
    ImageTooShort {
        /// Its length in bytes.
        len: u64,
        /// The length of guest memory in bytes.
        expected: u64,
    },
    /// The copy is shorter than its table requires.
    #[error(
        "the copy has {len} bytes, but its table requires {expected}: the plan was made for another copy"
    )]
    CopyTooShort {
        /// Its length in bytes.
        len: u64,
        /// Bytes of the table's parts.
        expected: u64,
    },
    /// The medium of a shared extent is open for writing.
    #[error(
        "the pool's medium is open for writing: a shared extent is only mapped from a read-only descriptor"
    )]
    Writable,
    /// The plan maps a packed file, but none is open.
    #[error("the plan of {planner} maps a packed file, but none is open")]
    NoPackedFile {
        /// The planner that made it.
        planner: String,
    },
    /// A segment reads other pages of the packed file than its own.
    #[error(
        "the packed file does not hold the pages of the segment {guest} at the offset that the plan of {planner} has"
    )]
    WrongPackedOffset {
        /// The planner that made it.
        planner: String,
        /// The segment.
        guest: GuestRange,
    },
    /// Address space cannot be reserved.
    #[error(
        "cannot reserve {bytes} bytes of address space for guest memory; is its size right, or `ulimit -v` set?"
    )]
    Reserve {
        /// The length in bytes.
        bytes: u64,
        /// The error of the mmap.
        #[source]
        source: std::io::Error,
    },
    /// A layer could not be mapped.
    #[error("cannot map layer {index}, {layer_source} at guest memory {guest}")]
    Layer {
        /// Its index in the plan.
        index: usize,
        /// The guest range.
        guest: GuestRange,
        /// The source of the layer.
        layer_source: Source,
        /// The error of the system call.
        #[source]
        source: std::io::Error,
    },
    /// A step before the resume failed.
    #[error("step {index} of the schedule failed")]
    Step {
        /// Its index in the schedule.
        index: usize,
        /// The cause.
        #[source]
        source: StepError,
    },
    /// The plan checks pages on fill, but there are no digests.
    #[error("the plan of {planner} checks pages on fill, but has no snapshot with their digests")]
    NoDigests {
        /// The planner that made it.
        planner: String,
    },
    /// The pager cannot be started.
    #[error("cannot start the pager")]
    Pager(#[source] PagerError),
    /// vm-memory refuses the regions.
    #[error("vm-memory refuses the regions of guest memory")]
    View(#[source] ViewError),
}
