//! Players of traces, frozen for a measurement, and the planners that are to thaw them.

use std::iter;
use std::num::NonZero;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::thread;

use clap::Args;
use tempfile::TempDir;
use thiserror::Error;

use firn_base::{PAGE_SIZE, error_chain};
use firn_bench::player::{
    FreezePlayerError, GapFactor, Leaves, PlayerInputs, PlayerInputsError, PlayerOptions, freeze,
    record,
};
use firn_bench::table::sanitises;
use firn_bench::traces::{LoadTraceError, NamedTrace, load};
use firn_bench::{Frozen, Host, HostError, LeftOut, Pooled, Subject};
use firn_memory::planners::{
    ImageFacts, ParsePlannerError, PlanInput, Planner, Selection, Store, pack, parse, select,
};
use firn_memory::recorders::{self, Part};
use firn_memory::{HostFacts, HostFactsError};
use firn_snapshot::{
    AttachError, OpenError, OpenPooledError, PooledSnapshot, Profile, Snapshot, Verify, set_profile,
};
use firn_vmm::{Destination, KVM_DEVICE};

use super::in_pool::{InPoolError, PoolPlayers};
use super::medium::{self, MediumError};
use crate::output;
use crate::pool_at::{PoolAt, PoolAtError};
use crate::snapshot_args::set_pooled_profile;

/// What is measured, and by which planners.
#[derive(Debug, Args)]
pub(super) struct PlayersArgs {
    /// Planners, as NAME[:KEY=VALUE,...], separated by commas; `all` for all that this host can run
    #[arg(long, value_name = "PLANNER", default_value = "all")]
    pub(super) planner: Vec<String>,
    /// A trace that firn carries, sequential-read:SIZE, sequential-write:SIZE, or the path of a .trace file;
    /// several: repeat it, or separate them by commas
    #[arg(long, value_name = "NAME", required = true, value_delimiter = ',')]
    pub(super) trace: Vec<String>,
    /// Where the players' snapshots are made: the medium that is measured; default: the folder for temporary files
    #[arg(long, value_name = "DIR")]
    pub(super) dir: Option<PathBuf>,
    /// A pool, for the planners that map snapshots from one: its medium, whose manager is started where none runs, or its
    /// manager's socket. They use no page cache, so --cache does not concern them
    #[arg(long, value_name = "PATH")]
    pub(super) pool: Option<PathBuf>,
    /// Leaves of the guest's own page tables: recorded, 4k or 2m
    #[arg(long, value_name = "LEAVES", default_value_t = Leaves::Recorded)]
    pub(super) leaves: Leaves,
    /// What the recorded work between touches is multiplied with; 0: faults alone
    #[arg(long, value_name = "FACTOR", default_value_t = GapFactor::NONE)]
    pub(super) gaps: GapFactor,
    /// Write zero pages into the images too, instead of leaving holes
    #[arg(long)]
    pub(super) dense: bool,
    /// Let every page that the guest held free hold something, where the recorded guest's free pages were zero for the most part
    #[arg(long)]
    pub(super) unsanitised: bool,
    /// Record the profiles on the input that is replayed, where they are recorded on the function's other one
    #[arg(long)]
    pub(super) same_input: bool,
}

/// Why there are no players to measure.
#[derive(Debug, Error)]
pub(crate) enum PlayersError {
    #[error(transparent)]
    Trace(#[from] LoadTraceError),
    #[error(transparent)]
    HostFacts(#[from] HostFactsError),
    #[error(transparent)]
    Planner(#[from] ParsePlannerError),
    #[error(transparent)]
    Medium(#[from] MediumError),
    #[error(transparent)]
    Host(#[from] HostError),
    #[error(transparent)]
    Manager(#[from] PoolAtError),
    #[error(transparent)]
    Pool(#[from] InPoolError),
    #[error(transparent)]
    Inputs(#[from] PlayerInputsError),
    #[error(
        "{0} maps snapshots from a pool: name one with --pool (`firn pool create` makes it, `firn pool serve` one in memory)"
    )]
    NoPool(String),
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    OpenPooled(#[from] OpenPooledError),
    #[error(transparent)]
    Attach(#[from] AttachError),
    #[error("reading how a player's image is stored")]
    Image(#[source] std::io::Error),
    #[error("making the player of {trace}")]
    Freeze { trace: String, source: Box<FreezePlayerError> },
}

/// Players, frozen, and who is to thaw them.
pub(super) struct Prepared {
    pub(super) players: Vec<Frozen>,
    pub(super) subjects: Vec<Subject>,
    pub(super) left_out: Vec<LeftOut>,
    pub(super) host: Host,
    /// Where the snapshots lie: they go with it.
    pub(super) directory: TempDir,
}

impl PlayersArgs {
    /// The pool that was named, whose manager is started where none runs.
    pub(super) fn pool(&self) -> Result<Option<PoolAt>, PlayersError> {
        Ok(self.pool.as_deref().map(PoolAt::open).transpose()?)
    }

    /// Freezes a player of each trace, in a directory and, where a planner maps from there, in the pool: so many times, each with
    /// other content. Where a planner uses a profile they get one. `all` has no planner whose replicas for so many microVMs at once the
    /// pool has no room for, and of unsanitised guests none whose paper has others.
    pub(super) fn prepare(
        &self,
        mut pool: Option<&mut PoolPlayers<'_>>,
        snapshots: u32,
        microvms: u32,
    ) -> Result<Prepared, PlayersError> {
        let traces = self.trace.iter().map(|name| load(name)).collect::<Result<Vec<_>, _>>()?;
        let directory = medium::directory(self.dir.as_deref())?;
        let (list, dax) = (self.planner.join(","), medium::is_dax(directory.path()));
        let mut host = Host::of(directory.path())?;
        if let Some(pool) = &pool {
            host.medium = format!("{}; pool on {}", host.medium, pool.medium());
        }
        let mut players = Vec::new();
        for (number, trace) in traces.iter().enumerate() {
            let candidates = candidates(&list, trace, dax)?;
            let in_pool = candidates.iter().any(|planner| planner.store() != Store::Directory);
            let learns = candidates.iter().any(|planner| planner.learns());
            let other = learns && !self.same_input;
            let inputs = inputs(trace, self.trace.get(number).filter(|_| other))?;
            let mut copies: Vec<_> = (1..=snapshots.max(1))
                .map(|seed| Frozen {
                    trace: trace.name.clone(),
                    snapshot: directory.path().join(format!("player-{number}-{seed}")),
                    pooled: pool.as_deref_mut().filter(|_| in_pool).map(PoolPlayers::name),
                    recorded_on: None,
                    others: Vec::new(),
                })
                .collect();
            self.freeze(&copies, &inputs).map_err(|source| PlayersError::Freeze {
                trace: trace.name.clone(),
                source: Box::new(source),
            })?;
            if learns {
                let profile = learn(&copies[0].snapshot, &inputs)?;
                for player in &mut copies {
                    player.recorded_on = profile.inputs.first().cloned();
                    give(player, &profile)?;
                }
            }
            let others = copies.split_off(1);
            players.extend(
                copies.into_iter().map(|player| Frozen { others: others.clone(), ..player }),
            );
        }
        let (mut subjects, mut left_out) = subjects(&list, &players, pool.as_deref())?;
        if self.planner.iter().any(|planner| planner == "all") {
            if self.unsanitised {
                leave_out_sanitising(&mut subjects, &mut left_out);
            }
            if let Some(pool) = pool {
                leave_out_without_room(&mut subjects, &mut left_out, &players, pool, microvms)?;
            }
        }
        Ok(Prepared { players, subjects, left_out, host, directory })
    }

    /// Freezes a player into each place, each with content of its own: as many at a time as this host has processors, for a freeze uses one.
    fn freeze(&self, places: &[Frozen], inputs: &PlayerInputs) -> Result<(), FreezePlayerError> {
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

    fn freeze_one(
        &self,
        place: &Frozen,
        inputs: &PlayerInputs,
        seed: u64,
    ) -> Result<(), FreezePlayerError> {
        let options = PlayerOptions {
            leaves: self.leaves,
            gaps: self.gaps,
            seed,
            sanitised: !self.unsanitised,
        };
        let directory = Destination::Directory(place.snapshot.clone());
        let pool = place.pooled.clone();
        let pool = pool.map(|Pooled { socket, name }| Destination::Pool { socket, name });
        iter::once(directory).chain(pool).try_for_each(|destination| {
            freeze(inputs, &options, KVM_DEVICE.as_ref(), destination, self.dense).map(drop)
        })
    }
}

/// All planners that a list may come to mean, with what they need or without.
fn candidates(
    list: &str,
    trace: &NamedTrace,
    dax: bool,
) -> Result<Vec<Box<dyn Planner>>, PlayersError> {
    let (layout, zero_map) = (trace.trace.layout(), trace.trace.zero_map());
    let stored = (layout.pages() - zero_map.count()) * PAGE_SIZE;
    let image = ImageFacts { len: layout.total_bytes(), stored, dax, extent: None };
    let host = HostFacts::read()?;
    let input = PlanInput { layout, image, zero_map, profile: None, snapshot: None, host: &host };
    Ok(all_of(select(list, &input)?))
}

fn all_of(selection: Selection) -> Vec<Box<dyn Planner>> {
    let left_out = selection.left_out.iter().filter_map(|(name, _)| parse(name).ok());
    let left_out: Vec<_> = left_out.collect();
    selection.planners.into_iter().chain(left_out).collect()
}

/// The trace, and where the player is to learn, the function's other input: `-b` for `-a`, and the reverse.
fn inputs(trace: &NamedTrace, argument: Option<&String>) -> Result<PlayerInputs, PlayersError> {
    let alone = || Ok(PlayerInputs::new(vec![trace.clone()])?);
    let Some(other) = argument.and_then(|argument| other_input(argument)) else { return alone() };
    // Without another input, or with one of another memory, it learns on its own.
    let Ok(other) = load(&other) else { return alone() };
    PlayerInputs::new(vec![trace.clone(), other]).or_else(|_| alone())
}

fn other_input(argument: &str) -> Option<String> {
    let (stem, ending) =
        argument.strip_suffix(".trace").map_or((argument, ""), |stem| (stem, ".trace"));
    let swapped = |from: &str, to: &str| Some(format!("{}{to}{ending}", stem.strip_suffix(from)?));
    swapped("-a", "-b").or_else(|| swapped("-b", "-a"))
}

/// The profile of a player, recorded on the last of its inputs. A part that this host cannot record stays out: what needs it then
/// says so.
fn learn(path: &Path, inputs: &PlayerInputs) -> Result<Profile, PlayersError> {
    let snapshot = Snapshot::open(path)?;
    let input = inputs.iter().last().map(|trace| trace.name.as_str());
    let mut profile = snapshot.profile_or_empty()?;
    // Of a trace that does not say it, no page is known to be free.
    profile.free.get_or_insert_default();
    for recorder in recorders::of(&Part::ALL) {
        let recorded = record(&snapshot, input, recorder, KVM_DEVICE.as_ref(), &mut profile);
        if let Err(error) = recorded {
            output::note(&format!(
                "firn: a part of the profile is left out: {}",
                error_chain(&error)
            ));
        }
    }
    Ok(profile)
}

/// Gives a profile to a player whose memory is laid out as that of the player it was recorded of.
fn give(player: &Frozen, profile: &Profile) -> Result<(), PlayersError> {
    let id = Snapshot::open(&player.snapshot)?.manifest().description.id;
    set_profile(&player.snapshot, &Profile { snapshot: id, ..profile.clone() })?;
    if let Some(Pooled { socket, name }) = &player.pooled {
        let pooled = PooledSnapshot::open(socket, name, Verify::Never)?;
        let snapshot = pooled.snapshot.manifest().description.id;
        drop(pooled);
        set_pooled_profile(socket, name, &Profile { snapshot, ..profile.clone() })?;
    }
    Ok(())
}

/// Leaves out planners whose papers have guests that zero what they free, where these do not.
fn leave_out_sanitising(subjects: &mut Vec<Subject>, left_out: &mut Vec<LeftOut>) {
    for Subject { planner, .. } in subjects.extract_if(.., |subject| sanitises(&subject.planner)) {
        let reason =
            "its paper has a guest that zeroes what it frees: measure it without --unsanitised";
        left_out.push(LeftOut { planner, reason: reason.to_owned() });
    }
}

/// Leaves out planners that run in replicas, where the pool has no room for those of a batch.
fn leave_out_without_room(
    subjects: &mut Vec<Subject>,
    left_out: &mut Vec<LeftOut>,
    players: &[Frozen],
    pool: &mut PoolPlayers<'_>,
    microvms: u32,
) -> Result<(), PlayersError> {
    for pooled in players.iter().filter_map(|player| player.pooled.as_ref()) {
        let room = pool.room(pooled)?;
        if room >= u64::from(microvms) {
            continue;
        }
        let reason = format!(
            "the pool has room for {room} replicas, and {microvms} microVMs start together"
        );
        let replicas = |subject: &mut Subject| {
            parse(&subject.planner).is_ok_and(|planner| planner.store() == Store::Replica)
        };
        for Subject { planner, .. } in subjects.extract_if(.., replicas) {
            left_out.push(LeftOut { planner, reason: reason.clone() });
        }
    }
    Ok(())
}

/// The planners of a list, and those that `all` leaves out because they have no plan for one of the traces.
fn subjects(
    list: &str,
    players: &[Frozen],
    pool: Option<&PoolPlayers<'_>>,
) -> Result<(Vec<Subject>, Vec<LeftOut>), PlayersError> {
    let host = HostFacts::read()?;
    let (mut subjects, mut left_out) = (Vec::new(), Vec::<LeftOut>::new());
    for player in players {
        // What `all` may mean has to be there first; one whose file cannot be packed says why where it is planned.
        let snapshot = Snapshot::open(&player.snapshot)?;
        let profile = snapshot.profile()?;
        let (layout, zero_map) = (&snapshot.manifest().layout, snapshot.zero_map());
        let input = PlanInput {
            layout,
            image: ImageFacts::of_snapshot(&snapshot).map_err(PlayersError::Image)?,
            zero_map,
            profile: profile.as_ref(),
            snapshot: Some(&snapshot),
            host: &host,
        };
        let file = input.image;
        for planner in all_of(select(list, &input)?) {
            let _ = pack(&player.snapshot, &*planner);
        }
        // One that looked for a file before it was packed does not look again.
        let packed = Snapshot::open(&player.snapshot)?;
        let input = PlanInput { snapshot: Some(&packed), ..input };
        let pooled = pool.map(|pool| PlanInput { image: pool.image(file.len), ..input });
        let mut selection = select(list, &input)?;
        if let Some(pooled) = &pooled {
            // What has no plan for a directory may have one for a pool.
            selection.left_out.retain_mut(|(name, reason)| {
                let Ok(planner) = parse(name) else { return true };
                match planner.plan(pooled) {
                    Ok(_) if planner.store() != Store::Directory => {
                        selection.planners.push(planner);
                        false
                    }
                    Err(other) if planner.store() != Store::Directory => {
                        *reason = other;
                        true
                    }
                    _ => true,
                }
            });
        }
        subjects = Vec::new();
        for planner in &selection.planners {
            let in_pool = planner.store() != Store::Directory;
            let input = match (&pooled, in_pool) {
                (Some(pooled), true) => pooled,
                (None, true) => return Err(PlayersError::NoPool(planner.name())),
                (_, false) => &input,
            };
            // One without a plan fails loudly in its first run.
            let preloads = planner
                .plan(input)
                .is_ok_and(|plan| plan.schedule.iter().any(|step| step.work.is_preload()));
            let packs = planner.packing(input).is_ok_and(|packing| packing.is_some());
            subjects.push(Subject { planner: planner.name(), preloads, in_pool, packs });
        }
        for (planner, reason) in selection.left_out {
            if left_out.iter().all(|known| known.planner != planner) {
                left_out.push(LeftOut { planner, reason: error_chain(&reason) });
            }
        }
    }
    subjects.retain(|subject| left_out.iter().all(|left_out| left_out.planner != subject.planner));
    Ok((subjects, left_out))
}

#[cfg(test)]
#[path = "players_tests.rs"]
mod tests;
