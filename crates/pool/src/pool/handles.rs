//! What operations hand out: each gives up what it holds when it is dropped.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::error::PublishError;
use super::imaging::{Imaging, PageRun, Task};
use super::inner::Inner;
use crate::extent::Extent;
use crate::mapped_extent::{MapExtentError, MappedExtent};
use crate::media::Access;

/// An extent that is being written. Nobody sees it before [`Staging::publish`]; dropped, its space is free again.
#[derive(Debug)]
pub struct Staging {
    inner: Arc<Inner>,
    granule: u32,
    extent: Extent,
    done: bool,
}

impl Staging {
    pub(super) fn new(inner: Arc<Inner>, granule: u32) -> Self {
        let record = inner.state().record(granule);
        let extent = inner.extent(granule, &record);
        Self { inner, granule, extent, done: false }
    }

    /// Where it is.
    #[must_use]
    pub fn extent(&self) -> Extent {
        self.extent
    }

    /// Writes a part of guest memory, `offset` bytes from its begin, and starts making it durable.
    ///
    /// # Panics
    /// The range is not within guest memory.
    pub fn write_guest(&self, offset: u64, bytes: &[u8]) {
        self.write(self.extent.offset, self.extent.guest_bytes, offset, bytes);
    }

    /// Writes a part of the tail, `offset` bytes from its begin, and starts making it durable.
    ///
    /// # Panics
    /// The range is not within the tail.
    pub fn write_tail(&self, offset: u64, bytes: &[u8]) {
        self.write(self.extent.tail_offset, self.extent.tail_bytes, offset, bytes);
    }

    fn write(&self, begin: u64, room: u64, offset: u64, bytes: &[u8]) {
        let len = super::scan::length(bytes);
        assert!(offset.checked_add(len).is_some_and(|end| end <= room), "within the extent");
        self.inner.medium().store(begin + offset, bytes);
        self.inner.medium().flush(begin + offset, len);
    }

    /// The extent mapped for writing. Flush it before [`Staging::publish`].
    ///
    /// # Errors
    /// The system refuses; a simulated medium cannot be mapped.
    pub fn map(&self) -> Result<MappedExtent, MapExtentError> {
        map(&self.inner, self.extent, Access::Write)
    }

    /// Makes the extent the snapshot of its name, in one step. What the name had before stays readable where it is pinned, and is
    /// freed otherwise. The content must have been flushed ([`MappedExtent::flush`]; the writes of this type are).
    ///
    /// # Errors
    /// The name has what it had, unless the medium failed at the very last: then the pool must be opened again to know.
    pub fn publish(mut self) -> Result<Extent, PublishError> {
        let extent = self.inner.publish(self.granule)?;
        self.done = true;
        Ok(extent)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !self.done {
            self.inner.abandon(self.granule);
        }
    }
}

/// A snapshot's extent that keeps its bytes for as long as this lives.
#[derive(Debug)]
pub struct Pin {
    inner: Arc<Inner>,
    granule: u32,
    extent: Extent,
    name: String,
}

impl Pin {
    pub(super) fn new(inner: Arc<Inner>, granule: u32, name: String) -> Self {
        let record = inner.state().record(granule);
        let extent = inner.extent(granule, &record);
        Self { inner, granule, extent, name }
    }

    pub(super) fn granule(&self) -> u32 {
        self.granule
    }

    /// Where it is.
    #[must_use]
    pub fn extent(&self) -> Extent {
        self.extent
    }

    /// The name that it was pinned by.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The extent mapped for reading.
    ///
    /// # Errors
    /// The system refuses; a simulated medium cannot be mapped.
    pub fn map(&self) -> Result<MappedExtent, MapExtentError> {
        map(&self.inner, self.extent, Access::Read)
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.inner.unpin(self.granule);
    }
}

/// An extent for one microVM to run in; dropped, its space is free again.
#[derive(Debug)]
pub struct Replica {
    inner: Arc<Inner>,
    granule: u32,
    extent: Extent,
    source: Pin,
}

impl Replica {
    pub(super) fn new(inner: Arc<Inner>, granule: u32, source: Pin) -> Self {
        let record = inner.state().record(granule);
        let extent = inner.extent(granule, &record);
        Self { inner, granule, extent, source }
    }

    /// Where it is.
    #[must_use]
    pub fn extent(&self) -> Extent {
        self.extent
    }

    /// Makes guest memory equal to the snapshot's: compares all of it and copies what differs. No microVM may run in the replica
    /// meanwhile. The result need not be durable, because recovery frees replicas. Returns `None` if `stop`, which is
    /// called before each piece, returned true.
    pub(crate) fn image_until(&self, stop: impl FnMut() -> bool) -> Option<Imaging> {
        self.task().image_all(stop)
    }

    /// Same as [`Replica::image_until`], but compares only the pages in `written` and a sample of the others, which `list`, the number
    /// of the list, selects. If the sample finds a difference, all of guest memory is compared.
    pub(crate) fn image_listed(
        &self,
        written: &[PageRun],
        list: u64,
        stop: impl FnMut() -> bool,
    ) -> Option<Imaging> {
        self.task().image_listed(written, list, stop)
    }

    fn task(&self) -> Task<'_> {
        Task {
            medium: &**self.inner.medium(),
            from: self.source.extent.offset,
            to: self.extent.offset,
            size: self.extent.guest_bytes,
        }
    }

    /// The snapshot that it is a replica of, which it pins.
    #[must_use]
    pub fn source(&self) -> &Pin {
        &self.source
    }

    /// The extent mapped for writing.
    ///
    /// # Errors
    /// The system refuses; a simulated medium cannot be mapped.
    pub fn map(&self) -> Result<MappedExtent, MapExtentError> {
        map(&self.inner, self.extent, Access::Write)
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.inner.abandon(self.granule);
    }
}

fn map(inner: &Inner, extent: Extent, access: Access) -> Result<MappedExtent, MapExtentError> {
    let medium = inner.medium();
    let descriptor: io::Result<OwnedFd> = medium.descriptor(access);
    let descriptor = descriptor.map_err(|source| MapExtentError { extent, source })?;
    let facts = medium.facts();
    let granule = inner.superblock().granule;
    MappedExtent::map(descriptor, extent, granule, facts.durability, access)
}
