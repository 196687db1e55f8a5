//! Attaching data of earlier runs to a snapshot: its profile, and files packed from its image.
//!
//! Each file is written and synced in a staging directory, then renamed into the snapshot's
//! directory. Image, machine state and manifest do not change. A process that has the snapshot open
//! keeps the old files.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, unlinkat};
use rustix::io::Errno;
use thiserror::Error;

use crate::container::{Entry, Header};
use crate::decode::decode_manifest;
use crate::directory::{open_container, open_directory};
use crate::error::{OpenError, OpenPooledError};
use crate::files::{CONTAINER_FILE, PackedFile, SIGNATURE_FILE};
use crate::freeze_error::FreezeError;
use crate::manifest::{Manifest, ProtectedFile};
use crate::profile::{Profile, ProfileError};
use crate::read_at::ReadAt;
use crate::section::{PROFILE_VERSION, Section};
use crate::sparse_file::SparseFile;
use crate::staging::Staging;

/// Maximum number of bytes copied at once.
pub(crate) const COPY: usize = 1 << 20;

/// Why data was not attached to a snapshot. The snapshot is unchanged.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AttachError {
    /// The snapshot cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The snapshot in the pool cannot be opened.
    #[error(transparent)]
    Pool(#[from] OpenPooledError),
    /// The profile is not one of this snapshot.
    #[error("{} cannot have this profile", .path.display())]
    Profile {
        /// The snapshot's directory.
        path: PathBuf,
        /// The reason.
        source: ProfileError,
    },
    /// The pages to pack are not pages of this snapshot.
    #[error("the page list to pack does not match {}", .path.display())]
    Table {
        /// The snapshot's directory.
        path: PathBuf,
        /// The reason.
        source: ProfileError,
    },
    /// The profile cannot be encoded.
    #[error("the profile cannot be encoded: this is a bug in firn")]
    Encode(#[source] postcard::Error),
    /// It could not be written.
    #[error(transparent)]
    Write(#[from] FreezeError),
}

/// Replaces the profile of the snapshot at `path`, and removes its signature. Packed files of the
/// old profile remain; their header identifies the profile that they were packed by.
///
/// # Errors
/// [`AttachError`]; the snapshot is unchanged.
pub fn set_profile(path: &Path, profile: &Profile) -> Result<(), AttachError> {
    let dir = open_directory(path)?;
    let container_path = path.join(CONTAINER_FILE);
    let container = open_container(&dir, path)?;
    let new = Edited::with_profile(&container, &container_path, profile)?;
    replace_container(&Staging::create(path)?, &dir, &container, &container_path, &new)
}

/// Replaces the manifest's list of the files that fs-verity protects, in the snapshot that is open
/// as `dir`, if it differs.
///
/// # Errors
/// [`AttachError`]; the snapshot is unchanged.
pub(crate) fn set_protected(
    dir: &OwnedFd,
    path: &Path,
    protected: Vec<ProtectedFile>,
) -> Result<(), AttachError> {
    edit_protected(&Staging::create(path)?, dir, path, |files| *files = protected)
}

fn edit_protected(
    staging: &Staging,
    dir: &OwnedFd,
    path: &Path,
    edit: impl FnOnce(&mut Vec<ProtectedFile>),
) -> Result<(), AttachError> {
    let container_path = path.join(CONTAINER_FILE);
    let container = open_container(dir, path)?;
    match Edited::with_protected(&container, &container_path, edit)? {
        Some(new) => replace_container(staging, dir, &container, &container_path, &new),
        None => Ok(()),
    }
}

fn replace_container(
    staging: &Staging,
    dir: &OwnedFd,
    container: &File,
    path: &Path,
    new: &Edited,
) -> Result<(), AttachError> {
    let file = staging.create_file(CONTAINER_FILE)?;
    let written = file.try_clone().map_err(|source| FreezeError::Duplicate { source })?;
    let out = SparseFile::new(written, path.to_owned(), new.header.file_len())?;
    new.write(container, path, &mut |at, bytes| out.write(at, bytes))?;
    out.finish()?;
    staging.sync(&file, CONTAINER_FILE)?;
    // A signature of the old file is none of the new one.
    match unlinkat(dir, SIGNATURE_FILE, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(staging.move_into(dir, CONTAINER_FILE)?),
        Err(errno) => {
            let path = path.with_file_name(SIGNATURE_FILE);
            Err(FreezeError::Io { path, action: "remove", source: errno.into() }.into())
        }
    }
}

/// Writes bytes at an offset.
pub(crate) type Put<'a> = dyn FnMut(u64, &[u8]) -> Result<(), FreezeError> + 'a;

/// A container with one section replaced.
pub(crate) struct Edited {
    pub(crate) header: Header,
    pub(crate) manifest: Manifest,
    old: Header,
    section: Section,
    bytes: Vec<u8>,
}

impl Edited {
    /// The container at `path` with this profile, which must match its snapshot.
    pub(crate) fn with_profile(
        container: &dyn ReadAt,
        path: &Path,
        profile: &Profile,
    ) -> Result<Self, AttachError> {
        let (old, manifest) = read_manifest(container, path)?;
        profile
            .check(manifest.description.id, manifest.layout.pages())
            .map_err(|source| AttachError::Profile { path: path.into(), source })?;
        let profile = postcard::to_stdvec(profile).map_err(AttachError::Encode)?;
        let mut header = old.clone();
        header.set(Entry::of(Section::Profile, PROFILE_VERSION, &profile))?;
        Ok(Self { header, manifest, old, section: Section::Profile, bytes: profile })
    }

    /// The container at `path` with another list of protected files; `None` if it does not change.
    fn with_protected(
        container: &dyn ReadAt,
        path: &Path,
        edit: impl FnOnce(&mut Vec<ProtectedFile>),
    ) -> Result<Option<Self>, AttachError> {
        let (old, mut manifest) = read_manifest(container, path)?;
        let before = manifest.protected.clone();
        edit(&mut manifest.protected);
        if manifest.protected == before {
            return Ok(None);
        }
        let (version, bytes) = manifest.encode()?;
        let mut header = old.clone();
        header.set(Entry::of(Section::Manifest, version, &bytes))?;
        header.set_version(version);
        Ok(Some(Self { header, manifest, old, section: Section::Manifest, bytes }))
    }

    /// Writes the container; all other sections are copied from `container`.
    pub(crate) fn write(
        &self,
        container: &dyn ReadAt,
        path: &Path,
        out: &mut Put<'_>,
    ) -> Result<(), AttachError> {
        out(0, &self.header.encode())?;
        for section in Section::TABLE {
            let to = self.header.range(section).start;
            if section == self.section {
                out(to, &self.bytes)?;
            } else {
                copy(container, path, self.old.range(section), to, out)?;
            }
        }
        Ok(())
    }
}

/// Reads the header of the container at `path`, and its manifest.
pub(crate) fn read_manifest(
    container: &dyn ReadAt,
    path: &Path,
) -> Result<(Header, Manifest), OpenError> {
    let header = Header::read(container, path)?;
    let bytes = header.read_section(container, path, Section::Manifest)?;
    let manifest = decode_manifest(bytes, header.version, path)?;
    Ok((header, manifest))
}

/// Replaces a packed file of the snapshot at `path`. `write` writes its content from offset 0.
/// Between the two renames the new file does not match the manifest's digest of the old one, and
/// cannot be used.
///
/// # Errors
/// [`AttachError`]; the snapshot is unchanged.
pub(crate) fn set_packed(
    path: &Path,
    kind: PackedFile,
    write: impl FnOnce(&File) -> std::io::Result<()>,
) -> Result<(), AttachError> {
    let dir: OwnedFd = open_directory(path)?;
    open_container(&dir, path)?;
    let staging = Staging::create(path)?;
    let file = staging.create_file(kind.name())?;
    write(&file).map_err(|source| FreezeError::Io {
        path: path.join(kind.name()),
        action: "write",
        source,
    })?;
    staging.sync(&file, kind.name())?;
    drop(file);
    let protected = staging.protect(kind.name())?;
    staging.move_into(&dir, kind.name())?;
    edit_protected(&staging, &dir, path, |files| {
        files.retain(|file| file.name != kind.name());
        files.extend(protected);
    })
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
