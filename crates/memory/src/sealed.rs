//! A sealed extent, to be read.

use std::fs::File;
use std::io;

use firn_snapshot::CHUNK_SIZE;
use vm_memory::{MmapRegion, VolatileMemory};

use crate::map::Mapping;
use crate::num::usize_of;

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
        let slice = self.view.get_slice(usize_of(offset), bytes.len()).map_err(io::Error::other)?;
        slice.copy_to(bytes);
        Ok(())
    }
}
