//! The planners of a measurement: those that a list names, less those that `all` leaves out.

use std::iter;
use std::path::Path;

use serde::{Deserialize, Serialize};

use firn_base::{PAGE_SIZE, error_chain};
use firn_memory::HostFacts;
use firn_memory::planners::{
    ImageFacts, PlanInput, Planner, Selection, Store, pack, parse, select,
};
use firn_snapshot::Snapshot;

use super::PlayersError;
use super::frozen::{FrozenPlayer, Subject};
use super::pool::PoolPlayers;
use crate::traces::NamedTrace;

/// FaaSnap's guest zeroes the pages that it frees. In comparisons of guests that do not, FaaSnap is
/// measured on one that does.
const SANITISES: &str = "faasnap";

/// A planner that was not measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    /// The planner.
    pub planner: String,
    /// The reason.
    pub reason: String,
}

/// Whether a planner's paper has a guest that zeroes the pages that it frees.
pub(super) fn sanitises(planner: &str) -> bool {
    planner.starts_with(SANITISES)
}

/// Whether each microVM of a planner runs in a replica of its own.
pub(crate) fn replicates(planner: &str) -> bool {
    parse(planner).is_ok_and(|planner| planner.store() == Store::Replica)
}

/// Every planner that a list can select, also those that lack something so far.
pub(super) fn candidates(
    list: &str,
    trace: &NamedTrace,
    dax: bool,
) -> Result<Vec<Box<dyn Planner>>, PlayersError> {
    let (layout, zero_map) = (trace.trace.layout(), trace.trace.zero_map());
    let stored = (layout.pages() - zero_map.count()) * PAGE_SIZE;
    let image = ImageFacts { len: layout.total_bytes(), stored, dax, ..ImageFacts::default() };
    let host = HostFacts::read()?;
    let input = PlanInput {
        layout,
        image,
        zero_map,
        profile: None,
        snapshot: None,
        copies: None,
        host: &host,
    };
    Ok(all_of(select(list, &input)?))
}

fn all_of(selection: Selection) -> Vec<Box<dyn Planner>> {
    let left_out = selection.left_out.iter().filter_map(|(name, _)| parse(name).ok());
    let left_out: Vec<_> = left_out.collect();
    selection.planners.into_iter().chain(left_out).collect()
}

/// The planners of a list, and those that `all` leaves out because they have no plan for one of the
/// players.
pub(super) fn subjects(
    list: &str,
    players: &[FrozenPlayer],
    pool: Option<&PoolPlayers<'_>>,
) -> Result<(Vec<Subject>, Vec<LeftOut>), PlayersError> {
    let host = HostFacts::read()?;
    let (mut subjects, mut left_out) = (Vec::new(), Vec::<LeftOut>::new());
    for player in players {
        let own = player.sanitised.as_deref();
        let thaws = |planner: &str| own.is_none() || !sanitises(planner);
        let all = of_snapshot(list, &player.snapshot, &host, pool, thaws)?;
        let own = own.map(|own| of_snapshot(list, &own.snapshot, &host, None, sanitises));
        subjects = Vec::new();
        for (found, lacking) in iter::once(all).chain(own.transpose()?) {
            subjects.extend(found);
            for new in lacking {
                if left_out.iter().all(|known| known.planner != new.planner) {
                    left_out.push(new);
                }
            }
        }
    }
    subjects.retain(|subject| left_out.iter().all(|left_out| left_out.planner != subject.planner));
    Ok((subjects, left_out))
}

/// Those planners of a list that thaw a snapshot, and those of them that have no plan for it.
fn of_snapshot(
    list: &str,
    path: &Path,
    host: &HostFacts,
    pool: Option<&PoolPlayers<'_>>,
    thaws: impl Fn(&str) -> bool,
) -> Result<(Vec<Subject>, Vec<LeftOut>), PlayersError> {
    let select = |input: &PlanInput<'_>| {
        select(list, input).map(|mut selection| {
            selection.planners.retain(|planner| thaws(&planner.name()));
            selection.left_out.retain(|(name, _)| thaws(name));
            selection
        })
    };
    // The packed files have to exist before the planners are selected. A file that cannot be packed
    // is reported by its plan.
    let snapshot = Snapshot::open(path)?;
    let profile = snapshot.profile()?;
    let (layout, zero_map) = (&snapshot.manifest().layout, snapshot.zero_map());
    let input = PlanInput {
        layout,
        image: ImageFacts::of_snapshot(&snapshot, None).map_err(PlayersError::Image)?,
        zero_map,
        profile: profile.as_ref(),
        snapshot: Some(&snapshot),
        copies: None,
        host,
    };
    let file = input.image;
    for planner in all_of(select(&input)?) {
        let _ = pack(path, &*planner);
    }
    // A snapshot that did not find a packed file does not look for it again.
    let packed = Snapshot::open(path)?;
    let input = PlanInput { snapshot: Some(&packed), ..input };
    let pooled = pool.map(|pool| PlanInput { image: pool.image(file.len), ..input });
    let mut selection = select(&input)?;
    if let Some(pooled) = &pooled {
        // A planner without a plan for a directory may have one for a pool.
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
    let mut subjects = Vec::new();
    for planner in &selection.planners {
        let in_pool = planner.store() != Store::Directory;
        let input = match (&pooled, in_pool) {
            (Some(pooled), true) => pooled,
            (None, true) => return Err(PlayersError::NoPool(planner.name())),
            (_, false) => &input,
        };
        // A planner without a plan fails in its first run, with the reason.
        let preloads = planner
            .plan(input)
            .is_ok_and(|plan| plan.schedule.iter().any(|step| step.work.is_preload()));
        let packs = planner.packing(input).is_ok_and(|packing| packing.is_some());
        subjects.push(Subject {
            planner: planner.name(),
            preloads,
            in_pool,
            packs,
            ready: false,
            jailed: true,
        });
    }
    let left_out = selection.left_out.into_iter();
    let left_out =
        left_out.map(|(planner, reason)| LeftOut { planner, reason: error_chain(&reason) });
    Ok((subjects, left_out.collect()))
}

/// Leaves out the planners that run in replicas, if the pool has no room for the replicas of a
/// batch.
pub(super) fn leave_out_without_room(
    subjects: &mut Vec<Subject>,
    left_out: &mut Vec<LeftOut>,
    room: u32,
    microvms: u32,
) {
    if room >= microvms {
        return;
    }
    let reason =
        format!("the pool has room for {room} replicas, and {microvms} microVMs start together");
    for Subject { planner, .. } in subjects.extract_if(.., |subject| subject.replicates()) {
        left_out.push(LeftOut { planner, reason: reason.clone() });
    }
}
