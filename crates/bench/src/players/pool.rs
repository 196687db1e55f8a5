//! Players in a pool, for the planners that map snapshots from a pool.

use std::path::Path;
use std::time::Duration;

use firn_memory::Leaf;
use firn_memory::planners::{ExtentFacts, ImageFacts};
use firn_pool::{Client, ClientError, ListedExtent, MediumFacts, Role};

use super::frozen::{FrozenPlayer, NOTICE, PooledPlayer};
use crate::progress::Progress;

/// How long a removed snapshot is waited for.
const FREED: Duration = Duration::from_secs(1);

/// A connection to a pool's manager, and the players that were frozen into the pool. They are
/// removed from it on drop.
pub(crate) struct PoolPlayers<'a> {
    socket: &'a Path,
    manager: Client,
    facts: ExtentFacts,
    medium: String,
    size: u64,
    names: Vec<String>,
    progress: &'a dyn Progress,
}

/// The memory that microVMs use of a pool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolUsage {
    /// Bytes of the pool: mapped snapshots and replicas in use, without replicas that are only
    /// prepared.
    pub(crate) pool_bytes: u64,
    /// Bytes of DRAM in the copies that the manager lent to them.
    pub(crate) copy_bytes: u64,
}

impl<'a> PoolPlayers<'a> {
    /// Connects to the manager that listens on a socket.
    pub(crate) fn connect(
        socket: &'a Path,
        progress: &'a dyn Progress,
    ) -> Result<Self, ClientError> {
        let mut manager = Client::connect(socket)?;
        let described = manager.describe()?.medium;
        let leaf = [Leaf::Size1G, Leaf::Size2M]
            .into_iter()
            .find(|leaf| leaf.bytes() <= described.leaf())
            .unwrap_or(Leaf::Size4K);
        // Each thaw that needs a replica gets one, and the first thaw checks the bytes.
        let facts = ExtentFacts {
            offset: 0,
            leaf,
            private: described.has_private_mappings(),
            replica: true,
            checked: true,
        };
        let (medium, size) = (described.name, described.size);
        Ok(Self { socket, manager, facts, medium, size, names: Vec::new(), progress })
    }

    /// The manager's name for its medium.
    pub(crate) fn medium(&self) -> &str {
        &self.medium
    }

    /// The size of the medium, bytes.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// The properties of the medium.
    pub(crate) fn describe(&mut self) -> Result<MediumFacts, ClientError> {
        Ok(self.manager.describe()?.medium)
    }

    /// Waits until the manager has prepared everything that it prepares in advance.
    pub(crate) fn settle(&mut self) -> Result<(), ClientError> {
        self.manager.settle()
    }

    /// Waits until the manager has freed the snapshots that were removed. It notices a little later
    /// than the end of a microVM that its connection is closed; after a second it is another
    /// program that maps one.
    pub(crate) fn wait_until_freed(&mut self) -> Result<(), ClientError> {
        for _ in 0..FREED.as_millis() / NOTICE.as_millis() {
            let extents = self.manager.list()?.extents;
            if extents.iter().all(|listed| listed.role != Role::Superseded) {
                break;
            }
            std::thread::sleep(NOTICE);
        }
        Ok(())
    }

    /// What the microVMs use now.
    pub(crate) fn usage(&mut self) -> Result<PoolUsage, ClientError> {
        let arena = self.manager.arena()?;
        let listing = self.manager.list()?;
        let pinned = |pins: Option<u32>| pins.is_some_and(|pins| pins > 0);
        let used = listing.extents.iter().filter(|listed| match listed.role {
            Role::Replica => listed.imaging.is_none(),
            _ => pinned(listed.pins),
        });
        let pool_bytes = used.map(|listed| listed.extent.len).sum();
        Ok(PoolUsage { pool_bytes, copy_bytes: arena.lent })
    }

    /// How many replicas of a player fit into the pool: into its free space, and in place of
    /// replicas that are only prepared.
    pub(crate) fn room(&mut self, player: &PooledPlayer) -> Result<u64, ClientError> {
        let listing = self.manager.list()?;
        let its = |listed: &&ListedExtent| listed.name.as_ref() == Some(&player.name);
        let Some(len) = listing.extents.iter().find(its).map(|listed| listed.extent.len) else {
            return Ok(u64::MAX);
        };
        let prepared = listing.extents.iter().filter(|listed| listed.imaging.is_some());
        let pieces = listing.free.iter().map(|piece| piece.len);
        let pieces = pieces.chain(prepared.map(|listed| listed.extent.len));
        Ok(pieces.filter_map(|piece| piece.checked_div(len)).sum())
    }

    /// How many replicas of any of these players fit into the pool; `None` if none is in it.
    pub(crate) fn room_for_any(
        &mut self,
        players: &[FrozenPlayer],
    ) -> Result<Option<u32>, ClientError> {
        let pooled = players.iter().filter_map(|player| player.pooled.as_ref());
        let rooms = pooled.map(|player| self.room(player)).collect::<Result<Vec<_>, _>>()?;
        Ok(rooms.into_iter().min().map(|room| u32::try_from(room).unwrap_or(u32::MAX)))
    }

    /// What planners know of an image of `len` bytes in this pool.
    pub(crate) fn image(&self, len: u64) -> ImageFacts {
        ImageFacts::in_pool(len, self.facts)
    }

    /// Reserves a name for a player that will be frozen into the pool.
    pub(crate) fn reserve_name(&mut self) -> PooledPlayer {
        let name = format!("bench-{}-{}", std::process::id(), self.names.len());
        self.names.push(name.clone());
        PooledPlayer { socket: self.socket.to_owned(), name }
    }
}

impl Drop for PoolPlayers<'_> {
    fn drop(&mut self) {
        // Errors here need no report: a manager that has ended took its memfd with it, and a failed
        // freeze left no name.
        let _ = self.manager.collect();
        for name in &self.names {
            if let Err(error) = self.manager.reclaim(name) {
                self.progress
                    .note(&format!("cannot remove the player {name} from the pool: {error}"));
            }
        }
    }
}
