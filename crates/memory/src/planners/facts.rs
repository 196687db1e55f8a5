//! Facts about an image that planners use.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;

use firn_snapshot::{Grant, Snapshot};
use rustix::fs::{AtFlags, StatxAttributes, StatxFlags, statx};
use serde::Serialize;

use crate::plan::Leaf;

/// Facts about an image that are known without reading it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ImageFacts {
    /// Length in bytes.
    pub len: u64,
    /// Bytes that are allocated on its medium: less than its length where it has holes.
    pub stored: u64,
    /// Whether it is a file of a DAX file system, which is mapped without the page cache (statx(2),
    /// `STATX_ATTR_DAX`).
    pub dax: bool,
    /// Whether it is a file that fs-verity protects, with the digest that the manifest names.
    pub protected: bool,
    /// Its extent, where it is in a pool; otherwise it is a file.
    pub extent: Option<ExtentFacts>,
}

/// Facts about an extent that holds an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ExtentFacts {
    /// The offset of guest memory in the medium, in bytes.
    pub offset: u64,
    /// The largest leaf at which this host maps the medium.
    pub leaf: Leaf,
    /// Whether the kernel supports private mappings of the medium: a device of persistent memory
    /// can only be mapped shared.
    pub private: bool,
    /// Whether it is a replica, which one VM maps and writes to.
    pub replica: bool,
    /// Whether its bytes were verified since the medium was opened.
    pub checked: bool,
}

impl ImageFacts {
    /// The facts about a snapshot's image: the extent that a pool granted, or the image file.
    ///
    /// # Errors
    ///
    /// The error of `fstat`, or [`NotFound`](io::ErrorKind::NotFound) for a snapshot in a pool
    /// without a grant.
    pub fn of_snapshot(snapshot: &Snapshot, grant: Option<&Grant>) -> io::Result<Self> {
        let Some(place) = grant.map(Grant::extent) else {
            let image = snapshot.image_file().ok_or_else(|| {
                io::Error::new(io::ErrorKind::NotFound, "the snapshot has no image file")
            })?;
            let protected = snapshot.image_is_protected();
            return Ok(Self { protected, ..Self::of(image)? });
        };
        let leaves = [Leaf::Size1G, Leaf::Size2M].into_iter();
        let extent = ExtentFacts {
            offset: place.offset,
            leaf: leaves.filter(|leaf| leaf.bytes() <= place.leaf).max().unwrap_or(Leaf::Size4K),
            private: place.private,
            replica: place.replica,
            checked: place.checked,
        };
        Ok(Self::in_pool(snapshot.manifest().layout.total_bytes(), extent))
    }

    /// An image of `len` bytes in a pool.
    pub fn in_pool(len: u64, extent: ExtentFacts) -> Self {
        Self { len, stored: len, extent: Some(extent), ..Self::default() }
    }

    /// The facts about an image file that is of no snapshot.
    ///
    /// # Errors
    ///
    /// The error of `fstat` or `statx`.
    pub fn of(image: &File) -> io::Result<Self> {
        let metadata = image.metadata()?;
        let found = statx(image, c"", AtFlags::EMPTY_PATH, StatxFlags::empty())?;
        let dax = found.stx_attributes.contains(StatxAttributes::DAX);
        // stat(2) counts blocks of 512 bytes, on every file system.
        Ok(Self { len: metadata.len(), stored: metadata.blocks() * 512, dax, ..Self::default() })
    }
}
