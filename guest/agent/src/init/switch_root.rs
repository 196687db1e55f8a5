//! Switching from the initramfs to the assembled root.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::mount::mount_move;
use rustix::process::{chdir, chroot};

use super::SetUpError;
use super::disks::NEW_ROOT;

/// Moves the mounts, frees the initramfs and makes [`NEW_ROOT`] the root, as switch_root(8) does.
pub(super) fn switch_root() -> Result<(), SetUpError> {
    for path in ["/proc", "/sys", "/dev"] {
        let target = format!("{NEW_ROOT}{path}");
        fs::create_dir_all(&target)
            .and_then(|()| Ok(mount_move(path, &target)?))
            .map_err(|source| SetUpError::Path { path: target, source })?;
    }
    free_initramfs().map_err(|source| SetUpError::SwitchRoot { source })?;
    let enter = || {
        chdir(NEW_ROOT)?;
        mount_move(".", "/")?;
        chroot(".")?;
        chdir("/")
    };
    enter().map_err(|error: rustix::io::Errno| SetUpError::SwitchRoot { source: error.into() })
}

/// Removes the files of the initramfs, which would otherwise stay in memory and in every snapshot.
/// Does not touch other file systems mounted below it.
fn free_initramfs() -> io::Result<()> {
    let device = fs::symlink_metadata("/")?.dev();
    for entry in fs::read_dir("/")? {
        let path = entry?.path();
        remove(&path, device)?;
    }
    Ok(())
}

fn remove(path: &Path, device: u64) -> io::Result<()> {
    let metadata = fs::symlink_metadata(path)?;
    if metadata.dev() != device {
        return Ok(());
    }
    if !metadata.is_dir() {
        return fs::remove_file(path);
    }
    for entry in fs::read_dir(path)? {
        remove(&entry?.path(), device)?;
    }
    fs::remove_dir(path)
}
