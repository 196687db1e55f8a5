//! Handles to extents. Dropping a handle releases its extent.

use std::io::ErrorKind;
use std::ops::Range;
use std::sync::Arc;

use super::error::{AllocateError, MediumFailure, PublishError};
use super::imaging::{Imaging, image};
use super::inner::Inner;
use crate::extent::Extent;
use crate::mapped_extent::{MapExtentError, MappedExtent};
use crate::media::{Access, ExtentDescriptor};

/// An extent that is being written. It becomes visible with [`Staging::publish`]. Dropping the
/// value frees the extent.
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

    /// Location on the medium.
    #[must_use]
    pub fn extent(&self) -> Extent {
        self.extent
    }

    /// The parts of the extent that were zero when it was allocated: ascending offsets from its
    /// beginning, in bytes.
    #[must_use]
    pub fn zeroed(&self) -> Vec<Range<u64>> {
        let state = self.inner.state();
        let zeroed = state.held.get(&self.granule).map(|held| held.zeroed.clone());
        let begin = self.extent.offset;
        let zeroed = zeroed.unwrap_or_default().into_iter();
        zeroed.map(|part| part.start - begin..part.end - begin).collect()
    }

    /// Writes to guest memory, `offset` bytes from its beginning, and starts making the bytes
    /// durable.
    ///
    /// # Panics
    /// The range is not within guest memory.
    pub fn write_guest(&self, offset: u64, bytes: &[u8]) {
        self.write(self.extent.offset, self.extent.guest_bytes, offset, bytes);
    }

    /// Writes to the tail, `offset` bytes from its beginning, and starts making the bytes durable.
    ///
    /// # Panics
    /// The range is not within the tail.
    pub fn write_tail(&self, offset: u64, bytes: &[u8]) {
        self.write(self.extent.tail_offset, self.extent.tail_bytes, offset, bytes);
    }

    fn write(&self, begin: u64, room: u64, offset: u64, bytes: &[u8]) {
        let len = super::scan::length(bytes);
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= room),
            "the range must be within the extent"
        );
        self.inner.medium().store(begin + offset, bytes);
        self.inner.medium().flush(begin + offset, len);
    }

    /// Maps the extent for writing. Flush it before [`Staging::publish`].
    ///
    /// # Errors
    /// Mapping fails. A simulated medium cannot be mapped.
    pub fn map(&self) -> Result<MappedExtent, MapExtentError> {
        map(&self.inner, self.extent, Access::Write)
    }

    /// Makes the extent the snapshot of its name, atomically. The name's previous snapshot stays
    /// readable while it is pinned and is freed afterwards. The content must be flushed before:
    /// [`MappedExtent::flush`] does it, and the writes of this type are flushed.
    ///
    /// # Errors
    /// The name keeps its previous snapshot. If the medium failed during the commit, opening the
    /// pool again shows which snapshot the name has.
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

/// A pinned snapshot: its extent keeps its bytes until this value is dropped.
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

    pub(super) fn inner(&self) -> &Inner {
        &self.inner
    }

    /// Location on the medium.
    #[must_use]
    pub fn extent(&self) -> Extent {
        self.extent
    }

    /// The name by which it was pinned.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Maps the extent for reading.
    ///
    /// # Errors
    /// Mapping fails. A simulated medium cannot be mapped.
    pub fn map(&self) -> Result<MappedExtent, MapExtentError> {
        map(&self.inner, self.extent, Access::Read)
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.inner.unpin(self.granule);
    }
}

/// An extent for one microVM to run in. Dropping it frees the extent.
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

    /// Location on the medium.
    #[must_use]
    pub fn extent(&self) -> Extent {
        self.extent
    }

    /// Makes guest memory equal to the snapshot's: compares all of it and copies what differs. No
    /// microVM may run in the replica meanwhile. The result need not be durable, because recovery
    /// frees replicas. Returns `None` if `stop`, which is called before each piece, returned true.
    pub(crate) fn image_until(&self, stop: impl FnMut() -> bool) -> Option<Imaging> {
        let (from, to) = (self.source.extent.offset, self.extent.offset);
        image(&**self.inner.medium(), from, to, self.extent.guest_bytes, stop)
    }

    /// Whether a process that was granted the replica can still write to it.
    pub(crate) fn is_held(&self) -> bool {
        self.inner.medium().is_held(self.extent.offset)
    }

    /// Gives it memory of its own, where the medium can.
    pub(super) fn separate(&self) -> Result<(), AllocateError> {
        let (medium, Extent { offset, len, .. }) = (self.inner.medium(), self.extent);
        let name = || medium.facts().name.clone();
        medium.separate(offset, len).map_err(|source| match source.kind() {
            ErrorKind::OutOfMemory | ErrorKind::StorageFull => {
                AllocateError::NoMemory { name: name(), bytes: len, source }
            }
            _ => MediumFailure::Io { name: name(), source }.into(),
        })
    }

    /// The snapshot of which this is a replica. The replica pins it.
    #[must_use]
    pub fn source(&self) -> &Pin {
        &self.source
    }

    /// Maps the extent for writing.
    ///
    /// # Errors
    /// Mapping fails. A simulated medium cannot be mapped.
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
    let opened = medium.grant(access, extent.offset);
    let ExtentDescriptor { descriptor, offset, .. } =
        opened.map_err(|source| MapExtentError { extent, source })?;
    let facts = medium.facts();
    let granule = inner.superblock().granule;
    MappedExtent::map(descriptor, offset, extent, granule, facts.durability, access)
}
