//! Where the snapshots of a measurement are made: a temporary directory.

use std::ffi::CStr;
use std::io;
use std::path::{Path, PathBuf};

use firn_memory::planners::ImageFacts;
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_change, unmount,
};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use tempfile::TempDir;
use thiserror::Error;

/// Why there is no directory for snapshots.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MediumError {
    /// The directory cannot be created.
    #[error(
        "cannot create a directory for the players' snapshots in {path}: check that it exists, or name another with \
         --dir"
    )]
    Directory {
        /// The folder for the directory.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A tmpfs with huge pages cannot be mounted.
    #[error(
        "cannot mount a tmpfs with huge=always for leaves of 2 MiB: run as root (CAP_SYS_ADMIN), on a kernel with \
         transparent huge pages"
    )]
    HugeTmpfs(#[source] io::Error),
}

/// Creates a directory in `dir`, or in the directory for temporary files.
pub(crate) fn directory(dir: Option<&Path>) -> Result<TempDir, MediumError> {
    let folder = dir.map_or_else(std::env::temp_dir, Path::to_owned);
    tempfile::Builder::new()
        .prefix("firn-bench-")
        .tempdir_in(&folder)
        .map_err(|source| MediumError::Directory { path: folder, source })
}

/// Whether files in a directory are mapped without a page cache.
pub(crate) fn is_dax(directory: &Path) -> bool {
    // If no file can be created here, making the snapshots reports why.
    let file = tempfile::tempfile_in(directory).and_then(|file| ImageFacts::of(&file));
    file.is_ok_and(|file| file.dax)
}

/// A directory with a file system of its own. It is visible to this thread, to threads that it
/// starts from then on, and to the processes that they start, and is unmounted on drop.
#[derive(Debug)]
pub(crate) struct PrivateMount(TempDir);

impl PrivateMount {
    /// A tmpfs of huge pages.
    pub(crate) fn huge_tmpfs() -> Result<Self, MediumError> {
        Self::tmpfs(c"huge=always,size=100%").map_err(MediumError::HugeTmpfs)
    }

    /// A tmpfs with these options.
    pub(crate) fn tmpfs(options: &CStr) -> io::Result<Self> {
        Self::mount("firn-bench".as_ref(), "tmpfs", options)
    }

    /// A file system of a device.
    pub(crate) fn mount(source: &Path, kind: &str, options: &CStr) -> io::Result<Self> {
        let directory = directory(None).map_err(io::Error::other)?;
        // SAFETY: this thread leaves the process's mount namespace. It only loses sight of later
        // mounts of others.
        unsafe { unshare_unsafe(UnshareFlags::NEWNS) }?;
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
        mount(source, directory.path(), kind, MountFlags::NOSUID, options)?;
        Ok(Self(directory))
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for PrivateMount {
    fn drop(&mut self) {
        // The directory itself is removed after this.
        let _ = unmount(self.0.path(), UnmountFlags::DETACH);
    }
}
