//! Players in a pool, for the planners that map them from there.

use std::path::Path;

use thiserror::Error;

use firn_bench::Pooled;
use firn_memory::Leaf;
use firn_memory::planners::{ExtentFacts, ImageFacts};
use firn_pool::{Client, ClientError, ListedExtent, Role};

use crate::output;
use crate::pool_at::PoolAt;

/// Why there are no players in the pool.
#[derive(Debug, Error)]
pub(crate) enum InPoolError {
    #[error(transparent)]
    Manager(#[from] ClientError),
}

/// A pool's manager, and the players that were frozen into it: they are removed from it on drop.
pub(super) struct PoolPlayers<'a> {
    socket: &'a Path,
    manager: Client,
    facts: ExtentFacts,
    medium: String,
    names: Vec<String>,
}

impl<'a> PoolPlayers<'a> {
    fn new(socket: &'a Path) -> Result<Self, InPoolError> {
        let mut manager = Client::connect(socket)?;
        let described = manager.describe()?.medium;
        let leaf = [Leaf::Size1G, Leaf::Size2M]
            .into_iter()
            .find(|leaf| leaf.bytes() <= described.leaf())
            .unwrap_or(Leaf::Size4K);
        // Whoever needs a replica gets one, and the first to thaw checks the bytes.
        let facts = ExtentFacts {
            offset: 0,
            leaf,
            private: described.has_private_mappings(),
            replica: true,
            checked: true,
        };
        Ok(Self { socket, manager, facts, medium: described.name, names: Vec::new() })
    }

    /// Those in a pool that was named, if one was.
    pub(super) fn at(pool: Option<&'a PoolAt>) -> Result<Option<Self>, InPoolError> {
        pool.map(|pool| Self::new(pool.socket())).transpose()
    }

    /// The medium, as its manager names it.
    pub(super) fn medium(&self) -> &str {
        &self.medium
    }

    /// Waits until the manager has made ready again what microVMs left.
    pub(super) fn settle(&mut self) -> Result<(), InPoolError> {
        Ok(self.manager.settle()?)
    }

    /// Bytes of the pool that microVMs use now: snapshots that are mapped, and replicas that are run in, not those that are ready
    /// for others; and bytes of DRAM in the copies that they run in.
    pub(super) fn used(&mut self) -> Result<(u64, u64), InPoolError> {
        let arena = self.manager.arena()?;
        let listing = self.manager.list()?;
        let pinned = |pins: Option<u32>| pins.is_some_and(|pins| pins > 0);
        let used = listing.extents.iter().filter(|listed| match listed.role {
            Role::Replica => listed.imaging.is_none(),
            _ => pinned(listed.pins),
        });
        Ok((used.map(|listed| listed.extent.len).sum(), arena.lent))
    }

    /// How many replicas of a player the pool has room for: where it is free, and where replicas are that only wait for others.
    pub(super) fn room(&mut self, player: &Pooled) -> Result<u64, InPoolError> {
        let listing = self.manager.list()?;
        let its = |listed: &&ListedExtent| listed.name.as_ref() == Some(&player.name);
        let Some(len) = listing.extents.iter().find(its).map(|listed| listed.extent.len) else {
            return Ok(u64::MAX);
        };
        let waiting = listing.extents.iter().filter(|listed| listed.imaging.is_some());
        let pieces = listing.free.iter().map(|piece| piece.len);
        let pieces = pieces.chain(waiting.map(|listed| listed.extent.len));
        Ok(pieces.filter_map(|piece| piece.checked_div(len)).sum())
    }

    /// What planners know of an image of `len` bytes in this pool.
    pub(super) fn image(&self, len: u64) -> ImageFacts {
        ImageFacts::in_pool(len, self.facts)
    }

    /// A name for a player that is to be frozen into the pool.
    pub(super) fn name(&mut self) -> Pooled {
        let name = format!("bench-{}-{}", std::process::id(), self.names.len());
        self.names.push(name.clone());
        Pooled { socket: self.socket.to_owned(), name }
    }
}

impl Drop for PoolPlayers<'_> {
    fn drop(&mut self) {
        // A manager that is gone has taken its memfd with it; a freeze that failed left no name.
        let _ = self.manager.collect();
        for name in &self.names {
            if let Err(error) = self.manager.reclaim(name) {
                output::note(&format!("firn: the player {name} stays in the pool: {error}"));
            }
        }
    }
}
