//! Where a recorder takes a page's bytes from.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use firn_snapshot::{PAGE_SIZE, Snapshot};
use vm_memory::{Bytes, GuestAddress};

use super::ProfileRecordError;
use super::profile::planned;
use crate::guest_memory::GuestMemory;
use crate::planners::PassShared;

/// The bytes of a snapshot's memory.
#[derive(Debug)]
pub enum Content {
    /// An image file.
    File(File),
    /// A mapping of an extent: not every medium of a pool can be read otherwise.
    Mapped(Box<GuestMemory>),
}

impl Content {
    /// Those of an open snapshot, in a directory or in a pool.
    ///
    /// # Errors
    /// [`ProfileRecordError::Image`], or why the extent was not mapped.
    pub fn of(snapshot: &Snapshot) -> Result<Self, ProfileRecordError> {
        if snapshot.extent().is_some() {
            return Ok(Self::Mapped(Box::new(planned(snapshot, &PassShared)?)));
        }
        Ok(Self::File(snapshot.image().try_clone().map_err(ProfileRecordError::Image)?))
    }

    /// Reads one page.
    pub(super) fn read(&self, guest_page: u64, image_page: u64, page: &mut [u8]) -> io::Result<()> {
        match self {
            Self::File(image) => image.read_exact_at(page, image_page * PAGE_SIZE),
            Self::Mapped(memory) => memory
                .vm_memory()
                .read_slice(page, GuestAddress(guest_page * PAGE_SIZE))
                .map_err(io::Error::other),
        }
    }
}

impl From<File> for Content {
    fn from(image: File) -> Self {
        Self::File(image)
    }
}
