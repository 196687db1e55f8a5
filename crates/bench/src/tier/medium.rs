//! The medium of a tier: what it is on this host, and how many bytes it has.

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use procfs::{Current, Meminfo};
use rustix::fs::{StatVfsMountFlags, fstatfs, statvfs};
use serde::{Deserialize, Serialize};

use super::{TierError, file_system};
use crate::medium::is_dax;

/// `TMPFS_MAGIC` of linux/magic.h.
const TMPFS: i64 = 0x0102_1994;

/// The medium of a tier.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum TierMedium {
    /// This host's DRAM, in pages of 4 KiB.
    Dram {},
    /// Reserved huge pages of DRAM.
    HugePages {},
    /// The memory of a NUMA node, such as CXL memory.
    Node {
        /// The node's number.
        node: u32,
    },
    /// A devdax character device.
    Devdax {
        /// The device.
        path: PathBuf,
    },
    /// A directory on a file system that maps its medium directly.
    DaxFs {
        /// The directory.
        path: PathBuf,
    },
    /// A directory on a file system on a block device.
    Disk {
        /// The directory.
        path: PathBuf,
    },
}

/// The bytes of a medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Space {
    /// All bytes.
    pub total: u64,
    /// Bytes that can be used now.
    pub free: u64,
}

impl fmt::Display for TierMedium {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dram {} => f.write_str("DRAM"),
            Self::HugePages {} => f.write_str("huge pages"),
            Self::Node { node } => write!(f, "NUMA node {node}"),
            Self::Devdax { path } => write!(f, "the devdax device {}", path.display()),
            Self::DaxFs { path } => write!(f, "the DAX directory {}", path.display()),
            Self::Disk { path } => write!(f, "the disk directory {}", path.display()),
        }
    }
}

impl TierMedium {
    /// The same medium by an absolute path.
    pub(super) fn absolute(self) -> Self {
        // A missing path stays as it is, and the check reports it.
        let absolute = |path: PathBuf| fs::canonicalize(&path).unwrap_or(path);
        match self {
            Self::Devdax { path } => Self::Devdax { path: absolute(path) },
            Self::DaxFs { path } => Self::DaxFs { path: absolute(path) },
            Self::Disk { path } => Self::Disk { path: absolute(path) },
            other => other,
        }
    }

    /// The directory of a medium that is a file system.
    pub(super) fn directory(&self) -> Option<&Path> {
        match self {
            Self::DaxFs { path } | Self::Disk { path } => Some(path),
            _ => None,
        }
    }

    /// The file system of a medium that is a directory.
    pub(super) fn file_system(&self) -> Result<Option<String>, TierError> {
        let Some(path) = self.directory() else { return Ok(None) };
        let directory = fs::File::open(path).map_err(|source| self.missing(source))?;
        file_system::identity(&directory).map(Some).map_err(|source| self.size(source))
    }

    /// Checks that the medium is there and can be written, and returns its bytes. A directory must
    /// be on `file_system`, if that is known.
    pub(super) fn check(&self, file_system: Option<&str>) -> Result<Space, TierError> {
        match self {
            Self::Dram {} => {
                let memory = self.meminfo()?;
                let free = memory.mem_available.unwrap_or(memory.mem_free);
                Ok(Space { total: memory.mem_total, free })
            }
            Self::HugePages {} => {
                let memory = self.meminfo()?;
                let size = memory.hugepagesize.unwrap_or_default();
                let bytes = |pages: Option<u64>| pages.unwrap_or_default().saturating_mul(size);
                match bytes(memory.hugepages_total) {
                    0 => Err(TierError::NoHugePages(self.clone())),
                    total => Ok(Space { total, free: bytes(memory.hugepages_free) }),
                }
            }
            Self::Node { node } => self.node(*node),
            Self::Devdax { path } => self.devdax(path),
            Self::DaxFs { path } => self.check_directory(path, true, file_system),
            Self::Disk { path } => self.check_directory(path, false, file_system),
        }
    }

    fn meminfo(&self) -> Result<Meminfo, TierError> {
        Meminfo::current().map_err(|error| self.size(io::Error::other(error)))
    }

    fn size(&self, source: io::Error) -> TierError {
        TierError::Size { medium: self.clone(), source }
    }

    fn missing(&self, source: io::Error) -> TierError {
        TierError::Missing { medium: self.clone(), source }
    }

    fn node(&self, node: u32) -> Result<Space, TierError> {
        let path = format!("/sys/devices/system/node/node{node}/meminfo");
        let text = fs::read_to_string(path).map_err(|source| self.missing(source))?;
        let value = |name: &str| {
            let mut words = text.lines().map(|line| line.split_whitespace().skip(2));
            let found = words.find_map(|mut words| {
                (words.next() == Some(name)).then(|| words.next()?.parse::<u64>().ok())
            });
            found.flatten().map(|kib| kib << 10)
        };
        let unknown = || self.size(io::ErrorKind::InvalidData.into());
        Ok(Space {
            total: value("MemTotal:").ok_or_else(unknown)?,
            free: value("MemFree:").ok_or_else(unknown)?,
        })
    }

    fn devdax(&self, path: &Path) -> Result<Space, TierError> {
        let file = fs::metadata(path).map_err(|source| self.missing(source))?;
        let remedy = "`ndctl create-namespace --mode=devdax` makes a devdax device";
        if !file.file_type().is_char_device() {
            let found = "not a character device".to_owned();
            return Err(TierError::Kind { medium: self.clone(), found, remedy });
        }
        let (major, minor) = (rustix::fs::major(file.rdev()), rustix::fs::minor(file.rdev()));
        let size = fs::read_to_string(format!("/sys/dev/char/{major}:{minor}/size"));
        let Some(total) = size.ok().and_then(|size| size.trim().parse().ok()) else {
            let found = "a character device but not a devdax".to_owned();
            return Err(TierError::Kind { medium: self.clone(), found, remedy });
        };
        Ok(Space { total, free: total })
    }

    fn check_directory(
        &self,
        path: &Path,
        dax: bool,
        expected: Option<&str>,
    ) -> Result<Space, TierError> {
        let directory = fs::File::open(path).map_err(|source| self.missing(source))?;
        let kind = |found: &str, remedy| {
            Err(TierError::Kind { medium: self.clone(), found: found.to_owned(), remedy })
        };
        if !directory.metadata().map_err(|source| self.missing(source))?.is_dir() {
            return kind("not a directory", "name a directory on the file system");
        }
        if let (Some(expected), Some(found)) = (expected, self.file_system()?)
            && found != expected
        {
            let (medium, expected) = (self.clone(), expected.to_owned());
            return Err(TierError::OtherFileSystem { medium, expected, found });
        }
        let stat = statvfs(path).map_err(|errno| self.size(errno.into()))?;
        if stat.f_flag.contains(StatVfsMountFlags::RDONLY) {
            return Err(TierError::ReadOnly(self.clone()));
        }
        let system = fstatfs(&directory).map_err(|errno| self.size(errno.into()))?;
        if system.f_type == TMPFS {
            return kind("on tmpfs, which is DRAM", "add it as --medium dram");
        }
        if let Err(source) = tempfile::tempfile_in(path) {
            return Err(TierError::Unwritable { medium: self.clone(), source });
        }
        match (dax, is_dax(path)) {
            (true, false) => {
                return kind(
                    "on a file system without DAX",
                    "mount it with -o dax, or add it as --medium disk",
                );
            }
            (false, true) => return kind("on a DAX file system", "add it as --medium dax"),
            _ => {}
        }
        let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
        Ok(Space { total: bytes(stat.f_blocks), free: bytes(stat.f_bavail) })
    }
}
