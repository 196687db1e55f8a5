//! Measurements of restores: the papers' experiments, their results, tables and pictures.
//!
//! The measuring instrument is the [`player`], a freestanding guest that repeats the page accesses
//! of a recorded [`Trace`](firn_memory::trace::Trace) at native speed on any KVM. [`traces`] loads
//! traces by name.
//!
//! Each measurement is a plain configuration with defaults and a `run` method: [`ThawConfig`]
//! compares planners on players, [`CapacityConfig`] counts the microVMs in a memory budget,
//! [`PaperConfig`](paper::PaperConfig) repeats the papers' experiments,
//! [`FloorConfig`](floor::FloorConfig) measures the overhead of the player itself, and
//! [`FreezeConfig`](freeze::FreezeConfig) measures freezes. Every microVM is a process of its own,
//! the page cache is in a verified state, and a single wrong page ends a measurement without
//! results. Results are serde types, which render themselves as text, as Markdown and as SVG.
//! Nothing here prints; a [`Progress`] receives the progress.
//!
//! ```no_run
//! use firn_bench::{Harness, Interrupt, PlayersConfig, Quiet, ThawConfig};
//!
//! let interrupt = Interrupt::catch()?;
//! let program = "target/release/firn-monitor".into();
//! let harness = Harness { program, interrupt: &interrupt, progress: &Quiet };
//! let players = PlayersConfig { traces: vec!["json-a".to_owned()], ..PlayersConfig::default() };
//! let results = ThawConfig { players, runs: 3, ..ThawConfig::default() }.run(&harness)?;
//! println!("{}", results.text());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod batch;
mod bootstrap;
mod cache;
mod capacity;
mod cgroup;
mod compare;
mod cost;
pub mod demo;
pub mod floor;
mod free_reads;
pub mod freeze;
mod ftrace;
mod harness;
mod host;
mod medium;
pub mod paper;
pub mod picture;
pub mod player;
mod players;
mod progress;
mod result_file;
mod saved;
mod stats;
#[cfg(test)]
mod testing;
mod text;
mod thaw;
pub mod tier;
pub mod traces;

pub use batch::{BatchError, Interrupt, Jails};
pub use cache::{Cache, CacheError};
pub use capacity::{
    Budget, Capacities, CapacitiesError, CapacityConfig, CapacityError, CapacityRow, Carried,
    FillError,
};
pub use cgroup::{GroupUsage, MemoryLimit};
pub use compare::{CompareError, Compared, ComparedRow, Measured, Verdict};
pub use cost::{CostRow, Costs, Prices};
pub use ftrace::FtraceError;
pub use harness::Harness;
pub use host::{Host, HostError, KvmKind};
pub use medium::MediumError;
pub use players::{FrozenPlayer, LeftOut, PlayersConfig, PlayersError, PooledPlayer, Subject};
pub use progress::{Progress, Quiet};
pub use result_file::{ResultFile, ResultFileError};
pub use saved::ReadResultsError;
pub use stats::{Comparison, Summary};
pub use text::table;
pub use thaw::{
    Noise, OpenLoop, RESULTS_VERSION, Results, Row, Session, SessionError, StockError, StockPlayer,
    StockRow, StockRun, ThawConfig, ThawError, draw_sessions, sessions_markdown,
};
