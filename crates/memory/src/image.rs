//! A snapshot's image, to be read: in a file, or in a sealed extent of a pool.

use std::fs::File;
use std::io;

use firn_base::num::usize_of;
use firn_snapshot::{CHUNK_SIZE, ReadAt, Snapshot};
use vm_memory::{MmapRegion, VolatileMemory};

use crate::map::Mapping;

/// The image of a snapshot. Of one in a pool it is the sealed extent, under a replica the one that the replica was made of: the caller
/// keeps it pinned.
pub(crate) fn image_of(snapshot: &Snapshot) -> io::Result<Box<dyn ReadAt>> {
    let Some(extent) = snapshot.extent() else {
        return Ok(Box::new(snapshot.image().try_clone()?));
    };
    let sealed = extent.replica_of.unwrap_or(extent.offset);
    let len = snapshot.manifest().layout.total_bytes();
    Ok(Box::new(Sealed::map(snapshot.image(), sealed, len)?))
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
}

impl ReadAt for Sealed {
    fn size(&self) -> io::Result<u64> {
        Ok(self.view.len() as u64)
    }

    fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        let slice = self.view.get_slice(usize_of(offset), bytes.len());
        let slice = slice.map_err(|beyond| io::Error::new(io::ErrorKind::UnexpectedEof, beyond))?;
        slice.copy_to(bytes);
        Ok(())
    }
}
