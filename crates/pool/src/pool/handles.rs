//! What operations hand out: each gives up what it holds when it is dropped.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_base::num::{u64_of, usize_of};
use serde::{Deserialize, Serialize};

use super::error::PublishError;
use super::inner::Inner;
use crate::extent::Extent;
use crate::layout::PAGE;
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

/// Bytes that are compared at once: they stay in the processor's cache.
const PIECE: usize = 64 << 10;
/// Where a list says what was written, one of so many other pieces is compared all the same.
const SAMPLE: u64 = 64;

/// What making a replica's memory cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Imaging {
    /// Bytes that were compared.
    pub compared: u64,
    /// Bytes that differed and were copied, in pieces of 64 KiB or less.
    pub copied: u64,
    /// How long it took.
    pub duration: Duration,
    /// How it was known what to compare.
    #[serde(default)]
    pub by: ImagedBy,
}

/// How it is known what of a replica may differ from its snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImagedBy {
    /// It is not: all of it was compared.
    #[default]
    Comparing,
    /// KVM's dirty log and the monitor's own writes, as a list of pages; beside them a sample was compared.
    List,
    /// A list that the sample showed to be wrong: then all of it was compared.
    WrongList,
}

/// Pages of guest memory that follow each other: the first, and how many.
pub type PageRun = (u64, u64);

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

    /// Makes guest memory what the snapshot's is: compares piece by piece, and copies what differs. Nobody may run in it meanwhile.
    /// It need not be durable: recovery frees replicas. It is given up with `None` once `stop`, which is asked before each piece, says so.
    pub(crate) fn image_until(&self, stop: impl FnMut() -> bool) -> Option<Imaging> {
        let begin = Instant::now();
        let mut work = Work::new(self, stop);
        work.image(0..self.extent.guest_bytes)?;
        Some(work.done(begin, ImagedBy::Comparing))
    }

    /// The same where a list says which pages may differ: those, and a sample of the others, which moves with `list`, their number. If that
    /// finds anything, the list is wrong, and all is compared.
    pub(crate) fn image_listed(
        &self,
        written: &[PageRun],
        list: u64,
        stop: impl FnMut() -> bool,
    ) -> Option<Imaging> {
        let size = self.extent.guest_bytes;
        let pages = written.iter().fold(0_u64, |sum, (_, count)| sum.saturating_add(*count));
        if pages >= size / PAGE {
            return self.image_until(stop);
        }
        let begin = Instant::now();
        let mut work = Work::new(self, stop);
        for (first, count) in written {
            let bytes = |pages: u64| pages.saturating_mul(PAGE).min(size);
            work.image(bytes(*first)..bytes(first.saturating_add(*count)))?;
        }
        let listed = work.copied;
        let piece = u64_of(PIECE);
        let mut at = list % SAMPLE * piece;
        while at < size {
            work.image(at..size.min(at + piece))?;
            at += SAMPLE * piece;
        }
        if work.copied == listed {
            return Some(work.done(begin, ImagedBy::List));
        }
        work.image(0..size)?;
        Some(work.done(begin, ImagedBy::WrongList))
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

/// Making a replica what its snapshot is.
struct Work<'a, S> {
    replica: &'a Replica,
    stop: S,
    wanted: Vec<u8>,
    found: Vec<u8>,
    compared: u64,
    copied: u64,
}

impl<'a, S: FnMut() -> bool> Work<'a, S> {
    fn new(replica: &'a Replica, stop: S) -> Self {
        let (wanted, found) = (vec![0; PIECE], vec![0; PIECE]);
        Self { replica, stop, wanted, found, compared: 0, copied: 0 }
    }

    /// Compares a part of guest memory piece by piece, and copies what differs; `None` where it is to stop.
    fn image(&mut self, part: Range<u64>) -> Option<()> {
        let (medium, to) = (self.replica.inner.medium(), self.replica.extent.offset);
        let from = self.replica.source.extent.offset;
        let mut at = part.start;
        while at < part.end {
            if (self.stop)() {
                return None;
            }
            let len = usize_of((part.end - at).min(u64_of(PIECE)));
            let (wanted, found) = (&mut self.wanted[..len], &mut self.found[..len]);
            medium.load(from + at, wanted);
            medium.load(to + at, found);
            if wanted != found {
                medium.store(to + at, wanted);
                self.copied += u64_of(len);
            }
            self.compared += u64_of(len);
            at += u64_of(len);
        }
        Some(())
    }

    fn done(&self, begin: Instant, by: ImagedBy) -> Imaging {
        Imaging { compared: self.compared, copied: self.copied, duration: begin.elapsed(), by }
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
