//! The executor: carries out a plan.

mod check;
mod error;
mod paged;
mod schedule;
mod sources;

pub use error::ExecuteError;
pub use schedule::{AfterResume, StepError, StepReport};
pub use sources::{ImageSource, Sources};

use std::time::Instant;

use firn_base::{GuestRange, ns_since};
use serde::{Deserialize, Serialize};

use crate::guest_memory::{Backing, GuestMemory, Reservation};
use crate::map::Mapping;
use crate::own_files::OwnFiles;
use crate::plan::{Advice, Layer, Plan, Segment, Sharing, Source, When, Work};
use crate::sigbus::KnownFile;

/// An executed plan, up to the resume.
#[derive(Debug)]
pub struct Executed {
    /// Guest memory, ready for the guest.
    pub memory: GuestMemory,
    /// The steps to run while the guest runs.
    pub after_resume: AfterResume,
    /// The cost.
    pub report: ExecuteReport,
}

/// The cost of executing a plan. Times are in nanoseconds.
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
    /// The total.
    pub total_ns: u64,
    /// Number of mmaps, the reservation included.
    pub mmaps: u64,
    /// Number of madvises of the layers.
    pub madvises: u64,
    /// Bytes of guest memory that are mapped from the packed file.
    pub packed_bytes: u64,
    /// Number of segments that are mapped from it.
    pub packed_regions: u64,
    /// Bytes of anonymous guest memory: a fault on it reads no file.
    pub zero_bytes: u64,
    /// Bytes of the image that steps before the resume read into the page cache.
    pub preloaded_bytes: u64,
    /// The steps before the resume, in order.
    pub steps: Vec<StepReport>,
}

/// Executes a plan up to the resume: checks it, reserves address space, applies its layers in order
/// and runs the steps of its schedule that come before the resume.
///
/// Host and guest addresses are congruent modulo 2 MiB, and modulo the plan's largest leaf. An
/// index is only built with `MADV_POPULATE_READ`: populating a private mapping for writing copies
/// every page, as [`Work::Populate`] does on purpose.
///
/// # Errors
///
/// [`ExecuteError`]; nothing stays mapped.
///
/// # Examples
///
/// ```
/// use firn_memory::planners::{ImageFacts, PlanInput, parse};
/// use firn_memory::{HostFacts, Sources, execute};
/// use firn_snapshot::{MemoryLayout, PageSet};
/// use vm_memory::{Bytes, GuestAddress};
///
/// let image = tempfile::tempfile()?;
/// let layout = MemoryLayout::for_size(4 << 20)?;
/// image.set_len(layout.total_bytes())?;
///
/// let plan = parse("firecracker")?.plan(&PlanInput {
///     layout: &layout,
///     image: ImageFacts::of(&image)?,
///     zero_map: &PageSet::new(layout.pages()),
///     profile: None,
///     snapshot: None,
///     copies: None,
///     host: &HostFacts::read()?,
/// })?;
/// let executed = execute(&plan, &Sources::image(&image))?;
/// assert_eq!(executed.memory.vm_memory().read_obj::<u8>(GuestAddress(0))?, 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn execute(plan: &Plan, sources: &Sources<'_>) -> Result<Executed, ExecuteError> {
    execute_in(plan, sources, None)
}

/// The same in address space that was reserved before, if it fits the plan.
///
/// # Errors
///
/// See [`execute`].
pub fn execute_in(
    plan: &Plan,
    sources: &Sources<'_>,
    reserved: Option<Reservation>,
) -> Result<Executed, ExecuteError> {
    let begun = Instant::now();
    let mut report = ExecuteReport::default();

    plan.validate()
        .map_err(|source| ExecuteError::Plan { planner: plan.planner.clone(), source })?;
    check::image(plan, sources)?;
    check::copy(plan, sources.copy)?;
    check::packed(plan, sources, &mut report)?;
    report.validate_ns = ns_since(begun);

    let part = Instant::now();
    let leaf = plan.largest_leaf();
    let reservation = match reserved.filter(|reserved| reserved.fits(&plan.layout, leaf)) {
        Some(reservation) => reservation,
        None => {
            report.mmaps += 1;
            Reservation::new(plan.layout.clone(), leaf).map_err(|source| ExecuteError::Reserve {
                bytes: plan.layout.total_bytes(),
                source,
            })?
        }
    };
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
    let extent_sharing = plan.extent_sharing();
    // Only this VM maps the copy, as with anonymous memory: it is written without a further copy.
    // So is what a pager fills beside an extent; elsewhere such memory stands for the image.
    let own = |s: &&Segment| match s.source {
        Source::Zero | Source::Copy { .. } => true,
        Source::Pager { .. } => extent_sharing.is_some(),
        _ => false,
    };
    let own = plan.segments.iter().filter(own);
    let own = own.map(|s| s.guest.start..s.guest.end()).collect();
    let backing = match extent_sharing {
        Some(Sharing::Shared) => Backing::Sealed,
        Some(Sharing::PrivateCow) => Backing::Extent,
        Some(Sharing::Exclusive) => Backing::Replica,
        None => Backing::Image {
            file: check::image_file(plan, sources)?.try_clone().map_err(ExecuteError::Image)?,
            digests: sources.snapshot.map(|snapshot| snapshot.digests().clone()),
        },
    };
    let mut memory = reservation.finish(backing, own).map_err(ExecuteError::View)?;
    let copied = plan.segments.iter().filter(|s| matches!(s.source, Source::Copy { .. }));
    memory.set_copied(copied.map(|s| s.guest.start..s.guest.end()).collect());
    memory.set_populated(plan.populated.clone());
    // A report on lost bytes reads them, when it is too late to open them.
    OwnFiles::of_process();
    let known = sources.files().map(KnownFile::new).collect::<Result<_, _>>();
    memory.know_files(known.map_err(ExecuteError::Image)?);
    if plan.pager.is_some() {
        let snapshot = sources
            .snapshot
            .ok_or_else(|| ExecuteError::NoDigests { planner: plan.planner.clone() })?;
        let pager = paged::start_pager(&memory, plan, snapshot, sources.on_failure);
        memory.set_pager(pager.map_err(ExecuteError::Pager)?);
    }
    report.map_ns = ns_since(part);

    let part = Instant::now();
    // The loader runs the steps at the request.
    let steps = plan.schedule.iter().copied().filter(|step| step.when != When::AtRequest);
    let (before, after): (Vec<_>, Vec<_>) = steps.partition(|step| step.when == When::BeforeResume);
    for (index, step) in before.into_iter().enumerate() {
        let done = schedule::run(step, &memory, sources.image.file(), sources.snapshot)
            .map_err(|source| ExecuteError::Step { index, source })?;
        report.preloaded_bytes += done.preloaded_bytes;
        report.steps.push(done);
    }
    memory.set_indexed(indexed(&report.steps, &memory));
    report.schedule_ns = ns_since(part);

    let after_resume = AfterResume::new(after, sources).map_err(ExecuteError::Image)?;
    report.total_ns = ns_since(begun);
    Ok(Executed { memory, after_resume, report })
}

/// The ranges whose index was built.
fn indexed(steps: &[StepReport], memory: &GuestMemory) -> Vec<GuestRange> {
    let mut ranges: Vec<_> = steps
        .iter()
        .flat_map(|step| match step.step.work {
            Work::Index { guest } => vec![guest],
            Work::IndexCopy { guest } => memory.copied_in(guest),
            Work::Populate { guest } => memory.populated_in(guest).collect(),
            Work::Preload { .. }
            | Work::Load { .. }
            | Work::Prefetch { .. }
            | Work::Install { .. } => Vec::new(),
        })
        .collect();
    ranges.sort_by_key(|range| range.start);
    ranges
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
