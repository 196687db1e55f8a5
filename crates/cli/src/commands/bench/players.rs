//! Arguments for the players of a measurement.

use std::path::{Path, PathBuf};

use clap::Args;

use firn_bench::PlayersConfig;
use firn_bench::player::{GapFactor, Leaves, Repeats};
use firn_run::PoolManager;

use crate::pool_at;

/// The players that are measured, and the planners.
#[derive(Debug, Args)]
pub(super) struct PlayersArgs {
    /// Planners as NAME[:KEY=VALUE,...], separated by commas; `all` selects every planner that this
    /// host can run
    #[arg(long, value_name = "PLANNER", default_value = "all")]
    planner: Vec<String>,
    /// A trace that firn contains, sequential-read:SIZE, sequential-write:SIZE, or the path of a
    /// .trace file; for several traces repeat the option or separate them by commas
    #[arg(long, value_name = "NAME", required = true, value_delimiter = ',')]
    trace: Vec<String>,
    /// Directory for the players' snapshots, on the medium to measure; default: the directory for
    /// temporary files
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Pool for the planners that map snapshots from one: its medium, whose manager is started if
    /// none runs, or its manager's socket. These planners use no page cache
    #[arg(long, value_name = "PATH")]
    pool: Option<PathBuf>,
    /// Leaves of the guest's own page tables: recorded, 4k or 2m
    #[arg(long, value_name = "LEAVES", default_value_t = Leaves::Recorded)]
    leaves: Leaves,
    /// Factor for the recorded work between touches; 0 measures page faults alone
    #[arg(long, value_name = "FACTOR", default_value_t = GapFactor::NONE)]
    gaps: GapFactor,
    /// Store zero pages in the images too
    #[arg(long)]
    dense: bool,
    /// Fill the pages that the guest held free with content; most of them were zero in the recorded
    /// guest. faasnap keeps a guest of its own, as its paper's guest zeroes what it frees
    #[arg(long)]
    unsanitised: bool,
    /// Record profiles on the replayed input, not on the function's other input
    #[arg(long)]
    same_input: bool,
    /// Also replay repeated accesses: those that the trace has (recorded), or one after each N
    /// instructions (or ns) of replayed work, of a random cache line of a random page among those
    /// touched so far
    #[arg(long, value_name = "recorded|N")]
    again: Option<Repeats>,
}

/// The socket of a pool's manager, which is kept running as long as the second value lives.
pub(super) fn open(pool: Option<&Path>) -> anyhow::Result<(Option<PathBuf>, Option<PoolManager>)> {
    let pool = pool.map(pool_at::open).transpose()?;
    Ok((pool.as_ref().map(|pool| pool.socket().to_owned()), pool))
}

impl PlayersArgs {
    /// Opens the pool, and converts the arguments.
    pub(super) fn config(&self) -> anyhow::Result<(PlayersConfig, Option<PoolManager>)> {
        let (socket, pool) = open(self.pool.as_deref())?;
        let config = PlayersConfig {
            planners: self.planner.clone(),
            traces: self.trace.clone(),
            directory: self.dir.clone(),
            pool: socket,
            leaves: self.leaves,
            gaps: self.gaps,
            dense: self.dense,
            unsanitised: self.unsanitised,
            same_input: self.same_input,
            again: self.again,
            ..PlayersConfig::default()
        };
        Ok((config, pool))
    }
}
