//! The files behind a microVM's disks.

use std::path::Path;

use thiserror::Error;

use firn_snapshot::{DiskInfo, Manifest};

use crate::config::{DriveDisk, OverlayBase, ROOT_DRIVE, Scratch};
use crate::open_file::{OpenFile, OpenFileError};
use crate::virtio::{Disk, DiskCache, OpenDiskError, OverlayDisk, ReadOnlyDisk, WritableDisk};

/// Why a disk cannot be used.
#[derive(Debug, Error)]
pub enum DiskError {
    /// The file is not a disk image.
    #[error(transparent)]
    Open(#[from] OpenDiskError),
    /// The snapshot's root disk cannot be opened.
    #[error(
        "cannot open the snapshot's root disk; if the file has moved, pass its new path with --root"
    )]
    Root(#[source] OpenFileError),
    /// The open file is not the disk that the snapshot was made with.
    #[error(
        "cannot use the snapshot's root disk; if the file has moved, pass its new path with --root"
    )]
    OfSnapshot(#[source] firn_snapshot::DiskError),
    /// A disk's descriptor cannot be duplicated.
    #[error("cannot duplicate the descriptor of a disk")]
    Duplicate(#[source] std::io::Error),
}

/// What a drive is besides its content.
pub(super) enum DriveKind {
    /// An image that the snapshot of the microVM names.
    Known(DiskInfo),
    /// An image of a boot, opened a second time: it has no digest yet.
    Booted(OpenFile),
    /// An overlay, which a snapshot contains.
    Overlay,
    /// A file of the caller's, which can be exchanged.
    File { read_only: bool, cache: DiskCache },
}

impl DriveKind {
    /// The entry for a manifest, of a drive that has one. The first call for a disk of a boot reads
    /// all of it.
    pub(super) fn describe(&self, id: &str) -> Result<Option<DiskInfo>, firn_snapshot::DiskError> {
        match self {
            Self::Known(info) => Ok(Some(info.clone())),
            Self::Booted(image) => DiskInfo::of_file(id, &image.path, &image.file).map(Some),
            Self::Overlay | Self::File { .. } => Ok(None),
        }
    }
}

/// Opens the content of a drive. `known` are the images that the microVM's snapshot names.
pub(super) fn open(
    drive: DriveDisk,
    id: &str,
    known: &[DiskInfo],
) -> Result<(Disk, DriveKind), DiskError> {
    match drive {
        DriveDisk::Image(image) => {
            let kind = match known.iter().find(|info| info.id == id) {
                Some(info) => {
                    let info = DiskInfo { path: image.path.clone(), ..info.clone() };
                    info.check_file(&image.file).map_err(DiskError::OfSnapshot)?;
                    DriveKind::Known(info)
                }
                None => {
                    let file = image.file.try_clone().map_err(DiskError::Duplicate)?;
                    DriveKind::Booted(OpenFile { file, path: image.path.clone() })
                }
            };
            Ok((Disk::ReadOnly(ReadOnlyDisk::new(image)?), kind))
        }
        DriveDisk::Overlay { base, size, scratch } => {
            let (scratch, limit) = match scratch {
                Some(Scratch { file, limit }) => (Some(file), limit),
                None => (None, u64::MAX),
            };
            let disk = match base {
                OverlayBase::File(base) => OverlayDisk::new(ReadOnlyDisk::new(base)?, scratch)?,
                OverlayBase::Extent(content) => OverlayDisk::of_extent(content, scratch)?,
            };
            let disk = disk.grown_to(size)?.with_limit(limit);
            Ok((Disk::Overlay(disk), DriveKind::Overlay))
        }
        DriveDisk::File { file, read_only, cache } => {
            let disk = open_file(file, read_only, cache)?;
            Ok((disk, DriveKind::File { read_only, cache }))
        }
    }
}

/// Opens a file of the caller's.
pub(super) fn open_file(
    file: OpenFile,
    read_only: bool,
    cache: DiskCache,
) -> Result<Disk, OpenDiskError> {
    Ok(if read_only {
        Disk::ReadOnly(ReadOnlyDisk::of_any_size(file)?)
    } else {
        Disk::Writable(WritableDisk::new(file, cache)?)
    })
}

/// Opens the root disk that a snapshot's manifest names, if it names one; at `moved` if the file
/// has moved since the freeze. The caller may pass it to a process that is trusted less: a path
/// in a manifest does not open a file whose length and first bytes the manifest does not know.
///
/// # Errors
/// The file cannot be opened, or is not the disk of the freeze.
pub fn open_root_disk(
    manifest: &Manifest,
    moved: Option<&Path>,
) -> Result<Option<OpenFile>, DiskError> {
    let disks = &manifest.description.disks;
    let Some(info) = disks.iter().find(|disk| disk.id == ROOT_DRIVE) else { return Ok(None) };
    let path = moved.unwrap_or(&info.path);
    let info = DiskInfo { path: path.to_owned(), ..info.clone() };
    // Opening a device can have effects.
    if std::fs::metadata(path).is_ok_and(|found| !found.is_file()) {
        let DiskInfo { id, path, .. } = info;
        return Err(DiskError::OfSnapshot(firn_snapshot::DiskError::NotAFile { id, path }));
    }
    let root = OpenFile::open(path).map_err(DiskError::Root)?;
    info.check_file(&root.file).map_err(DiskError::OfSnapshot)?;
    Ok(Some(root))
}

#[cfg(test)]
#[path = "disks_tests.rs"]
mod tests;
