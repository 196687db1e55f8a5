//! The files behind a microVM's disks.

use std::io;
use std::path::Path;
use std::sync::Arc;

use thiserror::Error;

use firn_snapshot::{Content, DiskInfo, Manifest, ReadAt, Snapshot};

use crate::open_file::{OpenFile, OpenFileError};
use crate::virtio::{OpenDiskError, ReadOnlyDisk};

/// Name of the root disk in a snapshot's manifest, and to the guest.
pub(super) const ROOT: &str = "root";

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
    /// The snapshot has a root disk, and the caller opened none: a defect of firn.
    #[error("the snapshot has a root disk, but no open file was passed for it")]
    NoRoot,
    /// The open file is not the disk that the snapshot was made with.
    #[error(
        "cannot use the snapshot's root disk; if the file has moved, pass its new path with --root"
    )]
    OfSnapshot(#[source] firn_snapshot::DiskError),
    /// A disk's descriptor cannot be duplicated.
    #[error("cannot duplicate the descriptor of a disk")]
    Duplicate(#[source] io::Error),
    /// The snapshot lacks the writable disk: a defect of the writer.
    #[error("the snapshot has a root disk, but no writable disk")]
    NoOverlay,
}

/// The files behind a microVM's disks.
pub(super) struct Disks {
    pub(super) root: ReadOnlyDisk,
    pub(super) root_info: RootInfo,
    pub(super) overlay: OverlayBase,
    /// Size of the writable disk, if it is larger than `overlay`, bytes.
    pub(super) disk_size: u64,
}

/// The root disk's entry in a manifest.
pub(super) enum RootInfo {
    /// The entry of the snapshot that the microVM was restored from.
    Known(DiskInfo),
    /// The disk of a boot, opened a second time: it has no digest yet.
    Booted(OpenFile),
}

/// The initial content of the writable disk.
pub(super) enum OverlayBase {
    File(ReadOnlyDisk),
    Extent(Arc<dyn ReadAt>),
}

impl RootInfo {
    /// The entry for a manifest. The first call for a disk of a boot reads all of it.
    pub(super) fn describe(&self) -> Result<DiskInfo, firn_snapshot::DiskError> {
        match self {
            Self::Known(info) => Ok(info.clone()),
            Self::Booted(root) => DiskInfo::of_file(ROOT, &root.path, &root.file),
        }
    }
}

impl Disks {
    /// The disks of a microVM that boots.
    pub(super) fn of_boot(
        root: OpenFile,
        overlay: OpenFile,
        disk_size: u64,
    ) -> Result<Self, DiskError> {
        let file = root.file.try_clone().map_err(DiskError::Duplicate)?;
        Ok(Self {
            root_info: RootInfo::Booted(OpenFile { file, path: root.path.clone() }),
            root: ReadOnlyDisk::new(root)?,
            overlay: OverlayBase::File(ReadOnlyDisk::new(overlay)?),
            disk_size,
        })
    }

    /// The disks of a snapshot's microVM, if it has any; `root` is the open root disk.
    pub(super) fn of_snapshot(
        snapshot: &Snapshot,
        root: Option<OpenFile>,
    ) -> Result<Option<Self>, DiskError> {
        let Some(info) = root_info(snapshot.manifest()) else { return Ok(None) };
        let root = root.ok_or(DiskError::NoRoot)?;
        let info = DiskInfo { path: root.path.clone(), ..info.clone() };
        info.check_file(&root.file).map_err(DiskError::OfSnapshot)?;
        let overlay = match snapshot.overlay().ok_or(DiskError::NoOverlay)? {
            Content::File(file) => {
                let file = file.try_clone().map_err(DiskError::Duplicate)?;
                let path = snapshot.path().to_owned();
                OverlayBase::File(ReadOnlyDisk::new(OpenFile { file, path })?)
            }
            Content::Extent(content) => OverlayBase::Extent(content.clone()),
        };
        Ok(Some(Self {
            root: ReadOnlyDisk::new(root)?,
            root_info: RootInfo::Known(info),
            overlay,
            disk_size: 0,
        }))
    }
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
    let Some(info) = root_info(manifest) else { return Ok(None) };
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

fn root_info(manifest: &Manifest) -> Option<&DiskInfo> {
    manifest.description.disks.iter().find(|disk| disk.id == ROOT)
}

#[cfg(test)]
#[path = "disks_tests.rs"]
mod tests;
