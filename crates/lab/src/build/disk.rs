//! Disks: ext4 file systems in files.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

use super::store::remove_tree;
use super::{BuildError, Builder};

/// An ext4 without a journal.
const PLAIN: &str = "-O ^has_journal -m 0 -E lazy_itable_init=1,nodiscard,root_owner=0:0";
/// An ext4 for DAX: files begin at multiples of 2 MiB, so that the kernel can map them with 2 MiB
/// leaves. Mounted without DAX, it has fs-verity.
const DAX: &str = "-O verity -T largefile4 -m 0 \
                   -E stride=512,stripe_width=512,nodiscard,lazy_itable_init=1,root_owner=0:0";

/// The guest's files that the lab's machine gets.
const GUEST_FILES: [&str; 5] =
    ["vmlinux", "initramfs.cpio", "root.erofs", "overlay.ext4", "packages"];

/// The SHA-256 of a text, in the form of `sha256sum`.
pub(super) fn sha256(bytes: impl AsRef<[u8]>) -> String {
    let hex: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{hex}  -")
}

/// An empty disk.
pub(super) struct EmptyDisk {
    /// Its name in the cache.
    pub(super) part: &'static str,
    /// Its size in bytes, and as its key has it.
    pub(super) size: (u64, &'static str),
    /// For messages.
    pub(super) what: &'static str,
    /// Whether it is formatted for DAX.
    pub(super) dax: bool,
}

impl Builder<'_> {
    /// Formats an empty disk.
    pub(super) fn empty_disk(&mut self, disk: &EmptyDisk) -> Result<(), BuildError> {
        let EmptyDisk { part, size: (bytes, size), what, dax } = disk;
        let key = format!("{} {size}", if *dax { 2 } else { 1 });
        if self.store.is_built(part, &key) {
            return Ok(());
        }
        (self.progress)(&format!("formatting {what}"));
        let (file, path) = self.store.fresh_file(part)?;
        file.set_len(*bytes).map_err(BuildError::file("extend", &path))?;
        let mut command = self.mke2fs(if *dax { DAX } else { PLAIN })?;
        self.runner.run(command.arg(path), "")?;
        self.store.publish(part, &key)
    }

    fn mke2fs(&self, options: &str) -> Result<Command, BuildError> {
        let mut command = self.tool("mke2fs")?;
        command.args(["-q", "-F", "-t", "ext4", "-b", "4096"]).args(options.split(' '));
        Ok(command)
    }

    /// Packs the guest's files into the disks of the lab's machine, if both the guest and the lab
    /// are built: one disk with what every guest boots from, one with the images other than the
    /// base.
    pub(super) fn pack_guest(&mut self) -> Result<(), BuildError> {
        let guest = GUEST_FILES.map(|name| self.store.path("guest").join(name));
        let needed = ["lab/l1", "lab/qemu"].map(|part| self.store.path(part));
        if !guest.iter().chain(&needed).all(|path| path.exists()) {
            return Ok(());
        }
        let key = format!("2 {}", sha256(stats(&guest, false)?));
        if !self.store.is_built("lab/guest.ext4", &key) {
            (self.progress)("packing the guest's files for the lab");
            let folder = self.store.fresh_folder("lab/guest")?;
            let images = folder.join("guest/images");
            fs::create_dir_all(&images).map_err(BuildError::file("create the folder", &images))?;
            link(&guest, &folder.join("guest"))?;
            self.pack_disk(&folder, "lab/guest.ext4", &key)?;
        }
        let images = self.images().map_err(BuildError::file("read", self.store.path("guest")))?;
        if images.is_empty() {
            return Ok(());
        }
        let key = format!("1 {}", sha256(stats(&images, true)?));
        if !self.store.is_built("lab/images.ext4", &key) {
            (self.progress)("packing the images for the lab");
            let folder = self.store.fresh_folder("lab/images")?;
            link(&images, &folder)?;
            self.pack_disk(&folder, "lab/images.ext4", &key)?;
        }
        Ok(())
    }

    /// The images other than the base, sorted by name.
    fn images(&self) -> io::Result<Vec<PathBuf>> {
        let mut images = Vec::new();
        match fs::read_dir(self.store.path("guest/images")) {
            Ok(entries) => {
                for entry in entries {
                    images.push(entry?.path());
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        images.retain(|path| path.extension().is_some_and(|end| end == "erofs"));
        images.sort();
        Ok(images)
    }

    /// Makes a disk with the contents of `folder`, and removes the folder.
    fn pack_disk(&mut self, folder: &Path, part: &str, key: &str) -> Result<(), BuildError> {
        let used = used_bytes(folder).map_err(BuildError::file("read", folder))?.div_ceil(1024);
        let (_, path) = self.store.fresh_file(part)?;
        let options = "-O ^has_journal -m 0 -N 64 -E root_owner=0:0";
        let mut command = self.mke2fs(options)?;
        command.arg("-d").arg(folder).arg(path).arg(format!("{}k", used + used / 20 + 8192));
        let null = File::options().write(true).open("/dev/null");
        self.runner.run_into(&mut command, null.map_err(BuildError::file("open", "/dev/null"))?)?;
        remove_tree(folder).map_err(BuildError::file("remove", folder))?;
        self.store.publish(part, key)
    }
}

/// A line for each file: its path with `paths`, its inode, size in bytes and time of modification.
fn stats(files: &[PathBuf], paths: bool) -> Result<String, BuildError> {
    let mut text = String::new();
    for path in files {
        let metadata = fs::metadata(path).map_err(BuildError::file("read", path))?;
        if paths {
            text += &format!("{} ", path.display());
        }
        text += &format!("{} {} {}\n", metadata.ino(), metadata.size(), metadata.mtime());
    }
    Ok(text)
}

fn link(files: &[PathBuf], folder: &Path) -> Result<(), BuildError> {
    files.iter().try_for_each(|file| {
        let name = file.file_name().unwrap_or_default();
        fs::hard_link(file, folder.join(name)).map_err(BuildError::file("link", file))
    })
}

/// The space that a folder and its contents occupy.
fn used_bytes(path: &Path) -> io::Result<u64> {
    let metadata = path.symlink_metadata()?;
    let mut bytes = metadata.blocks() * 512;
    if metadata.is_dir() {
        for entry in fs::read_dir(path)? {
            bytes += used_bytes(&entry?.path())?;
        }
    }
    Ok(bytes)
}

#[cfg(test)]
#[path = "disk_tests.rs"]
mod tests;
