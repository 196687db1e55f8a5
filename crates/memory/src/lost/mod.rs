//! Guest memory that the host cannot provide any more: its file was truncated, or its device failed.
//!
//! A touch of this process's own is answered by the kernel with SIGBUS, a touch of the guest's by `EFAULT` from `KVM_RUN` (mmap(2), "Errors";
//! KVM's API, section 5, `KVM_EXIT_MEMORY_FAULT`). Either ends the microVM: nothing but the lost bytes could go in their place. Where KVM asks for
//! ever instead of giving `EFAULT`, the monitor's watchdog ends it.
//!
//! What the kernel does not tell, nobody here can: a file that was truncated within a page has zeros in the rest of that page, and one
//! that grew again has zeros for what was cut. Images are not to be written while microVMs run on them.

mod maps;
mod signal;

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use thiserror::Error;

use crate::guest_memory::Slot;

pub(crate) use signal::Told;
pub use signal::report_lost_memory;

/// A byte of a file that is mapped and not there any more.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("byte {offset:#x} of {} is lost: {}", file.display(), reason(*len))]
pub struct LostMemory {
    /// The file or device, as it was called when it was mapped.
    pub file: PathBuf,
    /// The byte.
    pub offset: u64,
    /// Bytes that the file has now, where that is why.
    pub len: Option<u64>,
}

fn reason(len: Option<u64>) -> String {
    match len {
        Some(len) => format!("the file was truncated to {len} bytes while it was in use"),
        None => "its device failed, or the system has no page for it".to_owned(),
    }
}

/// What is lost at a host address.
pub(crate) fn at(address: u64) -> Option<LostMemory> {
    find(|mapped| (mapped.start..mapped.end).contains(&address).then_some(address))
}

/// What is lost first in some slots, as far as the lengths of their files tell.
pub(crate) fn anywhere(slots: &[Slot]) -> Option<LostMemory> {
    find(|mapped| {
        let ours =
            |slot: &Slot| slot.host_addr <= mapped.start && mapped.end <= slot.host_addr + slot.len;
        if !slots.iter().any(ours) {
            return None;
        }
        let len = len_of(mapped.path)?;
        let lost = mapped.start.checked_add(len.saturating_sub(mapped.offset))?;
        (lost < mapped.end).then_some(lost)
    })
}

/// The file's byte at an address that `choose` picks of a mapping.
fn find(choose: impl Fn(&maps::Mapped<'_>) -> Option<u64>) -> Option<LostMemory> {
    let mut found = None;
    // Without /proc nothing is known of it.
    let _ = maps::scan(|mapped| {
        let Some(address) = choose(mapped) else { return false };
        if !mapped.path.is_empty() {
            let offset = mapped.offset + (address - mapped.start);
            let len = len_of(mapped.path).filter(|len| *len <= offset);
            found = Some(LostMemory { file: path(mapped.path), offset, len });
        }
        true
    });
    found
}

fn path(bytes: &[u8]) -> PathBuf {
    PathBuf::from(OsStr::from_bytes(bytes))
}

/// Bytes of a regular file.
fn len_of(bytes: &[u8]) -> Option<u64> {
    let metadata = fs::metadata(path(bytes)).ok()?;
    metadata.is_file().then_some(metadata.len())
}

#[cfg(test)]
mod tests;
