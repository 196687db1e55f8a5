//! Protecting the files of a snapshot with fs-verity, where the file system supports it.
//!
//! The kernel then checks every block of such a file when it reads it from the medium, so a mapping
//! of a damaged page ends in SIGBUS and never shows wrong bytes. The manifest has the digests, so
//! that another file in the place of a protected one is found when it is opened.

use std::fs::File;
use std::io;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use firn_base::fs_verity;
use thiserror::Error;

use crate::attach::{AttachError, set_protected};
use crate::directory::{open_directory, open_file};
use crate::error::OpenError;
use crate::files::{IMAGE_FILE, OVERLAY_FILE, PackedFile};
use crate::freeze_error::FreezeError;
use crate::keys::Verifier;
use crate::manifest::ProtectedFile;
use crate::verify::{VerifyError, VerifyReport, verify_content};

/// The files that are protected: those whose bytes a thaw uses without comparing them with digests.
/// Working-set files are compared, and fs-verity would end their direct reads.
pub(crate) const PROTECTED: [&str; 3] = [IMAGE_FILE, OVERLAY_FILE, PackedFile::LoadingSet.name()];

/// How long another process may have a file open for writing: one that a thread of this process
/// starts has a copy of every descriptor until its `execve`.
const WRITER_LIMIT: Duration = Duration::from_secs(1);
const WRITER_INTERVAL: Duration = Duration::from_millis(1);

/// Why the files of a snapshot were not protected.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ProtectError {
    /// The snapshot is damaged, or cannot be examined.
    #[error(transparent)]
    Verify(#[from] VerifyError),
    /// The manifest could not be replaced, or a file not be protected. All content is as it was.
    #[error(transparent)]
    Write(#[from] AttachError),
}

/// Checks all of the snapshot in directory `path`, as [`verify`](crate::verify()) does, and then
/// protects its files with fs-verity and names their digests in the manifest. Where the file system
/// does not support that, it removes the digests of a copied snapshot from the manifest.
///
/// # Errors
/// [`ProtectError`].
pub fn protect(
    path: &Path,
    verifier: Option<&Verifier>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<VerifyReport, ProtectError> {
    let mut report = verify_content(path, verifier, progress)?;
    let dir = open_directory(path).map_err(AttachError::Open)?;
    let mut protected = Vec::new();
    for name in PROTECTED {
        let file = match open_file(&dir, path, name) {
            Err(OpenError::MissingFile { .. }) => continue,
            file => file.map_err(AttachError::Open)?,
        };
        protected.extend(protect_file(&file, path, name).map_err(AttachError::Write)?);
    }
    report.protected = protected.iter().map(|file| file.name.clone()).collect();
    set_protected(&dir, path, protected)?;
    Ok(report)
}

/// Protects file `name` of the snapshot at `path`, if it is one that is to be protected and its
/// file system supports it. It must be synced, and not open for writing.
pub(crate) fn protect_file(
    file: &File,
    path: &Path,
    name: &str,
) -> Result<Option<ProtectedFile>, FreezeError> {
    if !PROTECTED.contains(&name) {
        return Ok(None);
    }
    let begin = Instant::now();
    let digest = loop {
        match fs_verity::protect(file) {
            Err(error)
                if error.kind() == io::ErrorKind::ExecutableFileBusy
                    && begin.elapsed() < WRITER_LIMIT =>
            {
                thread::sleep(WRITER_INTERVAL);
            }
            digest => break digest,
        }
    };
    let digest = digest.map_err(|source| FreezeError::Io {
        path: path.join(name),
        action: "protect with fs-verity",
        source,
    })?;
    Ok(digest.map(|digest| ProtectedFile { name: name.to_owned(), digest }))
}

/// Checks that fs-verity protects an open file, with this digest, if there is one.
pub(crate) fn check_protection(
    file: &File,
    path: &Path,
    expected: Option<&fs_verity::Digest>,
) -> Result<(), OpenError> {
    let Some(expected) = expected else { return Ok(()) };
    let found = fs_verity::measure(file).map_err(|source| OpenError::Io {
        path: path.into(),
        action: "read the fs-verity digest of",
        source,
    })?;
    if found.as_ref() == Some(expected) {
        return Ok(());
    }
    Err(OpenError::Protection { path: path.into(), protected: found.is_some() })
}

#[cfg(test)]
#[path = "protect_tests.rs"]
mod tests;
