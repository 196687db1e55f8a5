//! A snapshot's image, to be read: in a file, or in a sealed extent of a pool.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use firn_snapshot::{CHUNK_SIZE, Snapshot};
use vm_memory::{MmapRegion, VolatileMemory};

use crate::map::Mapping;
use crate::num::usize_of;

/// Where an image is.
#[derive(Debug)]
pub(crate) enum Image {
    File(File),
    Extent(Sealed),
}

impl Image {
    /// The image of a snapshot. Of one in a pool it is the sealed extent, under a replica the one that the replica was made of: the caller
    /// keeps it pinned.
    pub(crate) fn of(snapshot: &Snapshot) -> io::Result<Self> {
        let Some(extent) = snapshot.extent() else {
            return Ok(Self::File(snapshot.image().try_clone()?));
        };
        let sealed = extent.replica_of.unwrap_or(extent.offset);
        let len = snapshot.manifest().layout.total_bytes();
        Ok(Self::Extent(Sealed::map(snapshot.image(), sealed, len)?))
    }

    /// Its length now, in bytes.
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::File(file) => file.metadata().map_or(0, |file| file.len()),
            Self::Extent(sealed) => sealed.view.len() as u64,
        }
    }

    /// Reads image bytes from `offset` on.
    pub(crate) fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        match self {
            Self::File(file) => file.read_exact_at(bytes, offset),
            Self::Extent(sealed) => sealed.read_exact_at(bytes, offset),
        }
    }
}

/// The guest memory that a sealed extent holds. It is mapped, for a device of persistent memory has no `pread`.
#[derive(Debug)]
pub(crate) struct Sealed {
    view: MmapRegion,
    /// What the view is of.
    _mapping: Mapping,
}

impl Sealed {
    /// `len` bytes from `offset` of a pool's medium on. The caller keeps the extent pinned.
    pub(crate) fn map(medium: &File, offset: u64, len: u64) -> io::Result<Self> {
        // A device maps nothing smaller.
        let whole = len.next_multiple_of(CHUNK_SIZE);
        let mapping = Mapping::reserve(whole, CHUNK_SIZE)?;
        mapping.map_sealed(mapping.base(), whole, medium, offset)?;
        let view = mapping.region(mapping.base(), len).map_err(io::Error::other)?;
        Ok(Self { view, _mapping: mapping })
    }

    /// Reads image bytes from `offset` on.
    pub(crate) fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        let slice = self.view.get_slice(usize_of(offset), bytes.len());
        let slice = slice.map_err(|beyond| io::Error::new(io::ErrorKind::UnexpectedEof, beyond))?;
        slice.copy_to(bytes);
        Ok(())
    }
}
