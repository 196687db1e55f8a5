//! Where players' snapshots are made for a measurement: a directory that is gone afterwards.

use std::io;
use std::path::{Path, PathBuf};

use firn_memory::planners::ImageFacts;
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_change, unmount,
};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use tempfile::TempDir;
use thiserror::Error;

/// Why there is no place for snapshots.
#[derive(Debug, Error)]
pub(crate) enum MediumError {
    #[error(
        "making a directory for the players' snapshots in {path}: is it there? --dir names another"
    )]
    Directory { path: PathBuf, source: io::Error },
    #[error(
        "this host does not let firn mount a tmpfs with huge=always, which has the leaves of 2 MiB: it \
         needs root (CAP_SYS_ADMIN) and a kernel with transparent huge pages"
    )]
    HugeTmpfs(#[source] io::Error),
}

/// A directory in `dir`, or in the folder for temporary files.
pub(crate) fn directory(dir: Option<&Path>) -> Result<TempDir, MediumError> {
    let folder = dir.map_or_else(std::env::temp_dir, Path::to_owned);
    tempfile::Builder::new()
        .prefix("firn-bench-")
        .tempdir_in(&folder)
        .map_err(|source| MediumError::Directory { path: folder, source })
}

/// Whether files in a directory are mapped without a page cache.
pub(crate) fn is_dax(directory: &Path) -> bool {
    // Where no file can be made, making the snapshots tells why.
    let file = tempfile::tempfile_in(directory).and_then(|file| ImageFacts::of(&file));
    file.is_ok_and(|file| file.dax)
}

/// A directory on a tmpfs of huge pages. This thread and the processes that it starts see it, and nobody else; it
/// is gone when they are.
#[derive(Debug)]
pub(crate) struct HugeTmpfs(TempDir);

impl HugeTmpfs {
    pub(crate) fn mount() -> Result<Self, MediumError> {
        let directory = directory(None)?;
        let mounted = || {
            // SAFETY: all that this thread loses is to see mounts that others make later.
            unsafe { unshare_unsafe(UnshareFlags::NEWNS) }?;
            mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
            let data = c"huge=always,size=100%";
            mount("firn-bench", directory.path(), "tmpfs", MountFlags::NOSUID, data)
        };
        match mounted() {
            Ok(()) => Ok(Self(directory)),
            Err(errno) => Err(MediumError::HugeTmpfs(io::Error::from(errno))),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for HugeTmpfs {
    fn drop(&mut self) {
        // Then the directory under it is removed.
        let _ = unmount(self.0.path(), UnmountFlags::DETACH);
    }
}
