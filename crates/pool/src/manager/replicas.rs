//! Replicas that a manager keeps ready, and how they become what their snapshot is again.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::pool::{AllocateError, Imaging, Pool, Replica, ReplicaError};

/// The replicas of a pool that nobody runs in.
#[derive(Debug)]
pub(super) struct Replicas {
    pool: Pool,
    /// Those that are what their snapshot is.
    ready: Mutex<Vec<Replica>>,
}

impl Replicas {
    pub(super) fn new(pool: Pool) -> Self {
        Self { pool, ready: Mutex::default() }
    }

    fn ready(&self) -> MutexGuard<'_, Vec<Replica>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A replica of the snapshot of a name; whether it was ready, and what making it took where it was not.
    pub(super) fn get(&self, name: &str) -> Result<(Replica, bool, Imaging), ReplicaError> {
        let current = self.pool.lookup(name)?;
        let ready = {
            let mut ready = self.ready();
            let source = |replica: &Replica| replica.source().extent().generation;
            let position = ready.iter().position(|replica| source(replica) == current.generation);
            position.map(|position| ready.swap_remove(position))
        };
        if let Some(replica) = ready {
            return Ok((replica, true, Imaging::default()));
        }
        let replica = self.with_room(|| self.pool.replica(name))?;
        let imaging = replica.image();
        Ok((replica, false, imaging))
    }

    /// Makes replicas ready again whose microVMs ended, or frees them where their snapshot is not current.
    pub(super) fn take_back(&self, replicas: impl IntoIterator<Item = Replica>) {
        for replica in replicas {
            if self.is_current(&replica) {
                let _ = replica.image();
                self.ready().push(replica);
            }
        }
        self.drop_stale();
    }

    /// Tries again without the replicas that are only kept to be ready, where there is no room.
    pub(super) fn with_room<T, E: IsFull>(
        &self,
        allocate: impl Fn() -> Result<T, E>,
    ) -> Result<T, E> {
        match allocate() {
            Err(error) if error.is_full() && self.drop_all() > 0 => allocate(),
            result => result,
        }
    }

    /// Frees those that are ready: how many.
    pub(super) fn drop_all(&self) -> u64 {
        let replicas = std::mem::take(&mut *self.ready());
        crate::num::u64_of(replicas.len())
    }

    /// Frees those that are ready for the snapshot of a name.
    pub(super) fn drop_of(&self, name: &str) {
        self.ready().retain(|replica| replica.source().name() != name);
    }

    /// Frees those whose snapshot is not current any more.
    pub(super) fn drop_stale(&self) {
        self.ready().retain(|replica| self.is_current(replica));
    }

    fn is_current(&self, replica: &Replica) -> bool {
        let source = replica.source();
        let current = self.pool.lookup(source.name());
        current.is_ok_and(|current| current.generation == source.extent().generation)
    }
}

/// Whether an error says that the pool has no room.
pub(super) trait IsFull {
    fn is_full(&self) -> bool;
}

impl IsFull for AllocateError {
    fn is_full(&self) -> bool {
        matches!(self, Self::Full { .. })
    }
}

impl IsFull for ReplicaError {
    fn is_full(&self) -> bool {
        matches!(self, Self::Allocate(error) if error.is_full())
    }
}
