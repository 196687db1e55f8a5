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
use crate::grant::OpenPooledError;
use crate::image::SparseFile;
use crate::manifest::Manifest;
use crate::packed::PackedFile;
use crate::profile::{Profile, ProfileError};
use crate::read_at::ReadAt;
use crate::snapshot::{decode_manifest, open_container, open_dir};
use crate::staging::Staging;

/// Most bytes copied at once.
pub(crate) const COPY: usize = 1 << 20;

/// Why nothing was put beside a snapshot. It is as it was.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AttachError {
    /// The snapshot is refused.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The pool does not give the snapshot.
    #[error(transparent)]
    Pool(#[from] OpenPooledError),
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
    let new = WithProfile::of(&container, &container_path, profile)?;
    let staging = Staging::create(path)?;
    let mut out = SparseFile::new(
        staging.create_file(CONTAINER_FILE)?,
        container_path.clone(),
        new.header.file_len(),
    )?;
    new.write(&container, &container_path, &mut |at, bytes| out.write(at, bytes))?;
    out.finish()?.sync()?;
    Ok(staging.move_into(&dir, CONTAINER_FILE)?)
}

/// Takes bytes for an offset.
pub(crate) type Put<'a> = dyn FnMut(u64, &[u8]) -> Result<(), FreezeError> + 'a;

/// A container as it is with another profile.
pub(crate) struct WithProfile {
    pub(crate) header: Header,
    pub(crate) manifest: Manifest,
    old: Header,
    profile: Vec<u8>,
}

impl WithProfile {
    /// The container at `path` with this profile, which has to be one of its snapshot.
    pub(crate) fn of(
        container: &dyn ReadAt,
        path: &Path,
        profile: &Profile,
    ) -> Result<Self, AttachError> {
        let old = Header::read(container, path)?;
        let manifest = old.read_section(container, path, Section::Manifest)?;
        let manifest = decode_manifest(&manifest, path)?;
        profile
            .check(manifest.description.id, manifest.layout.pages())
            .map_err(|source| AttachError::Profile { path: path.into(), source })?;
        let profile = postcard::to_stdvec(profile).map_err(AttachError::Encode)?;
        let mut header = old.clone();
        header.set(Entry::of(Section::Profile, PROFILE_VERSION, &profile))?;
        Ok(Self { header, manifest, old, profile })
    }

    /// Writes it, with all other sections as they are in `container`.
    pub(crate) fn write(
        &self,
        container: &dyn ReadAt,
        path: &Path,
        out: &mut Put<'_>,
    ) -> Result<(), AttachError> {
        out(0, &self.header.encode())?;
        for section in Section::TABLE {
            let to = self.header.range(section).start;
            if section == Section::Profile {
                out(to, &self.profile)?;
            } else {
                copy(container, path, self.old.range(section), to, out)?;
            }
        }
        Ok(())
    }
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

/// Copies bytes from a range to another place.
pub(crate) fn copy(
    from: &dyn ReadAt,
    path: &Path,
    mut range: std::ops::Range<u64>,
    mut to: u64,
    out: &mut Put<'_>,
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
        out(to, bytes)?;
        range.start += len as u64;
        to += len as u64;
    }
    Ok(())
}

#[cfg(test)]
#[path = "attach_tests.rs"]
mod tests;
