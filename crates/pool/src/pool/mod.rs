//! The pool: its operations and the handles that they return.

mod annex;
mod create;
mod error;
mod handles;
mod imaging;
mod inner;
mod listing;
mod problem;
mod reader;
mod recover;
mod repair;
mod scan;
mod space;
mod transitions;
mod zeroed;

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::extent::Extent;
use crate::layout::Superblock;
use crate::media::{Medium, MediumFacts};

pub(crate) use annex::read_annex;
pub use create::CreateOptions;
pub use error::{
    AllocateError, CreateError, LookupError, MediumFailure, OpenError, PublishError, ReclaimError,
    RepairError, ReplicaError,
};
pub use handles::{Pin, Replica, Staging};
pub use imaging::Imaging;
use inner::Inner;
pub use listing::{ExtentState, FreePiece, ListedExtent, Listing, PoolFacts, Role};
pub use problem::Problem;
pub use reader::{ExtentReader, PoolReader, VerifyReport};
pub use recover::Recovery;
pub use repair::RepairReport;

/// A pool that this process may change: PASS's PMEM manager.
///
/// A medium has at most one `Pool` at a time; other processes can read it concurrently through
/// [`PoolReader`]. Clones refer to the same pool. A pool can be used from several threads;
/// transitions are serialised.
///
/// A transition consists of stores, flush, fence, then one 8-byte store, flush, fence.
/// `docs/reference/pool-format.md` lists the transitions.
#[derive(Clone, Debug)]
pub struct Pool {
    inner: Arc<Inner>,
    recovery: Recovery,
}

impl Pool {
    fn fresh(medium: Arc<dyn Medium>, superblock: Superblock) -> Self {
        Self { inner: Arc::new(Inner::new(medium, superblock)), recovery: Recovery::default() }
    }

    /// What recovery changed when the pool was opened.
    #[must_use]
    pub fn recovery(&self) -> Recovery {
        self.recovery
    }

    /// The medium's properties.
    #[must_use]
    pub fn medium(&self) -> &MediumFacts {
        self.inner.medium().facts()
    }

    /// The medium, to open descriptors of it.
    pub(crate) fn shared_medium(&self) -> Arc<dyn Medium> {
        Arc::clone(self.inner.medium())
    }

    /// The pool's properties.
    #[must_use]
    pub fn facts(&self) -> PoolFacts {
        PoolFacts::of(self.inner.superblock())
    }

    /// Allocates an extent for a snapshot: `guest_bytes` of guest memory and a tail of at least
    /// `tail_bytes`. The name refers to its current snapshot until [`Staging::publish`]. The extent
    /// contains old bytes: the caller must write all of guest memory, zeros included, except in
    /// [`Staging::zeroed`].
    ///
    /// # Errors
    /// See [`AllocateError`]; nothing was changed.
    pub fn allocate(
        &self,
        name: &str,
        guest_bytes: u64,
        tail_bytes: u64,
    ) -> Result<Staging, AllocateError> {
        let granule = self.inner.allocate(name, guest_bytes, tail_bytes)?;
        Ok(Staging::new(Arc::clone(&self.inner), granule))
    }

    /// Pins the snapshot of a name: its extent keeps its bytes until the pin is dropped, even if
    /// the name is updated or removed. Pins exist only in this process's memory.
    ///
    /// # Errors
    /// The name has no snapshot.
    pub fn pin(&self, name: &str) -> Result<Pin, LookupError> {
        let granule = self.inner.pin(name)?;
        Ok(Pin::new(Arc::clone(&self.inner), granule, name.to_owned()))
    }

    /// The extent of a name's snapshot, without pinning it.
    ///
    /// # Errors
    /// The name has no snapshot.
    pub fn lookup(&self, name: &str) -> Result<Extent, LookupError> {
        self.inner.lookup(name)
    }

    /// Allocates an extent for one microVM to run in and to write: guest memory of the snapshot's
    /// size and no tail. It contains old bytes until it is imaged. Dropping the [`Replica`] or
    /// recovery frees it. In a memfd it gets memory of its own.
    ///
    /// # Errors
    /// See [`ReplicaError`].
    pub fn replica(&self, name: &str) -> Result<Replica, ReplicaError> {
        let source = self.pin(name)?;
        let granule = self.inner.allocate_replica(source.granule())?;
        let replica = Replica::new(Arc::clone(&self.inner), granule, source);
        replica.separate()?;
        Ok(replica)
    }

    /// Removes a name. Its extent is freed when its last pin is dropped. Returns the bytes that are
    /// free immediately.
    ///
    /// # Errors
    /// See [`ReclaimError`].
    pub fn reclaim(&self, name: &str) -> Result<u64, ReclaimError> {
        self.inner.reclaim(name)
    }

    /// Clears slots of removed names in the address table and returns their number. Extents need no
    /// collection, because an extent is freed as soon as nothing refers to it.
    ///
    /// # Errors
    /// The medium fails.
    pub fn gc(&self) -> Result<u32, MediumFailure> {
        self.inner.gc()
    }

    /// Frees the extents to which nothing refers and that a process could still reach when it
    /// was to be freed, and waits for those that other threads are freeing. Returns the number of
    /// those that one can still reach.
    pub(crate) fn free_released(&self) -> usize {
        self.inner.free_released()
    }

    /// All extents and the free space.
    #[must_use]
    pub fn list(&self) -> Listing {
        self.inner.list()
    }

    /// A thread is about to call [`Pool::zero_free_space`].
    pub(crate) fn begin_zeroing(&self) {
        self.inner.begin_zeroing();
    }

    /// Zeroes free space ahead, and space that is freed later, until [`Pool::end_zeroing`]. `pause`
    /// is called before each piece.
    pub(crate) fn zero_free_space(&self, pause: impl FnMut()) {
        self.inner.zero_free_space(pause);
    }

    /// Ends [`Pool::zero_free_space`].
    pub(crate) fn end_zeroing(&self) {
        self.inner.end_zeroing();
    }

    /// Waits until [`Pool::zero_free_space`] has nothing to do.
    pub(crate) fn settle_zeroing(&self) {
        self.inner.settle_zeroing();
    }

    /// The names that have a snapshot, in no particular order.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.inner.names()
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests;
