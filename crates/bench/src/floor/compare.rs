//! Pairs of the loop and the player.

use std::path::PathBuf;

use firn_base::GuestRange;
use firn_memory::planners::{self, ParsePlannerError, PlanSnapshotError, parse};
use firn_memory::{ExecuteError, Leaf, Sources, execute};
use firn_snapshot::{OpenError, Snapshot};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::{FloorAccess, FloorError, FloorRun, run};
use crate::batch::{self, BatchError, Interrupt, Player};
use crate::cache::{Cache, CacheError, SnapshotFiles};
use crate::host::Host;
use crate::players::Place;
use crate::stats::{Comparison, Summary};
use firn_run::StartReport;
use firn_run::jail::{Jail, JailMode};

/// The loop and the player that are compared.
#[derive(Clone, Debug)]
pub(super) struct FloorComparison {
    /// The `firn-monitor` program: each player is a process of it.
    pub(super) program: PathBuf,
    /// The snapshot of a player that touches every page of `range` once, in order, with the same
    /// access through leaves of the same size.
    pub(super) snapshot: PathBuf,
    /// The memory that both touch.
    pub(super) range: GuestRange,
    /// How both touch a page.
    pub(super) access: FloorAccess,
    /// Leaves of both guests' page tables.
    pub(super) leaf: Leaf,
    /// The planner that both use.
    pub(super) planner: String,
    /// The number of pairs.
    pub(super) pairs: u32,
}

/// The results of the comparison. The player's time is that of its replay, from the resume to its
/// last touch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FloorResults {
    /// The host, the medium and the build.
    pub host: Host,
    /// The planner that both used.
    pub planner: String,
    /// Pages that each of them touches.
    pub pages: u64,
    /// Time of the loop per page, in ns.
    pub floor_ns_per_page: Summary,
    /// Time of the player per page, in ns.
    pub player_ns_per_page: Summary,
    /// The player divided by the loop, pair by pair.
    pub ratio: Comparison,
    /// The player less the loop, in ns per page, pair by pair.
    pub difference_ns_per_page: Comparison,
    /// KVM's faults in the last pair: of the loop, and of the player.
    pub kvm_page_faults: [u64; 2],
    /// Leaves of 2 MiB in KVM's tables at the end of the last pair: of the loop, and of the player.
    pub kvm_pages_2m: [u64; 2],
}

/// Why a comparison has no results.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CompareError {
    /// The snapshot cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The planner cannot be parsed.
    #[error(transparent)]
    Planner(#[from] ParsePlannerError),
    /// The planner has no plan.
    #[error(transparent)]
    Plan(#[from] PlanSnapshotError),
    /// The plan cannot be executed.
    #[error(transparent)]
    Execute(#[from] ExecuteError),
    /// The page cache cannot be filled.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The loop failed.
    #[error("the loop failed in pair {pair}")]
    Floor {
        /// The pair, from 1.
        pair: u32,
        /// The reason.
        source: FloorError,
    },
    /// The player failed.
    #[error("the player failed in pair {pair}")]
    Player {
        /// The pair, from 1.
        pair: u32,
        /// The reason.
        source: BatchError,
    },
    /// The number of pairs is 0.
    #[error("nothing to compare: give at least one pair")]
    Nothing,
}

/// Time of the timed loop for each page that the player touched.
fn ns_per_page(player: &StartReport) -> f64 {
    let pages = player.replay.as_ref().map_or(0, |replay| replay.pages);
    player.times.replay_ns.unwrap_or_default() as f64 / pages.max(1) as f64
}

impl FloorComparison {
    /// Runs the pairs on a fully cached snapshot. Loop and player are first in turn. `done` is
    /// called after each pair.
    pub(super) fn run(
        &self,
        host: Host,
        interrupt: &Interrupt,
        mut done: impl FnMut(),
    ) -> Result<FloorResults, CompareError> {
        let snapshot = Snapshot::open(&self.snapshot)?;
        let files = SnapshotFiles::open(&self.snapshot, None)?;
        let jail = Jail::new(JailMode::Auto);
        let (mut floors, mut players) = (Vec::new(), Vec::new());
        for pair in 1..=self.pairs {
            if pair % 2 == 1 {
                floors.push(self.floor(&snapshot, &files, pair)?);
                players.push(self.player(&files, pair, interrupt, &jail)?);
            } else {
                players.push(self.player(&files, pair, interrupt, &jail)?);
                floors.push(self.floor(&snapshot, &files, pair)?);
            }
            done();
        }
        let (Some(floor), Some(player)) = (floors.last(), players.last()) else {
            return Err(CompareError::Nothing);
        };
        let floor_ns: Vec<f64> =
            floors.iter().map(|floor| floor.ns as f64 / floor.pages as f64).collect();
        let player_ns: Vec<f64> = players.iter().map(ns_per_page).collect();
        let pairs = || player_ns.iter().zip(&floor_ns);
        let ratios: Vec<f64> = pairs().map(|(player, floor)| player / floor).collect();
        let differences: Vec<f64> = pairs().map(|(player, floor)| player - floor).collect();
        Ok(FloorResults {
            host,
            planner: player.planner.clone(),
            pages: floor.pages,
            floor_ns_per_page: Summary::of(&floor_ns).ok_or(CompareError::Nothing)?,
            player_ns_per_page: Summary::of(&player_ns).ok_or(CompareError::Nothing)?,
            ratio: Comparison::of(&ratios).ok_or(CompareError::Nothing)?,
            difference_ns_per_page: Comparison::of(&differences).ok_or(CompareError::Nothing)?,
            kvm_page_faults: [floor.kvm.page_faults, player.counters.kvm.page_faults],
            kvm_pages_2m: [floor.kvm.pages_2m, player.counters.kvm.pages_2m],
        })
    }

    /// One run of the loop, on memory that the planner restored.
    fn floor(
        &self,
        snapshot: &Snapshot,
        files: &SnapshotFiles,
        pair: u32,
    ) -> Result<FloorRun, CompareError> {
        files.prepare(Cache::Cached, false)?;
        let plan = planners::plan(snapshot, None, &*parse(&self.planner)?)?;
        let executed = execute(&plan, &Sources::of(snapshot, None)?)?;
        let (run, _) = run(&executed.memory, self.range, self.access, self.leaf)
            .map_err(|source| CompareError::Floor { pair, source })?;
        Ok(run)
    }

    /// One thaw of the player.
    fn player(
        &self,
        files: &SnapshotFiles,
        pair: u32,
        interrupt: &Interrupt,
        jail: &Jail,
    ) -> Result<StartReport, CompareError> {
        files.prepare(Cache::Cached, false)?;
        batch::run(
            &[Player {
                program: &self.program,
                snapshot: Place::Directory(&self.snapshot),
                planner: &self.planner,
                preloaded: false,
                faults: false,
                input: None,
                warm: false,
                unchecked: false,
                jail,
            }],
            1,
            1,
            Vec::new(),
            interrupt,
            || (),
        )
        .map(|mut batch| batch.reports.swap_remove(0))
        .map_err(|source| CompareError::Player { pair, source })
    }
}
