//! Size and alignment of a devdax device from sysfs; `stat` does not report them (kernel:
//! `drivers/dax/bus.c`).

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use rustix::fs::{Stat, major, minor};

use super::MediumError;

/// A devdax device's entry in sysfs.
#[derive(Debug)]
pub(super) struct Sysfs {
    device: PathBuf,
    directory: PathBuf,
}

impl Sysfs {
    /// The entry of a character device; `None` if the device is not a devdax.
    pub(super) fn of(device: &Path, stat: &Stat) -> Option<Self> {
        let number = stat.st_rdev;
        let directory = PathBuf::from(format!("/sys/dev/char/{}:{}", major(number), minor(number)));
        let subsystem = fs::canonicalize(directory.join("subsystem")).ok()?;
        (subsystem.file_name()? == "dax").then(|| Self { device: device.to_owned(), directory })
    }

    fn number(&self, name: &str) -> Result<u64, MediumError> {
        let path = self.directory.join(name);
        let number = fs::read_to_string(&path).and_then(|text| {
            text.trim().parse().map_err(|error| io::Error::new(ErrorKind::InvalidData, error))
        });
        number.map_err(|source| MediumError::Sysfs { device: self.device.clone(), path, source })
    }

    /// Size, bytes.
    pub(super) fn size(&self) -> Result<u64, MediumError> {
        self.number("size")
    }

    /// The NUMA node of the device, or the nearest one with processors; `None` if the system does
    /// not know it (-1).
    pub(super) fn node(&self) -> Option<u32> {
        fs::read_to_string(self.directory.join("numa_node")).ok()?.trim().parse().ok()
    }

    /// Alignment of mappings, bytes.
    pub(super) fn align(&self) -> Result<u64, MediumError> {
        self.number("align")
    }
}
