//! Players of traces, frozen for a measurement, and the planners that are to thaw them.

use std::path::PathBuf;

use clap::Args;
use tempfile::TempDir;
use thiserror::Error;

use firn_bench::player::{
    FreezePlayerError, GapFactor, Leaves, PlayerInputs, PlayerInputsError, PlayerOptions, freeze,
};
use firn_bench::traces::{LoadTraceError, NamedTrace, load};
use firn_bench::{Frozen, Host, HostError, LeftOut, Subject};
use firn_memory::planners::{ImageFacts, ParsePlannerError, PlanInput, Store, parse, select};
use firn_memory::{HostFacts, HostFactsError};
use firn_snapshot::PAGE_SIZE;
use firn_vmm::{Destination, KVM_DEVICE, error_chain};

use super::in_pool::{InPoolError, PoolPlayers};
use super::medium::{self, MediumError};
use crate::pool_at::{PoolAt, PoolAtError};

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

    /// Freezes a player of each trace, in a directory and, where a planner maps from there, in the pool.
    pub(super) fn prepare(
        &self,
        mut pool: Option<&mut PoolPlayers<'_>>,
    ) -> Result<Prepared, PlayersError> {
        let traces = self.trace.iter().map(|name| load(name)).collect::<Result<Vec<_>, _>>()?;
        let directory = medium::directory(self.dir.as_deref())?;
        let (list, dax) = (self.planner.join(","), medium::is_dax(directory.path()));
        let (subjects, left_out) = subjects(&list, &traces, dax, pool.as_deref())?;
        let mut host = Host::of(directory.path())?;
        if let Some(pool) = &pool {
            host.medium = format!("{}; pool on {}", host.medium, pool.medium());
        }
        let options = PlayerOptions { leaves: self.leaves, gaps: self.gaps, ..Default::default() };
        let mut players = Vec::new();
        for (number, trace) in traces.iter().enumerate() {
            let snapshot = directory.path().join(format!("player-{number}"));
            let destination = Destination::Directory(snapshot.clone());
            let inputs = PlayerInputs::new(vec![trace.clone()])?;
            freeze(&inputs, &options, KVM_DEVICE.as_ref(), destination, self.dense).map_err(
                |source| PlayersError::Freeze {
                    trace: trace.name.clone(),
                    source: Box::new(source),
                },
            )?;
            let pooled = match &mut pool {
                Some(pool) if subjects.iter().any(|subject| subject.in_pool) => {
                    Some(pool.freeze(&inputs, &trace.name, &options)?)
                }
                _ => None,
            };
            players.push(Frozen { trace: trace.name.clone(), snapshot, pooled });
        }
        Ok(Prepared { players, subjects, left_out, host, directory })
    }
}

/// The planners of a list, and those that `all` leaves out because they have no plan for one of the traces.
fn subjects(
    list: &str,
    traces: &[NamedTrace],
    dax: bool,
    pool: Option<&PoolPlayers<'_>>,
) -> Result<(Vec<Subject>, Vec<LeftOut>), PlayersError> {
    let host = HostFacts::read()?;
    let (mut subjects, mut left_out) = (Vec::new(), Vec::<LeftOut>::new());
    for NamedTrace { trace, .. } in traces {
        let (layout, zero_map) = (trace.layout(), trace.zero_map());
        let stored = (layout.pages() - zero_map.count()) * PAGE_SIZE;
        let file = ImageFacts { len: layout.total_bytes(), stored, dax, extent: None };
        let input =
            PlanInput { layout, image: file, zero_map, profile: None, snapshot: None, host: &host };
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
            subjects.push(Subject { planner: planner.name(), preloads, in_pool });
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
