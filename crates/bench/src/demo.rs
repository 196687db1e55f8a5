//! A short comparison for a first look: players of three functions, thawed from files and from a
//! pool in memory.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use firn_pool::{
    CreateError, CreateOptions, MappedMedium, MediumError as PoolMediumError, MemfdOptions, Pool,
    Server, ServerError,
};
use serde::Serialize;
use thiserror::Error;

use crate::cache::Cache;
use crate::harness::Harness;
use crate::host::Host;
use crate::medium::{self, MediumError};
use crate::players::PlayersConfig;
use crate::text::{table, with_range};
use crate::thaw::{Row, ThawConfig, ThawError};
use crate::traces::{LoadTraceError, load};

/// The planners: from files, and from a pool.
const PLANNERS: [&str; 5] = ["firecracker", "faasnap", "pass_shared", "pass", "firn"];
/// A pool has room for this many times the guest memory: the snapshot, a second version of it while
/// its profile is attached, and replicas.
const POOL_FACTOR: u64 = 5;
/// Space in a pool for its metadata, the player's own memory and the tails of extents.
const POOL_MARGIN: u64 = 128 << 20;

/// A short comparison of planners. The page cache contains every page of the files.
#[derive(Clone, Debug)]
pub struct DemoConfig {
    /// Traces by the names that [`load`] knows.
    pub traces: Vec<String>,
    /// Runs of each planner on each trace.
    pub runs: u32,
    /// The directory in which the snapshots are made. By default it is the directory for temporary
    /// files.
    pub directory: Option<PathBuf>,
}

impl Default for DemoConfig {
    fn default() -> Self {
        let traces = ["hello-a", "json-a", "image-a"].map(str::to_owned).to_vec();
        Self { traces, runs: 3, directory: None }
    }
}

/// The results of a short comparison.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Demo {
    /// The host, the medium and the build.
    pub host: Host,
    /// Runs of each planner on each trace.
    pub runs: u32,
    /// One for each planner on each trace.
    pub rows: Vec<DemoRow>,
}

/// The time of one planner on one trace: from the request to the last page that the trace touches.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DemoRow {
    /// The trace.
    pub trace: String,
    /// The planner, with all its options.
    pub planner: String,
    /// Whether it maps the snapshot from the pool, and not from files.
    pub in_pool: bool,
    /// Median in ms.
    pub median_ms: f64,
    /// Shortest time in ms.
    pub min_ms: f64,
    /// Longest time in ms.
    pub max_ms: f64,
}

/// Why there is no comparison.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DemoError {
    /// A trace cannot be loaded.
    #[error(transparent)]
    Trace(#[from] LoadTraceError),
    /// There is no directory for the pool's socket.
    #[error(transparent)]
    Directory(#[from] MediumError),
    /// The pool's memory cannot be allocated.
    #[error("cannot allocate a pool in memory")]
    Medium(#[from] PoolMediumError),
    /// The pool cannot be created.
    #[error("cannot create a pool in memory")]
    Create(#[from] CreateError),
    /// The pool's manager cannot be started.
    #[error("cannot start a manager for the pool")]
    Serve(#[from] ServerError),
    /// A measurement failed.
    #[error(transparent)]
    Thaw(#[from] ThawError),
    /// No trace is configured.
    #[error("nothing to measure: give at least one trace")]
    Nothing,
}

impl DemoConfig {
    /// Measures trace by trace, each with a pool of its own.
    ///
    /// # Errors
    ///
    /// [`DemoError`].
    pub fn run(&self, harness: &Harness<'_>) -> Result<Demo, DemoError> {
        let directory = medium::directory(None)?;
        let mut rows = Vec::new();
        let mut host = None;
        for trace in &self.traces {
            let size = load(trace)?.trace.layout().total_bytes() * POOL_FACTOR + POOL_MARGIN;
            let memory = MappedMedium::memfd(MemfdOptions { size, huge: None, node: None })?;
            let pool = Pool::create(Arc::new(memory), &CreateOptions::default())?;
            let socket = directory.path().join("pool.sock");
            let _manager = Server::start(&socket, pool)?;
            let results = ThawConfig {
                players: PlayersConfig {
                    planners: PLANNERS.map(str::to_owned).to_vec(),
                    traces: vec![trace.clone()],
                    directory: self.directory.clone(),
                    pool: Some(socket),
                    ..PlayersConfig::default()
                },
                runs: self.runs,
                warm_up: 1,
                caches: vec![Cache::Cached],
                ..ThawConfig::default()
            }
            .run(harness)?;
            rows.extend(demo_rows(results.results));
            host = Some(results.host);
        }
        let host = host.ok_or(DemoError::Nothing)?;
        Ok(Demo { host, runs: self.runs, rows })
    }
}

/// A row for each planner. One of them was measured twice, to see the noise.
fn demo_rows(rows: Vec<Row>) -> impl Iterator<Item = DemoRow> {
    rows.into_iter().filter(|row| !row.is_repeated()).map(|row| DemoRow {
        trace: row.trace,
        planner: row.planner,
        in_pool: row.cache == Cache::Unused,
        median_ms: row.total_ms.median,
        min_ms: row.total_ms.min,
        max_ms: row.total_ms.max,
    })
}

impl Demo {
    /// One table with a row for each planner and a column for each trace, with the host.
    #[must_use]
    pub fn text(&self) -> String {
        let mut traces: Vec<&str> = Vec::new();
        let mut planners: Vec<(&str, bool)> = Vec::new();
        let mut cells = BTreeMap::new();
        for row in &self.rows {
            if !traces.contains(&row.trace.as_str()) {
                traces.push(&row.trace);
            }
            if !planners.contains(&(row.planner.as_str(), row.in_pool)) {
                planners.push((&row.planner, row.in_pool));
            }
            let DemoRow { median_ms, min_ms, max_ms, .. } = *row;
            let cell = with_range(median_ms, [min_ms, max_ms]);
            cells.insert((row.planner.as_str(), row.trace.as_str()), cell);
        }
        let head: Vec<&str> =
            ["planner", "snapshot in"].into_iter().chain(traces.clone()).collect();
        let lines = planners.into_iter().map(|(planner, in_pool)| {
            let place = if in_pool { "pool in memory" } else { "files, in the page cache" };
            let row = [planner.to_owned(), place.to_owned()].into_iter();
            let cell = |trace: &&str| cells.get(&(planner, *trace)).cloned().unwrap_or_default();
            row.chain(traces.iter().map(cell)).collect()
        });
        let lines: Vec<Vec<String>> = lines.collect();
        format!(
            "{}\n{}\nRequest to last page of a player that replays a recorded invocation, in ms: median of {} runs \
             (minimum to maximum)",
            self.host.line(),
            table(&head, &lines),
            self.runs
        )
    }
}

#[cfg(test)]
#[path = "demo_tests.rs"]
mod tests;
