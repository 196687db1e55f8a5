//! The files of a snapshot's directory, open.

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::fs::fstat;
use serde::{Deserialize, Serialize};

use crate::attach::read_manifest;
use crate::directory::{MAX_ATTEMPTS, SnapshotDirectory};
use crate::error::OpenError;
use crate::files::{CONTAINER_FILE, IMAGE_FILE, OVERLAY_FILE, PackedFile, SIGNATURE_FILE};
use crate::keys::Verifier;
use crate::manifest::Manifest;
use crate::signature::open_checked;

/// The files of one snapshot in a directory, read-only. `F` is an open file, or what stands for one
/// in a message to another process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SnapshotFiles<F = File> {
    /// `snapshot.firn`.
    pub container: F,
    /// `snapshot.sig`, if the snapshot is signed.
    pub signature: Option<F>,
    /// `memory.img`, if it is there.
    pub image: Option<OpenTwice<F>>,
    /// `overlay.img`, if there is one.
    pub overlay: Option<F>,
    /// The packed files that exist, in the order of [`PackedFile::ALL`].
    pub packed: [Option<OpenTwice<F>>; PackedFile::ALL.len()],
}

/// A file that is open twice, because a lock, the state of read-ahead and `O_DIRECT` belong to an
/// open file description.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct OpenTwice<F = File> {
    /// For mapping and reading.
    pub file: F,
    /// For what loads the file: of a working set with `O_DIRECT`, where the file system supports
    /// it.
    pub again: F,
}

impl OpenTwice {
    /// Opens a file for reading.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn open(path: &Path) -> io::Result<Self> {
        Ok(Self { file: File::open(path)?, again: File::open(path)? })
    }
}

impl SnapshotFiles {
    /// Opens the files of the snapshot in directory `path`. All of them are of one snapshot: they
    /// are opened through one descriptor of the directory, which is at its path afterwards, and a
    /// replaced directory loses its files only after it has left its path. If another snapshot
    /// replaces this one during the call, that one is opened.
    ///
    /// # Errors
    /// [`OpenError`] when there is no snapshot, or when a file cannot be opened. The contents are
    /// checked by [`Snapshot::of_files`](crate::Snapshot::of_files).
    pub fn open(path: &Path) -> Result<(Self, SnapshotDirectory), OpenError> {
        for _ in 0..MAX_ATTEMPTS {
            let directory = SnapshotDirectory::open(path)?;
            let files = Self::open_in(&directory);
            if !directory.was_replaced()
                && let Some(files) = files?
            {
                return Ok((files, directory));
            }
        }
        Err(OpenError::Replaced { path: path.into(), attempts: MAX_ATTEMPTS })
    }

    /// `None` if a file was replaced meanwhile.
    fn open_in(directory: &SnapshotDirectory) -> Result<Option<Self>, OpenError> {
        let container = directory.open_container()?;
        let mut replaced = false;
        let mut twice = |name, again: Result<Option<File>, OpenError>| {
            let (Some(file), Some(again)) = (directory.open_optional(name)?, again?) else {
                return Ok::<_, OpenError>(None);
            };
            replaced |= !is_same(&file, &again);
            Ok(Some(OpenTwice { file, again }))
        };
        let image = twice(IMAGE_FILE, directory.open_optional(IMAGE_FILE))?;
        let mut packed = [const { None }; PackedFile::ALL.len()];
        for (slot, kind) in packed.iter_mut().zip(PackedFile::ALL) {
            let again = match kind {
                PackedFile::WorkingSet | PackedFile::UsedWorkingSet => {
                    directory.open_direct(kind.name())
                }
                PackedFile::LoadingSet => directory.open_optional(kind.name()),
            };
            *slot = twice(kind.name(), again)?;
        }
        let signature = directory.open_optional(SIGNATURE_FILE)?;
        let overlay = directory.open_optional(OVERLAY_FILE)?;
        Ok((!replaced).then_some(Self { container, signature, image, overlay, packed }))
    }

    /// Reads the manifest alone, once the verifier has confirmed it if there is one. `path` is the
    /// snapshot's path, for errors.
    ///
    /// # Errors
    /// [`OpenError`] when the container is damaged, of another version, or not signed.
    pub fn manifest(
        &self,
        path: &Path,
        verifier: Option<&Verifier>,
    ) -> Result<Manifest, OpenError> {
        let container_path = path.join(CONTAINER_FILE);
        let container = self.container.try_clone().map_err(|source| OpenError::Io {
            path: container_path.clone(),
            action: "duplicate the descriptor of",
            source,
        })?;
        let opened = open_checked(container, self.signature.as_ref(), path, verifier)?;
        let (_, manifest) = read_manifest(&opened.container, &container_path)?;
        Ok(manifest)
    }
}

/// Whether both are open files of one file.
fn is_same(a: &File, b: &File) -> bool {
    match (fstat(a), fstat(b)) {
        (Ok(a), Ok(b)) => (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino),
        _ => false,
    }
}

impl<F> SnapshotFiles<F> {
    /// Replaces each file by what `each` makes of it.
    ///
    /// # Errors
    /// The first error of `each`.
    pub fn try_map<G, E>(
        self,
        mut each: impl FnMut(F) -> Result<G, E>,
    ) -> Result<SnapshotFiles<G>, E> {
        let Self { container, signature, image, overlay, packed } = self;
        let mut files = SnapshotFiles {
            container: each(container)?,
            signature: signature.map(&mut each).transpose()?,
            image: image.map(|image| image.try_map(&mut each)).transpose()?,
            overlay: overlay.map(&mut each).transpose()?,
            packed: [const { None }; PackedFile::ALL.len()],
        };
        for (to, from) in files.packed.iter_mut().zip(packed) {
            *to = from.map(|file| file.try_map(&mut each)).transpose()?;
        }
        Ok(files)
    }
}

impl<F> OpenTwice<F> {
    fn try_map<G, E>(self, each: &mut impl FnMut(F) -> Result<G, E>) -> Result<OpenTwice<G>, E> {
        Ok(OpenTwice { file: each(self.file)?, again: each(self.again)? })
    }
}
