//! Players that were frozen for a measurement, and the planners that thaw them.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use firn_memory::planners::parse;
use firn_pool::{Client, ClientError};

use super::selection::{replicates, sanitises};
use crate::cache::{CacheError, SnapshotFiles};

/// The longest time that a manager takes to notice a closed connection.
pub(super) const NOTICE: Duration = Duration::from_millis(5);

/// A planner that is measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    /// The planner with all its options, as `NAME[:KEY=VALUE,...]`.
    pub planner: String,
    /// Whether its plan preloads the image before the resume.
    pub preloads: bool,
    /// Whether it maps the snapshot from a pool.
    pub in_pool: bool,
    /// Whether it maps a file that is packed from the image. The file is packed before each batch
    /// that does not find it as the planner needs it.
    pub packs: bool,
    /// Whether its microVMs start from ready clones.
    pub ready: bool,
    /// Whether its monitors are jailed.
    pub jailed: bool,
}

impl Subject {
    /// Whether its plans depend on the profile.
    pub(crate) fn learns(&self) -> bool {
        parse(&self.planner).is_ok_and(|planner| planner.learns())
    }

    /// Whether each of its microVMs runs in a replica of its own.
    pub(crate) fn replicates(&self) -> bool {
        replicates(&self.planner)
    }
}

/// A frozen player of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrozenPlayer {
    /// The trace.
    pub trace: String,
    /// The snapshot's directory.
    pub snapshot: PathBuf,
    /// The same player in a pool, for the planners that map it from there.
    pub pooled: Option<PooledPlayer>,
    /// The inputs that it can replay: traces, by name. The first is [`Self::trace`].
    pub inputs: Vec<String>,
    /// The input that the profile was recorded on, if it has a profile.
    pub recorded_on: Option<String>,
    /// Players of the same trace with other content, each in a snapshot of its own. The microVMs of
    /// a batch take turns with them.
    pub others: Vec<Self>,
    /// The same player in a guest that zeroes what it frees, for the planners whose paper has such
    /// a guest. Without it, they thaw this one.
    pub sanitised: Option<Box<Self>>,
}

/// The place of a player in a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PooledPlayer {
    /// The socket of the pool's manager.
    pub socket: PathBuf,
    /// The snapshot's name in the pool.
    pub name: String,
}

/// Where the snapshot of a player is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place<'a> {
    Directory(&'a Path),
    Pool(&'a PooledPlayer),
}

impl FrozenPlayer {
    /// The player that a subject thaws.
    pub(crate) fn of(&self, subject: &Subject) -> &Self {
        self.sanitised.as_deref().filter(|_| sanitises(&subject.planner)).unwrap_or(self)
    }

    /// The snapshot that a subject maps.
    pub(crate) fn place(&self, subject: &Subject) -> Place<'_> {
        match self.pooled.as_ref().filter(|_| subject.in_pool) {
            Some(pooled) => Place::Pool(pooled),
            None => Place::Directory(&self.snapshot),
        }
    }

    /// Evicts the snapshots from the page cache. Otherwise pages that an earlier run cached would
    /// keep the folio sizes of that run's planner in later runs on a full page cache.
    pub(crate) fn evict(&self) -> Result<(), CacheError> {
        let mut players = std::iter::once(self).chain(&self.others);
        players.try_for_each(|player| SnapshotFiles::all(&player.snapshot)?.evict())?;
        self.sanitised.as_ref().map_or(Ok(()), |player| player.evict())
    }

    /// Waits until the pool's manager has prepared everything that it prepares in advance, so that
    /// no later run pays for it. Returns the time in ns.
    pub(crate) fn settle(&self) -> Result<Option<u64>, ClientError> {
        let Some(pooled) = &self.pooled else { return Ok(None) };
        let begin = Instant::now();
        // The manager notices a little later than the microVM's end that its connection is closed.
        std::thread::sleep(NOTICE);
        Client::connect(&pooled.socket)?.settle()?;
        let ns = begin.elapsed().saturating_sub(NOTICE).as_nanos();
        Ok(Some(u64::try_from(ns).unwrap_or(u64::MAX)))
    }
}
