//! The bytes that a snapshot takes on a tier.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use firn_snapshot::{OpenError, PackedFile, Snapshot, Verifier};
use thiserror::Error;

use super::{GRANULE, TierMedium};
use crate::cache::IMAGE;

/// The bytes of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapshotSize {
    directory: u64,
    extent: u64,
}

/// Why the size of a snapshot is not known.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SnapshotSizeError {
    /// The snapshot cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A file of it cannot be read.
    #[error("cannot read the size of {path}")]
    Read {
        /// The file or directory.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
}

impl SnapshotSize {
    /// The size of the snapshot in a directory, which the verifier confirms if there is one.
    ///
    /// # Errors
    ///
    /// [`SnapshotSizeError`].
    pub fn of(path: &Path, verifier: Option<&Verifier>) -> Result<Self, SnapshotSizeError> {
        let snapshot = Snapshot::open_signed(path, verifier)?;
        let failed = |path: &Path| {
            let path = path.to_owned();
            |source| SnapshotSizeError::Read { path, source }
        };
        let (mut directory, mut tail) = (0, 0_u64);
        for entry in fs::read_dir(path).map_err(failed(path))? {
            let entry = entry.map_err(failed(path))?;
            let file = entry.metadata().map_err(failed(&entry.path()))?;
            let stored = file.blocks() * 512;
            directory += stored;
            let name = entry.file_name();
            // An extent has guest memory in full, and no packed files.
            if name != IMAGE && !PackedFile::ALL.iter().any(|packed| name == packed.name()) {
                tail += stored;
            }
        }
        let guest = snapshot.manifest().layout.total_bytes();
        let extent = guest.next_multiple_of(GRANULE) + tail.next_multiple_of(GRANULE);
        Ok(Self { directory, extent })
    }

    /// Bytes on a medium: of the directory's files on a file system, of an extent of a pool on
    /// byte-addressable memory, which stores zero pages, too.
    #[must_use]
    pub fn on(&self, medium: &TierMedium) -> u64 {
        if medium.directory().is_some() { self.directory } else { self.extent }
    }
}
