//! Memory that this process shares with one that it does not trust, to receive bytes from it.

use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use crate::media::{How, Memory};

/// A mapped memfd. Dropping it unmaps it.
///
/// The other process may change any byte at any time, so no reference points into it. A range
/// outside panics.
#[derive(Debug)]
pub struct Window(Memory);

impl Window {
    /// Makes a window of `len` bytes, zeros, with a descriptor for the other process. Its length is
    /// sealed: a window that became shorter would end this process with SIGBUS.
    ///
    /// # Errors
    /// The memory cannot be made or mapped.
    pub fn create(len: u64) -> io::Result<(Self, OwnedFd)> {
        let file = memfd_create("firn-window", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, len)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let how = How { writable: true, synchronous: false, align: firn_base::PAGE_SIZE };
        let memory = Memory::map(&file, 0, len, how)?;
        // One system call takes less time than a fault for each page.
        memory.populate()?;
        Ok((Self(memory), file))
    }

    /// Length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.len()
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.0
    }

    /// Copies bytes out of the window.
    pub fn load(&self, offset: u64, buffer: &mut [u8]) {
        self.0.load(offset, buffer);
    }
}
