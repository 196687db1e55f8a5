//! Where a pager's pages come from, and a recorder's.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use firn_snapshot::{CHUNK_PAGES, Digests, PAGE_SIZE, Snapshot};
use vm_memory::{Bytes, GuestAddress};

use super::PagerError;
use crate::guest_memory::GuestMemory;
use crate::num::usize_of;

/// An image, and what its pages are compared with.
#[derive(Debug)]
pub struct PageStore {
    image: Image,
    digests: Option<Arc<Digests>>,
}

#[derive(Debug)]
enum Image {
    File(File),
    /// A mapping of an extent: not every medium of a pool can be read otherwise.
    Mapped(Box<GuestMemory>),
}

impl PageStore {
    /// The image of a snapshot in a directory, with its digests.
    ///
    /// # Errors
    /// [`PagerError::Read`] when its descriptor cannot be duplicated.
    pub fn of(snapshot: &Snapshot) -> Result<Self, PagerError> {
        let image = snapshot.image().try_clone();
        let image = image.map_err(|source| PagerError::Read { image_page: 0, source })?;
        Ok(Self { image: Image::File(image), digests: Some(snapshot.digests().clone()) })
    }

    /// The extent of a snapshot in a pool, mapped as its guest's memory, with its digests.
    pub(crate) fn mapped(memory: GuestMemory, snapshot: &Snapshot) -> Self {
        let digests = Some(snapshot.digests().clone());
        Self { image: Image::Mapped(Box::new(memory)), digests }
    }

    /// An image without digests: its pages enter as they are.
    #[must_use]
    pub fn unchecked(image: File) -> Self {
        Self { image: Image::File(image), digests: None }
    }

    /// Reads whole pages, and checks each.
    pub(crate) fn read(&self, image_page: u64, bytes: &mut [u8]) -> Result<(), PagerError> {
        self.image.read(image_page, bytes).map_err(|source| match source.kind() {
            io::ErrorKind::UnexpectedEof => {
                let image_page = self.image.pages().max(image_page);
                PagerError::Truncated { image_page, file: "the image" }
            }
            _ => PagerError::Read { image_page, source },
        })?;
        self.check(image_page, bytes)
    }

    pub(super) fn check(&self, image_page: u64, bytes: &[u8]) -> Result<(), PagerError> {
        match &self.digests {
            Some(digests) => Ok(digests.check(image_page, bytes)?),
            None => Ok(()),
        }
    }

    /// Reads and checks all of its `pages`: for a run in which the kernel brings them in, and nobody can check them then.
    pub(crate) fn check_all(&self, pages: u64) -> Result<(), PagerError> {
        let mut bytes = vec![0; usize_of(CHUNK_PAGES * PAGE_SIZE)];
        for first in (0..pages).step_by(usize_of(CHUNK_PAGES)) {
            let len = CHUNK_PAGES.min(pages - first) * PAGE_SIZE;
            self.read(first, &mut bytes[..usize_of(len)])?;
        }
        Ok(())
    }
}

impl Image {
    /// How many it has now.
    fn pages(&self) -> u64 {
        match self {
            Self::File(image) => image.metadata().map_or(0, |file| file.len() / PAGE_SIZE),
            Self::Mapped(memory) => memory.layout().pages(),
        }
    }

    /// Of a mapping one page alone: the next may lie elsewhere.
    fn read(&self, image_page: u64, bytes: &mut [u8]) -> io::Result<()> {
        let offset = image_page * PAGE_SIZE;
        match self {
            Self::File(image) => image.read_exact_at(bytes, offset),
            Self::Mapped(memory) => {
                let address = memory.layout().guest_addr(offset);
                let address = address.ok_or(io::ErrorKind::UnexpectedEof)?;
                let view = memory.vm_memory();
                view.read_slice(bytes, GuestAddress(address)).map_err(io::Error::other)
            }
        }
    }
}
