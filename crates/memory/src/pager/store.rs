//! The source of the pages of pagers and recorders.

use std::fs::File;
use std::io;
use std::sync::Arc;

use firn_base::PAGE_SIZE;
use firn_base::num::usize_of;
use firn_snapshot::{CHUNK_PAGES, Content, Digests, ReadAt, Snapshot};

use super::PagerError;

/// An image, with the digests of its pages.
#[derive(Debug)]
pub struct PageStore {
    image: Content,
    digests: Option<Arc<Digests>>,
}

impl PageStore {
    /// The image of a snapshot, with its digests. For a snapshot in a pool it must not outlive the
    /// grant that keeps the extent pinned.
    #[must_use]
    pub fn of(snapshot: &Snapshot) -> Self {
        Self { image: snapshot.image().clone(), digests: Some(snapshot.digests().clone()) }
    }

    /// An image without digests: its pages are not checked.
    #[must_use]
    pub fn unchecked(image: File) -> Self {
        Self { image: Content::File(Arc::new(image)), digests: None }
    }

    /// Reads whole pages and checks each.
    pub(crate) fn read(&self, image_page: u64, bytes: &mut [u8]) -> Result<(), PagerError> {
        let read = self.image.read_exact_at(bytes, image_page * PAGE_SIZE);
        read.map_err(|source| match source.kind() {
            io::ErrorKind::UnexpectedEof => {
                let image_page = (self.image.size().unwrap_or(0) / PAGE_SIZE).max(image_page);
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

    /// Reads and checks all `pages`, before a run in which the kernel maps them unchecked.
    pub(crate) fn check_all(&self, pages: u64) -> Result<(), PagerError> {
        let mut bytes = vec![0; usize_of(CHUNK_PAGES * PAGE_SIZE)];
        for first in (0..pages).step_by(usize_of(CHUNK_PAGES)) {
            let len = CHUNK_PAGES.min(pages - first) * PAGE_SIZE;
            self.read(first, &mut bytes[..usize_of(len)])?;
        }
        Ok(())
    }
}
