//! The view through which a monitor reads and writes guest memory.

use std::io;
use std::sync::Arc;

use firn_base::GuestRange;
use vm_memory::bitmap::BS;
use vm_memory::guest_memory::GuestMemorySliceIterator;
use vm_memory::{
    GuestAddress, GuestMemory, GuestMemoryBackend, GuestMemoryError, GuestMemoryMmap,
    GuestMemoryResult, Permissions,
};

use super::Mapped;
use super::chunks::{ChunkCopies, Chunks, CopyChunkError};
use super::write_log::WriteLog;

/// A view of guest memory with vm-memory's traits: devices, boot code and vCPUs read and write
/// through it.
///
/// A caller requests read or write access. Sealed memory (see [`Sharing::Shared`](crate::Sharing))
/// is copied before a slice of it is returned for writing, because a write to the sealed bytes
/// would end this process.
#[derive(Clone, Debug)]
pub struct GuestView {
    mapped: Arc<Mapped>,
    chunks: Option<Arc<Chunks>>,
    written: Option<Arc<WriteLog>>,
}

impl GuestView {
    pub(super) fn new(
        mapped: Arc<Mapped>,
        chunks: Option<Arc<Chunks>>,
        written: Option<Arc<WriteLog>>,
    ) -> Self {
        Self { mapped, chunks, written }
    }

    /// Whether parts of this memory must be copied before they are written.
    pub fn is_sealed(&self) -> bool {
        self.chunks.is_some()
    }

    /// Copies the sealed chunks of a range, so that the guest, KVM and the monitor can write to it.
    /// Returns the number of copied chunks. Addresses outside guest memory are ignored. It may be
    /// called from any thread while vCPUs run: they read the same bytes at any time.
    ///
    /// # Errors
    ///
    /// [`CopyChunkError`]: the guest cannot continue.
    pub fn make_writable(&self, range: GuestRange) -> Result<u64, CopyChunkError> {
        self.chunks.as_ref().map_or(Ok(0), |chunks| chunks.make_writable(range))
    }

    /// Counts a write of the guest that exited to the monitor, for [`ChunkCopies::write_faults`].
    pub fn count_write_fault(&self) {
        if let Some(chunks) = &self.chunks {
            chunks.count_write_fault();
        }
    }

    /// The copies of sealed chunks so far; zero for memory that is not sealed.
    pub fn chunk_copies(&self) -> ChunkCopies {
        self.chunks.as_ref().map(|chunks| chunks.copies()).unwrap_or_default()
    }
}

impl GuestMemory for GuestView {
    type PhysicalMemory = GuestMemoryMmap;
    type Bitmap = ();

    fn check_range(&self, addr: GuestAddress, count: usize, _: Permissions) -> bool {
        GuestMemoryBackend::check_range(&self.mapped.memory, addr, count)
    }

    fn get_slices<'a>(
        &'a self,
        addr: GuestAddress,
        count: usize,
        access: Permissions,
    ) -> GuestMemoryResult<impl GuestMemorySliceIterator<'a, BS<'a, Self::Bitmap>>> {
        if access.has_write() {
            let len = u64::try_from(count).unwrap_or(u64::MAX);
            self.make_writable(GuestRange { start: addr.0, len })
                .map_err(|error| GuestMemoryError::IOError(io::Error::other(error)))?;
            if let Some(written) = &self.written {
                written.mark(addr.0, len);
            }
        }
        Ok(GuestMemoryBackend::get_slices(&self.mapped.memory, addr, count))
    }

    /// The memory itself, where it needs no copies and its writes are not logged.
    fn physical_memory(&self) -> Option<&Self::PhysicalMemory> {
        let plain = !self.is_sealed() && self.written.is_none();
        plain.then_some(&self.mapped.memory)
    }
}
