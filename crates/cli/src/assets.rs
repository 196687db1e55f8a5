//! The files that microVMs boot from, in firn's cache.

use std::fs::File;
use std::io;
use std::path::PathBuf;

use clap::Args;
use thiserror::Error;

use crate::lab;

/// Which files to boot from; by default those that `make guest` built.
#[derive(Debug, Clone, Args)]
pub(crate) struct GuestFiles {
    /// Kernel to boot: an uncompressed ELF (vmlinux)
    #[arg(long, value_name = "FILE", default_value_os_t = cached("vmlinux"), hide_default_value = true)]
    pub(crate) kernel: PathBuf,
    /// Initramfs that sets the guest up
    #[arg(long, value_name = "FILE", default_value_os_t = cached("initramfs.cpio"), hide_default_value = true)]
    pub(crate) initramfs: PathBuf,
    /// Root file system; the guest sees it read-only
    #[arg(long, value_name = "FILE", default_value_os_t = cached("root.erofs"), hide_default_value = true)]
    pub(crate) root: PathBuf,
    /// What the guest's writable disk holds at first; the file itself is never written
    #[arg(long, value_name = "FILE", default_value_os_t = cached("overlay.ext4"), hide_default_value = true)]
    pub(crate) overlay: PathBuf,
}

/// A file to boot from cannot be read.
#[derive(Debug, Error)]
#[error(
    "cannot read {path} to boot from: `make guest` builds the guest's files; --{option} names another one"
)]
pub(crate) struct GuestFileError {
    path: PathBuf,
    option: &'static str,
    source: io::Error,
}

impl GuestFiles {
    /// Finds early what is missing, while it is known what each file is for.
    pub(crate) fn check(&self) -> Result<(), GuestFileError> {
        let files = [
            (&self.kernel, "kernel"),
            (&self.initramfs, "initramfs"),
            (&self.root, "root"),
            (&self.overlay, "overlay"),
        ];
        for (path, option) in files {
            File::open(path).map_err(|source| GuestFileError {
                path: path.clone(),
                option,
                source,
            })?;
        }
        Ok(())
    }
}

/// A file of the guest in firn's cache.
pub(crate) fn cached(name: &str) -> PathBuf {
    lab::cache_dir().unwrap_or_default().join("guest").join(name)
}
