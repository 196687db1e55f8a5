//! A pool on the command line: the socket of its manager, or its medium, whose manager is started
//! if it does not run.

use std::path::Path;

use anyhow::Context;
use firn_run::PoolManager;

/// Connects to the manager of `pool`, which it starts if necessary.
pub(crate) fn open(pool: &Path) -> anyhow::Result<PoolManager> {
    let program = std::env::current_exe().context("cannot find the path of this program")?;
    Ok(PoolManager::open(&program, pool)?)
}
