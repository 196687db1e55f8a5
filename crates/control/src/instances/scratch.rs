//! The folder for what guests write to their disks: each has a file there that has no name.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FallocateFlags, Mode, OFlags, fallocate, fstatvfs, openat};
use rustix::io::Errno;

use crate::functions::Version;

/// The name of a guest's disk that no folder can hold, in `/proc/PID/fd`.
const MEMORY_FILE: &str = "/memfd:firn-overlay";

/// The folder.
#[derive(Debug)]
pub(crate) struct Scratch {
    path: PathBuf,
    /// Whether guests' disks take DRAM: the folder is in DRAM, or its file system cannot hold files
    /// without names.
    in_memory: bool,
    /// The file system's device number.
    device: u64,
    /// Size of the smallest disk, bytes.
    smallest: u64,
    /// Limit of what a guest writes to its disk, bytes.
    limit: u64,
    /// Limit of what all guests write to their disks, bytes.
    size: u64,
}

impl Scratch {
    /// Makes the folder where needed. A guest writes at most `limit` bytes to its disk, which is as
    /// large as the file `disk` at least, and all guests together at most `size`: seven eighths of
    /// the free space by default.
    pub(crate) fn open(
        path: PathBuf,
        disk: &Path,
        limit: u64,
        size: Option<u64>,
    ) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
        let device = fs::metadata(&path)?.dev();
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let opened = openat(CWD, &path, flags, Mode::RUSR | Mode::WUSR).and_then(|file| {
            let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(&file, punch, 0, 4096)?;
            Ok(File::from(file))
        });
        let (in_memory, free) = match opened {
            // As `firn_vmm::scratch_file` decides.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => (true, None),
            opened => {
                let file = opened?;
                let in_memory = firn_vmm::is_in_memory(&file)?;
                let system = fstatvfs(&file)?;
                // A file system without a limit has no blocks.
                let free = system.f_bavail.saturating_mul(system.f_frsize);
                (in_memory, (system.f_blocks > 0).then_some(free / 8 * 7))
            }
        };
        // A boot reports a file that is missing.
        let smallest = fs::metadata(disk).map_or(0, |metadata| metadata.len());
        let size = size.or(free).unwrap_or(u64::MAX);
        Ok(Self { path, in_memory, device, smallest, limit, size })
    }

    /// The folder.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Limit of what a guest of `version` writes to its disk, bytes.
    pub(crate) fn disk(&self, version: &Version) -> u64 {
        version.disk().max(self.smallest).min(self.limit)
    }

    /// Limit of what a guest writes to the smallest disk, bytes.
    pub(crate) fn smallest(&self) -> u64 {
        self.smallest.min(self.limit)
    }

    /// Limit of what all guests write to their disks, bytes.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Whether what guests write to their disks takes DRAM.
    pub(crate) fn is_in_memory(&self) -> bool {
        self.in_memory
    }

    /// DRAM that the disk of the guest in a process takes, bytes.
    pub(crate) fn bytes_of(&self, process: u32) -> u64 {
        if !self.in_memory {
            return 0;
        }
        // None of it can be read if the process has ended.
        let descriptors = fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten();
        let disk = |path: PathBuf| {
            let found =
                fs::metadata(&path).ok().filter(|found| found.is_file() && found.nlink() == 0)?;
            let own = found.dev() == self.device
                || fs::read_link(path).ok()?.to_str()?.starts_with(MEMORY_FILE);
            // stat(2) counts in units of 512 bytes.
            own.then_some((found.ino(), found.blocks().saturating_mul(512)))
        };
        let disks: std::collections::BTreeMap<u64, u64> =
            descriptors.flatten().filter_map(|descriptor| disk(descriptor.path())).collect();
        disks.into_values().sum()
    }
}

#[cfg(test)]
#[path = "scratch_tests.rs"]
mod tests;
