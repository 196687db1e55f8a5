//! Guest memory whose backing is lost: the file was truncated, or the device failed.
//!
//! An access of this process ends in SIGBUS, an access of the guest in `EFAULT` from `KVM_RUN`
//! (mmap(2), "Errors"; KVM's API, section 5, `KVM_EXIT_MEMORY_FAULT`). Either ends the microVM,
//! because only the lost bytes could take their place. Where KVM retries forever instead of
//! returning `EFAULT`, the monitor's watchdog ends the microVM.
//!
//! Limitation: the kernel does not report every loss. The rest of the page in which a file was
//! truncated reads as zeros, and so does a file that was truncated and extended again. Images must
//! not be written while microVMs run from them.

mod handler;
mod maps;

use std::ffi::{CStr, OsStr};
use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use firn_base::PAGE_SIZE;
use firn_base::num::usize_of;
use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};
use thiserror::Error;

use crate::slot::Slot;

pub(crate) use handler::RegisteredSlots;
pub use handler::install;

/// A byte of a mapped file that is lost.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("byte {offset:#x} of {} is lost: {}", file.display(), reason(*len, *protected))]
pub struct LostBacking {
    /// The file or device, by the path that it was mapped from.
    pub file: PathBuf,
    /// The byte.
    pub offset: u64,
    /// The file's current length in bytes, where truncation is the reason.
    pub len: Option<u64>,
    /// Whether fs-verity protects the file.
    pub protected: bool,
}

fn reason(len: Option<u64>, protected: bool) -> String {
    match (len, protected) {
        (Some(len), _) => format!("the file was truncated to {len} bytes while it was in use"),
        (None, true) => VERITY.to_owned(),
        (None, false) => "its device failed, or the system has no page for it".to_owned(),
    }
}

/// Why the kernel does not map a page of a file that fs-verity protects.
const VERITY: &str =
    "its bytes are damaged, which fs-verity found when it read them, or its device failed";

/// The lost byte at a host address.
pub(crate) fn lost_at(address: u64) -> Option<LostBacking> {
    find(|mapped| (mapped.start..mapped.end).contains(&address).then_some(address))
}

/// The first lost byte of some slots, by the lengths of their files, and of those that fs-verity
/// protects by reading them.
pub(crate) fn first_lost(slots: &[Slot]) -> Option<LostBacking> {
    find(|mapped| {
        let contains =
            |slot: &Slot| slot.host_addr <= mapped.start && mapped.end <= slot.host_addr + slot.len;
        if !slots.iter().any(contains) {
            return None;
        }
        let len = len_of(mapped.path)?;
        let lost = mapped.start.checked_add(len.saturating_sub(mapped.offset))?;
        if lost < mapped.end {
            return Some(lost);
        }
        let range = mapped.offset..mapped.offset + (mapped.end - mapped.start);
        let unreadable =
            is_protected(mapped.path).then(|| first_unreadable(mapped.path, range))??;
        Some(mapped.start + (unreadable - mapped.offset))
    })
}

/// The file's byte at the address that `choose` returns for a mapping.
fn find(choose: impl Fn(&maps::Mapped<'_>) -> Option<u64>) -> Option<LostBacking> {
    let mut found = None;
    // Without /proc the file is unknown.
    let _ = maps::scan(|mapped| {
        let Some(address) = choose(mapped) else { return false };
        if !mapped.path.is_empty() {
            let offset = mapped.offset + (address - mapped.start);
            let len = len_of(mapped.path).filter(|len| *len <= offset);
            let protected = is_protected(mapped.path);
            found = Some(LostBacking { file: path(mapped.path), offset, len, protected });
        }
        true
    });
    found
}

fn path(bytes: &[u8]) -> PathBuf {
    PathBuf::from(OsStr::from_bytes(bytes))
}

/// The length of a regular file, in bytes.
fn len_of(bytes: &[u8]) -> Option<u64> {
    let metadata = fs::metadata(path(bytes)).ok()?;
    metadata.is_file().then_some(metadata.len())
}

/// `PATH_MAX` of the kernel, bytes.
const PATH_MAX: usize = 4096;

/// Whether fs-verity protects a file. It uses neither heap nor locks.
fn is_protected(bytes: &[u8]) -> bool {
    let mut path = [0; PATH_MAX];
    let Some(place) = path.get_mut(..bytes.len()) else { return false };
    place.copy_from_slice(bytes);
    let Ok(path) = CStr::from_bytes_until_nul(&path) else { return false };
    let found = statx(CWD, path, AtFlags::empty(), StatxFlags::empty());
    found.is_ok_and(|found| found.stx_attributes.contains(StatxAttributes::VERITY))
}

/// The first page of a file's range that cannot be read, by its offset.
fn first_unreadable(bytes: &[u8], range: Range<u64>) -> Option<u64> {
    let file = File::open(path(bytes)).ok()?;
    let mut page = vec![0; usize_of(PAGE_SIZE)];
    range
        .step_by(usize_of(PAGE_SIZE))
        .find(|offset| file.read_exact_at(&mut page, *offset).is_err())
}

#[cfg(test)]
mod tests;
