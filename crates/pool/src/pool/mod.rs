//! The pool: its operations and what they hand out.

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

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::extent::Extent;
use crate::layout::Superblock;
use crate::media::{Medium, MediumFacts};

pub use create::CreateOptions;
pub use error::{
    AllocateError, CreateError, LookupError, MediumFailure, OpenError, PublishError, ReclaimError,
    RepairError, ReplicaError,
};
pub use handles::{Pin, Replica, Staging};
pub use imaging::{ImagedBy, Imaging, PageRun};
use inner::Inner;
pub use listing::{ExtentState, FreePiece, ListedExtent, Listing, PoolFacts, Role};
pub use problem::Problem;
pub use reader::{ExtentReader, PoolReader, VerifyReport};
pub use recover::Recovery;
pub use repair::RepairReport;

/// A pool that this process may change: PASS's PMEM manager.
///
/// There is one at a time for a medium; others read beside it with [`PoolReader`]. Clones are the same pool. Safe to use
/// from several threads: transitions are made one after the other.
///
/// Every transition is stores, flush, fence, then one 8-byte store, flush, fence: `docs/reference/pool-format.md` lists them.
#[derive(Clone, Debug)]
pub struct Pool {
    inner: Arc<Inner>,
    recovery: Recovery,
}

impl Pool {
    fn fresh(medium: Arc<dyn Medium>, superblock: Superblock) -> Self {
        Self { inner: Arc::new(Inner::new(medium, superblock)), recovery: Recovery::default() }
    }

    /// What opening had to put right.
    #[must_use]
    pub fn recovery(&self) -> Recovery {
        self.recovery
    }

    /// What is known of the medium.
    #[must_use]
    pub fn medium(&self) -> &MediumFacts {
        self.inner.medium().facts()
    }

    /// The medium, for its descriptors.
    #[must_use]
    pub fn shared_medium(&self) -> Arc<dyn Medium> {
        Arc::clone(self.inner.medium())
    }

    /// What the pool is.
    #[must_use]
    pub fn facts(&self) -> PoolFacts {
        PoolFacts::of(self.inner.superblock())
    }

    /// Allocates an extent for a snapshot: `guest_bytes` of guest memory and a tail of `tail_bytes`. The name keeps what it has
    /// until [`Staging::publish`]. The extent's bytes are whatever was there before: write all of guest memory, zeros too.
    ///
    /// # Errors
    /// Nothing was changed; see [`AllocateError`].
    pub fn allocate(
        &self,
        name: &str,
        guest_bytes: u64,
        tail_bytes: u64,
    ) -> Result<Staging, AllocateError> {
        let granule = self.inner.allocate(name, guest_bytes, tail_bytes)?;
        Ok(Staging::new(Arc::clone(&self.inner), granule))
    }

    /// Pins the snapshot of a name: its extent keeps its bytes until the pin is dropped, whatever becomes of the name. Pins are in
    /// this process's memory alone.
    ///
    /// # Errors
    /// There is no such snapshot.
    pub fn pin(&self, name: &str) -> Result<Pin, LookupError> {
        let granule = self.inner.pin(name)?;
        Ok(Pin::new(Arc::clone(&self.inner), granule, name.to_owned()))
    }

    /// Where the snapshot of a name is, without pinning it.
    ///
    /// # Errors
    /// There is no such snapshot.
    pub fn lookup(&self, name: &str) -> Result<Extent, LookupError> {
        self.inner.lookup(name)
    }

    /// Allocates an extent for one microVM to run in and to write: guest memory of the snapshot's size, and no tail. Its bytes are
    /// whatever was there before, until the replica is imaged. It is freed when the [`Replica`] is dropped, and by recovery.
    ///
    /// # Errors
    /// See [`ReplicaError`].
    pub fn replica(&self, name: &str) -> Result<Replica, ReplicaError> {
        let source = self.pin(name)?;
        let granule = self.inner.allocate_replica(source.granule())?;
        Ok(Replica::new(Arc::clone(&self.inner), granule, source))
    }

    /// Removes a name. Its extent is freed as soon as nobody has it pinned. Returns the bytes that are free at once.
    ///
    /// # Errors
    /// See [`ReclaimError`].
    pub fn reclaim(&self, name: &str) -> Result<u64, ReclaimError> {
        self.inner.reclaim(name)
    }

    /// Clears what removed names left in the address table. Returns how many slots were cleared. (Extents need no collection: one is
    /// freed as soon as nothing refers to it.)
    ///
    /// # Errors
    /// The medium fails.
    pub fn gc(&self) -> Result<u32, MediumFailure> {
        self.inner.gc()
    }

    /// All extents, and what is free.
    #[must_use]
    pub fn list(&self) -> Listing {
        self.inner.list()
    }

    /// The names that have a snapshot, in no order.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.inner.names()
    }
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests;
