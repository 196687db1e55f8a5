//! Where a pager's pages come from.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use firn_snapshot::{Digests, PAGE_SIZE, Snapshot};

use super::PagerError;

/// An image, and what its pages are compared with.
#[derive(Debug)]
pub struct PageStore {
    image: File,
    digests: Option<Arc<Digests>>,
}

impl PageStore {
    /// The image of a snapshot in a directory, with its digests.
    ///
    /// # Errors
    /// [`PagerError::Read`] when its descriptor cannot be duplicated.
    pub fn of(snapshot: &Snapshot) -> Result<Self, PagerError> {
        let image = snapshot.image().try_clone();
        let image = image.map_err(|source| PagerError::Read { image_page: 0, source })?;
        Ok(Self { image, digests: Some(snapshot.digests().clone()) })
    }

    /// An image without digests: its pages enter as they are.
    #[must_use]
    pub fn unchecked(image: File) -> Self {
        Self { image, digests: None }
    }

    /// Reads whole pages, and checks each.
    pub(super) fn read(&self, image_page: u64, bytes: &mut [u8]) -> Result<(), PagerError> {
        self.image.read_exact_at(bytes, image_page * PAGE_SIZE).map_err(|source| {
            match source.kind() {
                io::ErrorKind::UnexpectedEof => {
                    PagerError::Truncated { image_page, file: "the image" }
                }
                _ => PagerError::Read { image_page, source },
            }
        })?;
        self.check(image_page, bytes)
    }

    pub(super) fn check(&self, image_page: u64, bytes: &[u8]) -> Result<(), PagerError> {
        match &self.digests {
            Some(digests) => Ok(digests.check(image_page, bytes)?),
            None => Ok(()),
        }
    }
}
