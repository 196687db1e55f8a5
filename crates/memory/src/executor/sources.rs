//! The files that a plan is executed with.

use std::fs::File;

use firn_snapshot::{Grant, Packed, PackedFile, Snapshot};

use super::ExecuteError;
use crate::pager::{OnFailure, end_process};
use crate::plan::LoadFile;

/// Where the image of a snapshot is, for mapping.
#[derive(Clone, Copy, Debug)]
pub enum ImageSource<'a> {
    /// The image file of a snapshot in a directory, open for reading. A preload moves its position.
    File(&'a File),
    /// The medium of the pool that the plan's extents are in: read-only where the plan shares the
    /// extent, writable where it maps a replica.
    Medium(&'a File),
}

impl<'a> ImageSource<'a> {
    /// The image file, if it is one.
    pub(crate) fn file(self) -> Option<&'a File> {
        match self {
            Self::File(file) => Some(file),
            Self::Medium(_) => None,
        }
    }

    /// The medium, if it is one.
    pub(super) fn medium(self) -> Option<&'a File> {
        match self {
            Self::Medium(medium) => Some(medium),
            Self::File(_) => None,
        }
    }
}

/// The files that a plan's sources are in, on this host.
#[derive(Clone, Copy, Debug)]
pub struct Sources<'a> {
    /// The image.
    pub image: ImageSource<'a>,
    /// The snapshot, for plans that need its digests or packed files.
    pub snapshot: Option<&'a Snapshot>,
    /// The copy that a pool made for this VM, if any.
    pub copy: Option<&'a File>,
    /// What a pager does when it cannot continue.
    pub on_failure: OnFailure,
}

impl<'a> Sources<'a> {
    /// The sources of an open snapshot: what a pool granted, with [its medium](Grant::take_medium),
    /// or the image file, and the packed file that the planner opened.
    ///
    /// # Errors
    ///
    /// [`ExecuteError::NoGrant`] for a snapshot in a pool without a grant.
    pub fn of(
        snapshot: &'a Snapshot,
        grant: Option<(&'a Grant, &'a File)>,
    ) -> Result<Self, ExecuteError> {
        let image = match (grant, snapshot.image_file()) {
            (Some((_, medium)), _) => ImageSource::Medium(medium),
            (None, Some(file)) => ImageSource::File(file),
            (None, None) => return Err(ExecuteError::NoGrant),
        };
        let copy =
            grant.and_then(|(grant, _)| grant.copies()).and_then(|copies| copies.file.as_ref());
        Ok(Self { image, snapshot: Some(snapshot), copy, on_failure: end_process })
    }

    /// The loading-set file, if the planner opened one.
    pub(crate) fn packed(&self) -> Option<&'a Packed> {
        self.snapshot?.opened_packed(PackedFile::LoadingSet)
    }

    /// The files that guest memory may be mapped from. A pool's medium is not among them: it gives
    /// access to all extents, and is closed before the guest runs.
    pub(crate) fn files(&self) -> impl Iterator<Item = &'a File> {
        let packed = self.packed().map(Packed::file);
        self.image.file().into_iter().chain(packed)
    }

    /// A file to load, with an open file description of its own: a lock and the state of read-ahead
    /// belong to one. An image alone has one only.
    pub(crate) fn loaded(&self, file: LoadFile) -> Option<&'a File> {
        match (file, self.snapshot) {
            (LoadFile::Image, None) => self.image.file(),
            (LoadFile::Image, Some(snapshot)) => snapshot.image_again(),
            (LoadFile::Packed, snapshot) => snapshot?.packed_again(PackedFile::LoadingSet),
        }
    }

    /// An image file and nothing else.
    #[must_use]
    pub fn image(image: &'a File) -> Self {
        let image = ImageSource::File(image);
        Self { image, snapshot: None, copy: None, on_failure: end_process }
    }

    /// A pool's medium and nothing else.
    #[must_use]
    pub fn medium(medium: &'a File) -> Self {
        let image = ImageSource::Medium(medium);
        Self { image, snapshot: None, copy: None, on_failure: end_process }
    }
}
