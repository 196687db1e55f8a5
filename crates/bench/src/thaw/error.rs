//! Why a session has no results.

use std::path::PathBuf;

use firn_memory::planners::{PackError, ParsePlannerError};
use firn_pool::ClientError;
use firn_run::StartError;
use thiserror::Error;

use super::stock::StockError;
use crate::batch::BatchError;
use crate::cache::CacheError;

/// Why a session has no results. A single failure ends it, so that no average hides one.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SessionError {
    /// A microVM failed.
    #[error("{planner} failed on {trace} in run {run}")]
    Batch {
        /// The planner.
        planner: String,
        /// The trace.
        trace: String,
        /// The run, from 1, the warm-up included.
        run: u32,
        /// The failure.
        source: BatchError,
    },
    /// A monitor cannot stand by, or make a ready clone.
    #[error("cannot prepare a monitor for {planner} on {trace}")]
    StandBy {
        /// The planner.
        planner: String,
        /// The trace.
        trace: String,
        /// The reason.
        source: Box<StartError>,
    },
    /// The other program failed.
    #[error("{program} failed on {trace} in run {run}")]
    Stock {
        /// The program.
        program: PathBuf,
        /// The trace.
        trace: String,
        /// The run, from 1.
        run: u32,
        /// The failure.
        source: Box<StockError>,
    },
    /// The page cache cannot be brought into the required state.
    #[error("cannot measure {planner} on {trace} in run {run}")]
    Cache {
        /// The planner.
        planner: String,
        /// The trace.
        trace: String,
        /// The run, from 1, the warm-up included.
        run: u32,
        /// The reason.
        source: CacheError,
    },
    /// A planner cannot be parsed.
    #[error(transparent)]
    Planner(#[from] ParsePlannerError),
    /// The file that a planner maps cannot be packed.
    #[error("cannot pack the file that {planner} maps for the player of {trace}")]
    Pack {
        /// The planner.
        planner: String,
        /// The trace.
        trace: String,
        /// The reason.
        source: Box<PackError>,
    },
    /// The pool's manager returned an error.
    #[error("cannot wait for the pool to be ready")]
    Pool(#[from] ClientError),
    /// The files of a snapshot cannot be opened or evicted.
    #[error("cannot open the player of {trace}")]
    Player {
        /// The trace.
        trace: String,
        /// The reason.
        source: CacheError,
    },
    /// The session is empty.
    #[error("nothing to measure: give at least one planner, one trace and one run")]
    Nothing,
}
