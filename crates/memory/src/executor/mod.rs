//! The executor: carries out a plan.

mod paged;
mod schedule;

pub use schedule::{AfterResume, StepError, StepReport};

use std::fs::File;
use std::time::Instant;

use firn_base::{GuestRange, ns_since};
use firn_snapshot::{Grant, Packed, PackedFile, Snapshot};
use rustix::fs::{OFlags, fcntl_getfl};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::guest_memory::{Backing, GuestMemory, Reservation, ViewError};
use crate::map::Mapping;
use crate::pager::{OnFailure, PagerError, end_process};
use crate::plan::{Advice, Layer, Leaf, Plan, PlanError, Segment, Sharing, Source, When, Work};

/// Where the image of a snapshot is, for mapping.
#[derive(Clone, Copy, Debug)]
pub enum ImageSource<'a> {
    /// The image file of a snapshot in a directory, open for reading. A preload moves its position.
    File(&'a File),
    /// The medium of the pool that the plan's extents are in: read-only where the plan shares the
    /// extent, writable where it maps a replica.
    Medium(&'a File),
}

impl<'a> ImageSource<'a> {
    /// The image file, if it is one.
    pub(crate) fn file(self) -> Option<&'a File> {
        match self {
            Self::File(file) => Some(file),
            Self::Medium(_) => None,
        }
    }

    /// The medium, if it is one.
    fn medium(self) -> Option<&'a File> {
        match self {
            Self::Medium(medium) => Some(medium),
            Self::File(_) => None,
        }
    }
}

/// The files that a plan's sources are in, on this host.
#[derive(Clone, Copy, Debug)]
pub struct Sources<'a> {
    /// The image.
    pub image: ImageSource<'a>,
    /// The snapshot, for plans that need its digests or packed files.
    pub snapshot: Option<&'a Snapshot>,
    /// The copy that a pool made for this VM, if any.
    pub copy: Option<&'a File>,
    /// What a pager does when it cannot continue.
    pub on_failure: OnFailure,
}

impl<'a> Sources<'a> {
    /// The sources of an open snapshot: what a pool granted, or the image file, and the packed file
    /// that the planner opened.
    ///
    /// # Errors
    ///
    /// [`ExecuteError::NoGrant`] for a snapshot in a pool without a grant.
    pub fn of(snapshot: &'a Snapshot, grant: Option<&'a Grant>) -> Result<Self, ExecuteError> {
        let image = match (grant, snapshot.image_file()) {
            (Some(grant), _) => ImageSource::Medium(grant.medium()),
            (None, Some(file)) => ImageSource::File(file),
            (None, None) => return Err(ExecuteError::NoGrant),
        };
        let copy = grant.and_then(Grant::copies).and_then(|copies| copies.file.as_ref());
        Ok(Self { image, snapshot: Some(snapshot), copy, on_failure: end_process })
    }

    /// The loading-set file, if the planner opened one.
    pub(crate) fn packed(&self) -> Option<&'a Packed> {
        self.snapshot?.opened_packed(PackedFile::LoadingSet)
    }

    /// An image file and nothing else.
    #[must_use]
    pub fn image(image: &'a File) -> Self {
        let image = ImageSource::File(image);
        Self { image, snapshot: None, copy: None, on_failure: end_process }
    }

    /// A pool's medium and nothing else.
    #[must_use]
    pub fn medium(medium: &'a File) -> Self {
        let image = ImageSource::Medium(medium);
        Self { image, snapshot: None, copy: None, on_failure: end_process }
    }
}

/// A plan carried out, up to the resume.
#[derive(Debug)]
pub struct Executed {
    /// Guest memory, ready for the guest.
    pub memory: GuestMemory,
    /// The steps that are to run while the guest does.
    pub after_resume: AfterResume,
    /// What it took.
    pub report: ExecuteReport,
}

/// What executing a plan took. Times are in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecuteReport {
    /// Checking the plan and its sources.
    pub validate_ns: u64,
    /// Reserving address space.
    pub reserve_ns: u64,
    /// Applying the layers.
    pub map_ns: u64,
    /// The steps before the resume.
    pub schedule_ns: u64,
    /// All of it.
    pub total_ns: u64,
    /// Number of mmaps, the reservation included.
    pub mmaps: u64,
    /// Number of madvises of the layers.
    pub madvises: u64,
    /// Bytes of guest memory that are mapped from the packed file.
    pub packed_bytes: u64,
    /// Number of segments that are.
    pub packed_regions: u64,
    /// Bytes of guest memory that are anonymous: no fault on them reads a file.
    pub zero_bytes: u64,
    /// Bytes of the image that steps before the resume read into the page cache.
    pub preloaded_bytes: u64,
    /// The steps before the resume, in order.
    pub steps: Vec<StepReport>,
}

/// Why a plan was not carried out. Nothing stays mapped.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ExecuteError {
    /// The plan is wrong.
    #[error("the plan of {planner} is refused")]
    Plan {
        /// The planner that made it.
        planner: String,
        /// What is wrong with it.
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
    /// The image cannot be looked at, or kept open.
    #[error("cannot examine or duplicate the image's descriptor")]
    Image(#[source] std::io::Error),
    /// The image is shorter than guest memory: reading its end would kill this process.
    #[error(
        "the image has {len} bytes, guest memory {expected}: the snapshot is truncated or another's"
    )]
    ImageTooShort {
        /// Bytes it has.
        len: u64,
        /// Bytes of guest memory.
        expected: u64,
    },
    /// The copy is shorter than its table says.
    #[error(
        "the copy has {len} bytes, its table {expected}: it is not the one that the plan was made for"
    )]
    CopyTooShort {
        /// Bytes it has.
        len: u64,
        /// Bytes of the table's parts.
        expected: u64,
    },
    /// The sealed bytes of an extent could be written.
    #[error(
        "the pool's medium is open for writing: a shared extent is only mapped from a descriptor for reading"
    )]
    Writable,
    /// The plan maps a packed file, and there is none.
    #[error("the plan of {planner} maps a packed file, and none was opened")]
    NoPackedFile {
        /// The planner that made it.
        planner: String,
    },
    /// A segment takes its bytes from a place in the packed file that holds other pages.
    #[error(
        "the packed file does not hold the pages of the segment {guest} where the plan of {planner} has them"
    )]
    WrongPackedOffset {
        /// The planner that made it.
        planner: String,
        /// The segment.
        guest: GuestRange,
    },
    /// No address space.
    #[error(
        "cannot reserve {bytes} bytes of address space for guest memory; is its size right, or `ulimit -v` set?"
    )]
    Reserve {
        /// Bytes asked for.
        bytes: u64,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// A layer could not be mapped.
    #[error("cannot map layer {index}, {layer_source} at guest memory {guest}")]
    Layer {
        /// Its index in the plan.
        index: usize,
        /// Where it is mapped.
        guest: GuestRange,
        /// What is mapped.
        layer_source: Source,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// A step before the resume failed.
    #[error("step {index} of the schedule failed")]
    Step {
        /// Its index in the schedule.
        index: usize,
        /// Why.
        #[source]
        source: StepError,
    },
    /// Pages are to be checked as they enter, and there is nothing to compare them with.
    #[error("the plan of {planner} checks pages on fill, and has no snapshot with their digests")]
    NoDigests {
        /// The planner that made it.
        planner: String,
    },
    /// The pager cannot be started.
    #[error("starting the pager")]
    Pager(#[source] PagerError),
    /// vm-memory refuses the regions.
    #[error("guest memory cannot be handed to vm-memory")]
    View(#[source] ViewError),
}

/// Carries out a plan up to the resume: checks it, reserves address space, applies its layers in order and
/// runs the steps of its schedule that come before the resume.
///
/// Host and guest addresses are congruent modulo 2 MiB, and modulo the plan's largest leaf. An index is only
/// ever built by `MADV_POPULATE_READ`: populating a private mapping for writing would copy every page.
///
/// # Errors
///
/// [`ExecuteError`]; whatever was mapped is unmapped again.
pub fn execute(plan: &Plan, sources: &Sources<'_>) -> Result<Executed, ExecuteError> {
    let begun = Instant::now();
    let mut report = ExecuteReport::default();

    plan.validate()
        .map_err(|source| ExecuteError::Plan { planner: plan.planner.clone(), source })?;
    check_image(plan, sources)?;
    check_copy(plan, sources.copy)?;
    check_packed(plan, sources, &mut report)?;
    report.validate_ns = ns_since(begun);

    let part = Instant::now();
    let leaf = plan.segments.iter().map(|s| s.leaf).max().unwrap_or(Leaf::Size4K);
    let reservation = Reservation::new(&plan.layout, leaf).map_err(|e| ExecuteError::Reserve {
        bytes: plan.layout.total_bytes(),
        source: e.into(),
    })?;
    report.mmaps += 1;
    report.reserve_ns = ns_since(part);

    let part = Instant::now();
    for (index, layer) in plan.layers.iter().enumerate() {
        apply(&reservation, layer, sources, &mut report).map_err(|e| ExecuteError::Layer {
            index,
            guest: layer.guest,
            layer_source: layer.source,
            source: e.into(),
        })?;
    }
    // A copy is its VM's own, as anonymous memory is: nothing has to be copied before it is written.
    let own = |s: &&Segment| matches!(s.source, Source::Zero | Source::Copy { .. });
    let own = plan.segments.iter().filter(own);
    let own = own.map(|s| s.guest.start..s.guest.end()).collect();
    let backing = match extent_sharing(plan) {
        Some(Sharing::Shared) => Backing::Sealed,
        Some(Sharing::PrivateCow) => Backing::Extent,
        Some(Sharing::Exclusive) => Backing::Replica,
        None => Backing::Image {
            file: image_file(plan, sources)?.try_clone().map_err(ExecuteError::Image)?,
            digests: sources.snapshot.map(|snapshot| snapshot.digests().clone()),
        },
    };
    let mut memory =
        reservation.finish(plan.layout.clone(), backing, own).map_err(ExecuteError::View)?;
    let copied = plan.segments.iter().filter(|s| matches!(s.source, Source::Copy { .. }));
    memory.set_copied(copied.map(|s| s.guest.start..s.guest.end()).collect());
    if is_logged(plan) {
        memory.track_writes();
    }
    if plan.pager.is_some() {
        let snapshot = sources
            .snapshot
            .ok_or_else(|| ExecuteError::NoDigests { planner: plan.planner.clone() })?;
        let pager = paged::start_pager(&memory, plan, snapshot, sources.on_failure);
        memory.set_pager(pager.map_err(ExecuteError::Pager)?);
    }
    report.map_ns = ns_since(part);

    let part = Instant::now();
    // The steps at the request are the loader's.
    let steps = plan.schedule.iter().copied().filter(|step| step.when != When::AtRequest);
    let (before, after): (Vec<_>, Vec<_>) = steps.partition(|step| step.when == When::BeforeResume);
    for (index, step) in before.into_iter().enumerate() {
        let done = schedule::run(step, &memory, sources.image.file(), sources.snapshot)
            .map_err(|source| ExecuteError::Step { index, source })?;
        report.preloaded_bytes += done.preloaded_bytes;
        report.steps.push(done);
    }
    memory.set_indexed(indexed(&report.steps));
    report.schedule_ns = ns_since(part);

    let after_resume = AfterResume::new(after, sources).map_err(ExecuteError::Image)?;
    report.total_ns = ns_since(begun);
    Ok(Executed { memory, after_resume, report })
}

/// The ranges whose index was built.
fn indexed(steps: &[StepReport]) -> Vec<GuestRange> {
    let mut ranges: Vec<_> = steps
        .iter()
        .filter_map(|step| match step.step.work {
            Work::Index { guest } => Some(guest),
            Work::Preload { .. } | Work::Load { .. } | Work::Install { .. } => None,
        })
        .collect();
    ranges.sort_by_key(|range| range.start);
    ranges
}

/// Whether it is worth knowing which pages are written: of a replica, which is to be made what it was, and whose leaves KVM's dirty log
/// would not make smaller.
fn is_logged(plan: &Plan) -> bool {
    extent_sharing(plan) == Some(Sharing::Exclusive)
        && plan.segments.iter().all(|segment| segment.leaf == Leaf::Size4K)
}

/// Who may share the extent that the plan's memory lies in, if it does. What a copy does not hold is the sealed extent's.
fn extent_sharing(plan: &Plan) -> Option<Sharing> {
    let of_extent = |s: &&Segment| matches!(s.source, Source::Extent { .. });
    let extent = plan.segments.iter().find(of_extent).map(|segment| segment.sharing);
    let copied = || plan.segments.iter().any(|s| matches!(s.source, Source::Copy { .. }));
    // Beside a copy the extent may still be mapped shared, and be sealed.
    extent.or_else(|| copied().then_some(Sharing::PrivateCow))
}

/// Checks that the copy is as long as its table says: mapped beyond its end, it would kill this process.
fn check_copy(plan: &Plan, copy: Option<&File>) -> Result<(), ExecuteError> {
    let expected = plan.copies.bytes();
    if expected == 0 {
        return Ok(());
    }
    let len = match copy {
        Some(copy) => copy.metadata().map_err(ExecuteError::Image)?.len(),
        None => 0,
    };
    if len < expected {
        return Err(ExecuteError::CopyTooShort { len, expected });
    }
    Ok(())
}

/// Checks that the sources have what the plan maps, and that an image file is as long as guest
/// memory. The pool guarantees that an extent is within its medium; a character device does not
/// report its length.
fn check_image(plan: &Plan, sources: &Sources<'_>) -> Result<(), ExecuteError> {
    if let Some(sharing) = extent_sharing(plan) {
        let no_medium = || ExecuteError::NoMedium { planner: plan.planner.clone() };
        let medium = sources.image.medium().ok_or_else(no_medium)?;
        return if sharing == Sharing::Shared { check_sealed(medium) } else { Ok(()) };
    }
    let file = image_file(plan, sources)?;
    let len = file.metadata().map_err(ExecuteError::Image)?.len();
    let expected = plan.layout.total_bytes();
    if len < expected {
        return Err(ExecuteError::ImageTooShort { len, expected });
    }
    Ok(())
}

fn image_file<'a>(plan: &Plan, sources: &Sources<'a>) -> Result<&'a File, ExecuteError> {
    let no_file = || ExecuteError::NoImageFile { planner: plan.planner.clone() };
    sources.image.file().ok_or_else(no_file)
}

/// Checks that no mapping of a shared extent can be made writable: the kernel refuses that of a descriptor for reading.
fn check_sealed(medium: &File) -> Result<(), ExecuteError> {
    let flags = fcntl_getfl(medium).map_err(|errno| ExecuteError::Image(errno.into()))?;
    if flags & OFlags::RWMODE == OFlags::RDONLY { Ok(()) } else { Err(ExecuteError::Writable) }
}

/// Checks that the packed file holds the pages that the segments want of it, by its own table, and counts what does not
/// come from the image.
fn check_packed(
    plan: &Plan,
    sources: &Sources<'_>,
    report: &mut ExecuteReport,
) -> Result<(), ExecuteError> {
    let planner = || plan.planner.clone();
    for segment in &plan.segments {
        let (guest, len) = (segment.guest, segment.guest.len);
        match segment.source {
            Source::Zero => report.zero_bytes += len,
            Source::Packed { offset, image } => {
                let packed = sources.packed();
                let packed =
                    packed.ok_or_else(|| ExecuteError::NoPackedFile { planner: planner() })?;
                if !packed.holds(offset, image, len) {
                    return Err(ExecuteError::WrongPackedOffset { planner: planner(), guest });
                }
                report.packed_bytes += len;
                report.packed_regions += 1;
            }
            _ => {}
        }
    }
    Ok(())
}

fn apply(
    reservation: &Reservation,
    layer: &Layer,
    sources: &Sources<'_>,
    report: &mut ExecuteReport,
) -> rustix::io::Result<()> {
    let mapping = &reservation.mapping;
    let addr = reservation.host_addr(layer.guest.start).ok_or(rustix::io::Errno::INVAL)?;
    match layer.source {
        // The pager registers its memory when everything is mapped.
        Source::Zero | Source::Pager { .. } => {
            mapping.map_zero(addr, layer.guest.len)?;
        }
        Source::Image { offset } => {
            let image = sources.image.file().ok_or(rustix::io::Errno::BADF)?;
            mapping.map_private(addr, layer.guest.len, image, offset)?;
        }
        Source::Packed { offset, .. } => {
            let packed = sources.packed().ok_or(rustix::io::Errno::BADF)?;
            mapping.map_private(addr, layer.guest.len, packed.file(), offset)?;
        }
        Source::Extent { offset } => {
            let map = match layer.sharing {
                Sharing::Shared => Mapping::map_sealed,
                Sharing::PrivateCow => Mapping::map_private,
                Sharing::Exclusive => Mapping::map_shared,
            };
            let medium = sources.image.medium().ok_or(rustix::io::Errno::BADF)?;
            map(mapping, addr, layer.guest.len, medium, offset)?;
        }
        Source::Copy { offset } => {
            let copy = sources.copy.ok_or(rustix::io::Errno::BADF)?;
            mapping.map_shared(addr, layer.guest.len, copy, offset)?;
        }
    }
    report.mmaps += 1;
    match layer.advice {
        Advice::Normal => {}
        Advice::Random => {
            mapping.advise_random(addr, layer.guest.len)?;
            report.madvises += 1;
        }
        Advice::Huge => {
            mapping.advise_huge(addr, layer.guest.len)?;
            report.madvises += 1;
        }
    }
    Ok(())
}

#[cfg(test)]
mod extent_tests;
#[cfg(test)]
mod tests;
