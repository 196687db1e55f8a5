//! Checks of a plan's sources before anything is mapped.

use std::fs::File;

use rustix::fs::{OFlags, fcntl_getfl};

use super::{ExecuteError, ExecuteReport, Sources};
use crate::plan::{Plan, Sharing, Source};

/// Checks that the copy is as long as its table requires: an access beyond its end would kill this
/// process.
pub(super) fn copy(plan: &Plan, copy: Option<&File>) -> Result<(), ExecuteError> {
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
pub(super) fn image(plan: &Plan, sources: &Sources<'_>) -> Result<(), ExecuteError> {
    if let Some(sharing) = plan.extent_sharing() {
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

pub(super) fn image_file<'a>(plan: &Plan, sources: &Sources<'a>) -> Result<&'a File, ExecuteError> {
    let no_file = || ExecuteError::NoImageFile { planner: plan.planner.clone() };
    sources.image.file().ok_or_else(no_file)
}

/// Checks that no mapping of a shared extent can be made writable: the kernel refuses that for a
/// read-only descriptor.
fn check_sealed(medium: &File) -> Result<(), ExecuteError> {
    let flags = fcntl_getfl(medium).map_err(|errno| ExecuteError::Image(errno.into()))?;
    if flags & OFlags::RWMODE == OFlags::RDONLY { Ok(()) } else { Err(ExecuteError::Writable) }
}

/// Checks by the packed file's own table that it holds the pages of its segments, and counts the
/// memory that does not come from the image.
pub(super) fn packed(
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
