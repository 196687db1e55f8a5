//! Putting what was learnt of a snapshot's runs beside it: its profile, and files packed from its image.
//!
//! Each goes in by one rename within the snapshot's directory, after it was written and synced in a staging directory.
//! Image, machine state and manifest stay as they were frozen; who has the snapshot open keeps what it has.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::container::{CONTAINER_FILE, Entry, Header, PROFILE_VERSION, Section};
use crate::error::OpenError;
use crate::freeze_error::FreezeError;
use crate::image::SparseFile;
use crate::packed::PackedFile;
use crate::profile::{Profile, ProfileError};
use crate::read_at::ReadAt;
use crate::snapshot::{decode_manifest, open_container, open_dir};
use crate::staging::Staging;

/// Most bytes copied at once.
const COPY: usize = 1 << 20;

/// Why nothing was put beside a snapshot. It is as it was.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AttachError {
    /// The snapshot is refused.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The profile is not one of this snapshot.
    #[error("{} cannot have this profile", .path.display())]
    Profile {
        /// The snapshot's directory.
        path: PathBuf,
        /// Why.
        source: ProfileError,
    },
    /// The pages to pack are not pages of this snapshot.
    #[error("{} cannot be packed so", .path.display())]
    Table {
        /// The snapshot's directory.
        path: PathBuf,
        /// Why.
        source: ProfileError,
    },
    /// The profile cannot be encoded.
    #[error("the profile cannot be encoded: a defect of firn")]
    Encode(#[source] postcard::Error),
    /// It could not be written.
    #[error(transparent)]
    Write(#[from] FreezeError),
}

/// Puts a profile into the snapshot at `path`, in the place of the one it has. Packed files of the old profile stay: they
/// name the profile that they were packed by.
///
/// # Errors
/// [`AttachError`]; the snapshot is as it was.
pub fn set_profile(path: &Path, profile: &Profile) -> Result<(), AttachError> {
    let dir = open_dir(path)?;
    let container_path = path.join(CONTAINER_FILE);
    let container = open_container(&dir, path)?;
    let mut header = Header::read(&container, &container_path)?;
    let manifest = header.read_section(&container, &container_path, Section::Manifest)?;
    let manifest = decode_manifest(&manifest, &container_path)?;
    profile
        .check(manifest.description.id, manifest.layout.pages())
        .map_err(|source| AttachError::Profile { path: path.into(), source })?;
    let bytes = postcard::to_stdvec(profile).map_err(AttachError::Encode)?;
    let old = header.clone();
    header.set(Entry::of(Section::Profile, PROFILE_VERSION, &bytes))?;

    let staging = Staging::create(path)?;
    let mut out = SparseFile::new(
        staging.create_file(CONTAINER_FILE)?,
        container_path.clone(),
        header.file_len(),
    )?;
    out.write(0, &header.encode())?;
    for section in Section::TABLE {
        let to = header.range(section).start;
        if section == Section::Profile {
            out.write(to, &bytes)?;
        } else {
            copy(&container, &container_path, old.range(section), to, &mut out)?;
        }
    }
    out.finish()?.sync()?;
    Ok(staging.move_into(&dir, CONTAINER_FILE)?)
}

/// Puts a packed file beside the snapshot at `path`, in the place of the one it has. `write` fills it, from its beginning.
///
/// # Errors
/// [`AttachError`]; the snapshot is as it was.
pub(crate) fn set_packed(
    path: &Path,
    kind: PackedFile,
    write: impl FnOnce(&File) -> std::io::Result<()>,
) -> Result<(), AttachError> {
    let dir: OwnedFd = open_dir(path)?;
    open_container(&dir, path)?;
    let staging = Staging::create(path)?;
    let file = staging.create_file(kind.name())?;
    let written = write(&file).and_then(|()| file.sync_all());
    written.map_err(|source| FreezeError::Io {
        path: path.join(kind.name()),
        action: "write",
        source,
    })?;
    Ok(staging.move_into(&dir, kind.name())?)
}

/// Copies a section's bytes.
fn copy(
    from: &dyn ReadAt,
    path: &Path,
    mut range: std::ops::Range<u64>,
    mut to: u64,
    out: &mut SparseFile,
) -> Result<(), AttachError> {
    let mut buf = vec![0; COPY];
    while !range.is_empty() {
        let len = usize::try_from(range.end - range.start).unwrap_or(usize::MAX).min(COPY);
        let bytes = &mut buf[..len];
        from.read_exact_at(bytes, range.start).map_err(|source| OpenError::Io {
            path: path.into(),
            action: "read",
            source,
        })?;
        out.write(to, bytes)?;
        range.start += len as u64;
        to += len as u64;
    }
    Ok(())
}

#[cfg(test)]
#[path = "attach_tests.rs"]
mod tests;
