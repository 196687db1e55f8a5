//! The players of a measurement: frozen from traces, with profiles, in a directory and, if needed,
//! in a pool.

mod frozen;
mod pool;
pub(crate) mod profile;
mod selection;

use std::iter;
use std::num::NonZero;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::thread;

use tempfile::TempDir;
use thiserror::Error;

use firn_memory::HostFactsError;
use firn_memory::planners::{ParsePlannerError, Planner, Store};
use firn_pool::ClientError;
use firn_snapshot::{AttachError, Destination, OpenError, OpenPooledError};
use firn_vmm::KVM_DEVICE;

pub(crate) use frozen::Place;
pub use frozen::{FrozenPlayer, PooledPlayer, Subject};
pub(crate) use pool::{PoolPlayers, PoolUsage};
pub use selection::LeftOut;
pub(crate) use selection::replicates;
use selection::sanitises;

use crate::harness::Harness;
use crate::host::{Host, HostError, medium_of_pool};
use crate::medium::{self, MediumError};
use crate::player::{
    FreezePlayerError, GapFactor, Leaves, MediumModel, PlayerInputs, PlayerInputsError,
    PlayerOptions, Repeats, freeze,
};
use crate::progress::Progress;
use crate::traces::{BASE, LoadTraceError, NamedTrace, SIZES, load};

/// Which players are measured, and by which planners.
#[derive(Clone, Debug)]
pub struct PlayersConfig {
    /// Planners as `NAME[:KEY=VALUE,...]`, one or several separated by commas in each; `all`
    /// selects every planner that this host can run.
    pub planners: Vec<String>,
    /// Traces by the names that [`load`] knows.
    pub traces: Vec<String>,
    /// The directory in which the snapshots are made, on the medium that is measured. By default it
    /// is the directory for temporary files.
    pub directory: Option<PathBuf>,
    /// The socket of a pool's manager, for the planners that map snapshots from a pool.
    pub pool: Option<PathBuf>,
    /// Leaves of the guests' own page tables.
    pub leaves: Leaves,
    /// The factor for the recorded work between touches.
    pub gaps: GapFactor,
    /// Whether the images store zero pages too.
    pub dense: bool,
    /// Whether the pages that the guests held free have content. A planner whose paper has a guest
    /// that zeroes what it frees has such a guest nevertheless.
    pub unsanitised: bool,
    /// Whether profiles are recorded on the replayed input. Otherwise they are recorded on the
    /// function's other input, if it has one.
    pub same_input: bool,
    /// Repeated accesses.
    pub again: Option<Repeats>,
    /// Touches that connect the guest, before the first one that serves the request.
    pub connect: Option<u64>,
    /// The model of a byte-addressable medium that the snapshots are on.
    pub medium: Option<MediumModel>,
}

impl Default for PlayersConfig {
    fn default() -> Self {
        Self {
            planners: vec!["all".to_owned()],
            traces: Vec::new(),
            directory: None,
            pool: None,
            leaves: Leaves::Recorded,
            gaps: GapFactor::NONE,
            dense: false,
            unsanitised: false,
            same_input: false,
            again: None,
            connect: None,
            medium: None,
        }
    }
}

/// Why there are no players to measure.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PlayersError {
    /// A trace cannot be loaded.
    #[error(transparent)]
    Trace(#[from] LoadTraceError),
    /// The facts of the host that planners need cannot be read.
    #[error(transparent)]
    HostFacts(#[from] HostFactsError),
    /// A planner cannot be parsed.
    #[error(transparent)]
    Planner(#[from] ParsePlannerError),
    /// There is no directory for the snapshots.
    #[error(transparent)]
    Medium(#[from] MediumError),
    /// The host cannot be described.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The pool's manager returned an error.
    #[error(transparent)]
    Pool(#[from] ClientError),
    /// A player cannot replay these traces.
    #[error(transparent)]
    Inputs(#[from] PlayerInputsError),
    /// A planner needs a pool, and none is configured.
    #[error(
        "{0} maps snapshots from a pool: name a pool with --pool (`firn pool create` creates one, \
         `firn pool serve` serves one in memory)"
    )]
    NoPool(String),
    /// A snapshot cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A snapshot in the pool cannot be opened.
    #[error(transparent)]
    OpenPooled(#[from] OpenPooledError),
    /// A profile cannot be attached.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// The image's facts cannot be read.
    #[error("cannot determine how a player's image is stored")]
    Image(#[source] std::io::Error),
    /// A player cannot be frozen.
    #[error("cannot make the player of {trace}")]
    Freeze {
        /// The trace.
        trace: String,
        /// The reason.
        source: Box<FreezePlayerError>,
    },
}

/// Frozen players, and the planners that thaw them.
pub(crate) struct Prepared {
    pub(crate) players: Vec<FrozenPlayer>,
    pub(crate) subjects: Vec<Subject>,
    pub(crate) left_out: Vec<LeftOut>,
    /// How many replicas of any of the players fit into the pool; `None` without one.
    pub(crate) room: Option<u32>,
    pub(crate) host: Host,
    /// It contains the snapshots, and is removed on drop.
    _directory: TempDir,
}

impl PlayersConfig {
    /// Connects to the manager of the pool, if one is configured.
    pub(crate) fn connect<'a>(
        &'a self,
        progress: &'a dyn Progress,
    ) -> Result<Option<PoolPlayers<'a>>, PlayersError> {
        let pool = self.pool.as_deref();
        Ok(pool.map(|socket| PoolPlayers::connect(socket, progress)).transpose()?)
    }

    /// Freezes `snapshots` players of each trace, each with other content, in a directory and, if a
    /// planner maps snapshots from there, in the pool. They get profiles if a planner uses them.
    ///
    /// `all` leaves out planners that run in replicas, if the pool has no room for the replicas of
    /// `microvms` microVMs.
    pub(crate) fn prepare(
        &self,
        mut pool: Option<&mut PoolPlayers<'_>>,
        snapshots: u32,
        microvms: u32,
        harness: &Harness<'_>,
    ) -> Result<Prepared, PlayersError> {
        let traces = self.traces.iter().map(|name| load(name)).collect::<Result<Vec<_>, _>>()?;
        let directory = medium::directory(self.directory.as_deref())?;
        let (list, dax) = (self.planners.join(","), medium::is_dax(directory.path()));
        let host = host_of(directory.path(), pool.as_deref())?;
        let zeroing = Self { unsanitised: false, ..self.clone() };
        let mut players = Vec::new();
        for (number, (trace, argument)) in traces.iter().zip(&self.traces).enumerate() {
            let (own, all): (Vec<_>, Vec<_>) = selection::candidates(&list, trace, dax)?
                .into_iter()
                .partition(|planner| self.unsanitised && sanitises(&planner.name()));
            let places = |kind| {
                let place = |seed| directory.path().join(format!("{kind}-{number}-{seed}"));
                (1..=snapshots.max(1)).map(place).collect::<Vec<_>>()
            };
            let pool = pool.as_deref_mut();
            let mut player = self.player(trace, argument, &all, places("player"), pool, harness)?;
            if !own.is_empty() {
                let places = places("sanitised");
                let own = zeroing.player(trace, argument, &own, places, None, harness)?;
                player.sanitised = Some(Box::new(own));
            }
            players.push(player);
        }
        let (mut subjects, mut left_out) = selection::subjects(&list, &players, pool.as_deref())?;
        let room = match pool {
            Some(pool) => pool.room_for_any(&players)?,
            None => None,
        };
        if self.planners.iter().any(|planner| planner == "all")
            && let Some(room) = room
        {
            selection::leave_out_without_room(&mut subjects, &mut left_out, room, microvms);
        }
        Ok(Prepared { players, subjects, left_out, room, host, _directory: directory })
    }

    /// Freezes a player of a trace, which was loaded from `argument`, into each place, and in the
    /// pool if one of these planners needs it. Each has other content.
    fn player(
        &self,
        trace: &NamedTrace,
        argument: &str,
        planners: &[Box<dyn Planner>],
        places: Vec<PathBuf>,
        mut pool: Option<&mut PoolPlayers<'_>>,
        harness: &Harness<'_>,
    ) -> Result<FrozenPlayer, PlayersError> {
        let in_pool = planners.iter().any(|planner| planner.store() != Store::Directory);
        let learns = planners.iter().any(|planner| planner.learns());
        let inputs = inputs(trace, Some(argument).filter(|_| learns && !self.same_input))?;
        let mut copies: Vec<_> = places
            .into_iter()
            .map(|snapshot| FrozenPlayer {
                trace: trace.name.clone(),
                snapshot,
                pooled: pool.as_deref_mut().filter(|_| in_pool).map(PoolPlayers::reserve_name),
                inputs: inputs.iter().map(|input| input.name.clone()).collect(),
                recorded_on: None,
                others: Vec::new(),
                sanitised: None,
            })
            .collect();
        self.freeze(&copies, &inputs).map_err(|source| PlayersError::Freeze {
            trace: trace.name.clone(),
            source: Box::new(source),
        })?;
        if learns {
            let profile = profile::learn(&copies[0].snapshot, &inputs, harness)?;
            for player in &mut copies {
                player.recorded_on = profile.inputs.first().cloned();
                profile::attach(player, &profile, harness.progress)?;
            }
        }
        let others = copies.split_off(1);
        Ok(FrozenPlayer { others, ..copies.remove(0) })
    }

    /// Freezes a player into each place, each with content of its own. One freeze uses one
    /// processor, so as many run at a time as this host has processors.
    fn freeze(
        &self,
        places: &[FrozenPlayer],
        inputs: &PlayerInputs,
    ) -> Result<(), FreezePlayerError> {
        let at_a_time = thread::available_parallelism().map_or(1, NonZero::get);
        let seeds = (1..).step_by(at_a_time);
        places.chunks(at_a_time).zip(seeds).try_for_each(|(places, first)| {
            thread::scope(|scope| {
                let freezing = places
                    .iter()
                    .zip(first..)
                    .map(|(place, seed)| scope.spawn(move || self.freeze_one(place, inputs, seed)));
                let freezing: Vec<_> = freezing.collect();
                freezing.into_iter().try_for_each(|player| {
                    player.join().unwrap_or_else(|panic| resume_unwind(panic))
                })
            })
        })
    }

    /// The options of a player whose content has this seed.
    pub(crate) fn options(&self, seed: u64) -> PlayerOptions {
        PlayerOptions {
            leaves: self.leaves,
            gaps: self.gaps,
            seed,
            sanitised: !self.unsanitised,
            again: self.again,
            connect: self.connect,
            medium: self.medium,
        }
    }

    fn freeze_one(
        &self,
        place: &FrozenPlayer,
        inputs: &PlayerInputs,
        seed: u64,
    ) -> Result<(), FreezePlayerError> {
        let options = self.options(seed);
        let directory = Destination::Directory(place.snapshot.clone());
        let pool = place.pooled.clone();
        let pool = pool.map(|PooledPlayer { socket, name }| Destination::Pool { socket, name });
        iter::once(directory).chain(pool).try_for_each(|destination| {
            freeze(inputs, &options, KVM_DEVICE.as_ref(), destination, self.dense).map(drop)
        })
    }
}

/// This host, with the medium of a directory and of the pool.
pub(crate) fn host_of(directory: &Path, pool: Option<&PoolPlayers<'_>>) -> Result<Host, HostError> {
    let mut host = Host::of(directory)?;
    if let Some(pool) = pool {
        host.medium = format!("{}; pool on {}", host.medium, medium_of_pool(pool.medium()));
    }
    Ok(host)
}

/// The inputs of a player: its trace, and as the last one the input on which its profile is
/// recorded. That is the function's other input, `-b` for `-a` and the reverse, and `-base` for
/// those of other sizes, if there is one with the same memory.
fn inputs(trace: &NamedTrace, argument: Option<&str>) -> Result<PlayerInputs, PlayersError> {
    let alone = || Ok(PlayerInputs::new(vec![trace.clone()])?);
    let Some(other) = argument.and_then(other_input) else { return alone() };
    let Ok(other) = load(&other) else { return alone() };
    PlayerInputs::new(vec![trace.clone(), other]).or_else(|_| alone())
}

fn other_input(argument: &str) -> Option<String> {
    let (stem, ending) =
        argument.strip_suffix(".trace").map_or((argument, ""), |stem| (stem, ".trace"));
    let swapped = |from: &str, to: &str| Some(format!("{}{to}{ending}", stem.strip_suffix(from)?));
    let sized = |(_, size)| swapped(&format!("-{size}"), &format!("-{BASE}"));
    let base = || SIZES.into_iter().find_map(sized);
    swapped("-a", "-b").or_else(|| swapped("-b", "-a")).or_else(base)
}

#[cfg(test)]
mod tests;
