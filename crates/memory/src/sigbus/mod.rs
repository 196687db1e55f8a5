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

mod files;
mod handler;
mod maps;

use std::ffi::OsStr;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::ptr::without_provenance_mut;

use firn_base::PAGE_SIZE;
use firn_base::num::usize_of;
use rustix::fs::{AtFlags, FileType, StatxAttributes, StatxFlags, fstat, statx};
use rustix::io::{Errno, pread};
use rustix::mm::{Advice, madvise};
use thiserror::Error;

use crate::slot::Slot;

pub(crate) use files::KnownFile;
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
        (None, false) => {
            "the file was truncated, its device failed, or the system has no page for it".to_owned()
        }
    }
}

/// Why the kernel does not map a page of a file that fs-verity protects.
const VERITY: &str =
    "its bytes are damaged, which fs-verity found when it read them, or its device failed";

/// The lost byte at a host address.
pub(crate) fn lost_at(address: u64) -> Option<LostBacking> {
    find(|mapped| (mapped.start..mapped.end).contains(&address).then_some(address))
}

/// The first lost byte of some slots, by the lengths of their files, of those that fs-verity
/// protects by reading them, and of files that are not known by mapping their pages.
pub(crate) fn first_lost(slots: &[Slot]) -> Option<LostBacking> {
    find(|mapped| {
        let contains =
            |slot: &Slot| slot.host_addr <= mapped.start && mapped.end <= slot.host_addr + slot.len;
        if !slots.iter().any(contains) {
            return None;
        }
        let Some(len) = len_of(mapped.inode) else {
            return first_absent(mapped.start..mapped.end);
        };
        let lost = mapped.start.checked_add(len.saturating_sub(mapped.offset))?;
        if lost < mapped.end {
            return Some(lost);
        }
        let range = mapped.offset..mapped.offset + (mapped.end - mapped.start);
        let unreadable =
            is_protected(mapped.inode).then(|| first_unreadable(mapped.inode, range))??;
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
            let len = len_of(mapped.inode).filter(|len| *len <= offset);
            let protected = is_protected(mapped.inode);
            let file = PathBuf::from(OsStr::from_bytes(mapped.path));
            found = Some(LostBacking { file, offset, len, protected });
        }
        true
    });
    found
}

/// The length of a known regular file, in bytes.
fn len_of(inode: u64) -> Option<u64> {
    let status = files::with(inode, |file| fstat(file))?.ok()?;
    let regular = FileType::from_raw_mode(status.st_mode).is_file();
    regular.then(|| u64::try_from(status.st_size).ok())?
}

/// Whether fs-verity protects a known file. It uses neither heap nor locks.
fn is_protected(inode: u64) -> bool {
    let found =
        files::with(inode, |file| statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::empty()));
    let attributes = found.and_then(Result::ok).map(|found| found.stx_attributes);
    attributes.is_some_and(|attributes| attributes.contains(StatxAttributes::VERITY))
}

/// The first page of a mapping that the kernel does not map (madvise(2), `MADV_POPULATE_READ`).
fn first_absent(mapping: Range<u64>) -> Option<u64> {
    let populate = |start: u64, len: u64| {
        let at = without_provenance_mut(usize_of(start));
        // SAFETY: it changes page tables only, of memory that a microVM which ends still has.
        unsafe { madvise(at, usize_of(len), Advice::LinuxPopulateRead) }
    };
    // Most mappings are whole, for which one call is enough.
    if populate(mapping.start, mapping.end - mapping.start).is_ok() {
        return None;
    }
    let lacks_page = |page: &u64| populate(*page, PAGE_SIZE) == Err(Errno::FAULT);
    mapping.step_by(usize_of(PAGE_SIZE)).find(lacks_page)
}

/// The first page of a known file's range that cannot be read, by its offset.
fn first_unreadable(inode: u64, range: Range<u64>) -> Option<u64> {
    let mut page = vec![0; usize_of(PAGE_SIZE)];
    files::with(inode, |file| {
        range.step_by(usize_of(PAGE_SIZE)).find(|offset| pread(file, &mut page, *offset).is_err())
    })?
}

#[cfg(test)]
mod tests;
