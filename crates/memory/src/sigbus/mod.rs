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

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use thiserror::Error;

use crate::slot::Slot;

pub(crate) use handler::RegisteredSlots;
pub use handler::install;

/// A byte of a mapped file that is lost.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("byte {offset:#x} of {} is lost: {}", file.display(), reason(*len))]
pub struct LostBacking {
    /// The file or device, by the path that it was mapped from.
    pub file: PathBuf,
    /// The byte.
    pub offset: u64,
    /// The file's current length in bytes, where truncation is the reason.
    pub len: Option<u64>,
}

fn reason(len: Option<u64>) -> String {
    match len {
        Some(len) => format!("the file was truncated to {len} bytes while it was in use"),
        None => "its device failed, or the system has no page for it".to_owned(),
    }
}

/// The lost byte at a host address.
pub(crate) fn lost_at(address: u64) -> Option<LostBacking> {
    find(|mapped| (mapped.start..mapped.end).contains(&address).then_some(address))
}

/// The first lost byte of some slots, by the lengths of their files.
pub(crate) fn first_lost(slots: &[Slot]) -> Option<LostBacking> {
    find(|mapped| {
        let contains =
            |slot: &Slot| slot.host_addr <= mapped.start && mapped.end <= slot.host_addr + slot.len;
        if !slots.iter().any(contains) {
            return None;
        }
        let len = len_of(mapped.path)?;
        let lost = mapped.start.checked_add(len.saturating_sub(mapped.offset))?;
        (lost < mapped.end).then_some(lost)
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
            found = Some(LostBacking { file: path(mapped.path), offset, len });
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

#[cfg(test)]
mod tests;
