//! The files of a snapshot's directory.

use serde::{Deserialize, Serialize};

/// The file with everything except image and overlay.
pub(crate) const CONTAINER_FILE: &str = "snapshot.firn";
/// The file with guest memory.
pub(crate) const IMAGE_FILE: &str = "memory.img";
/// The file with the writable disk.
pub(crate) const OVERLAY_FILE: &str = "overlay.img";
/// The file with the signature of the others.
pub(crate) const SIGNATURE_FILE: &str = "snapshot.sig";
/// All files that a snapshot's directory may contain.
pub(crate) const FILES: [&str; 7] = [
    CONTAINER_FILE,
    SIGNATURE_FILE,
    IMAGE_FILE,
    OVERLAY_FILE,
    PackedFile::WorkingSet.name(),
    PackedFile::LoadingSet.name(),
    PackedFile::UsedWorkingSet.name(),
];

/// A file that is packed from a snapshot's image by its profile, so that it can be read
/// sequentially.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PackedFile {
    /// REAP's working-set file (FaaSnap, 2.5; SnapBPF, 2.1).
    WorkingSet,
    /// FaaSnap's loading-set file (FaaSnap, 4.7).
    LoadingSet,
    /// Faast's working-set file: REAP's working-set file without the pages that the guest's
    /// allocator held free (SnapBPF, 2.1).
    UsedWorkingSet,
}

impl PackedFile {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::WorkingSet, Self::LoadingSet, Self::UsedWorkingSet];

    /// Its index in [`ALL`](Self::ALL).
    pub(crate) const fn index(self) -> usize {
        match self {
            Self::WorkingSet => 0,
            Self::LoadingSet => 1,
            Self::UsedWorkingSet => 2,
        }
    }

    /// Its name in the snapshot's directory.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::WorkingSet => "working-set.img",
            Self::LoadingSet => "loading-set.img",
            Self::UsedWorkingSet => "working-set-used.img",
        }
    }

    pub(crate) const fn code(self) -> u32 {
        match self {
            Self::WorkingSet => 1,
            Self::LoadingSet => 2,
            Self::UsedWorkingSet => 3,
        }
    }
}
