//! Experiments of the papers: what is measured, how, and what is made of the numbers.
//!
//! The measuring instrument is the [`player`], a freestanding guest that repeats the page accesses of a recorded
//! [`Trace`](firn_memory::trace::Trace) at native speed on any KVM. [`traces`] finds a trace by its name. [`floor`] is a
//! bare loop, which says how much of a measurement is the instrument.
//!
//! A [`Session`] compares planners on players: one process for each microVM, planners in turn, the page cache in a
//! known state, and no result where a single page was wrong. [`Results`] are its JSON, [`svg`] draws them.

mod batch;
mod cache;
mod capacity;
mod cgroup;
pub mod chart;
mod cost;
pub mod experiments;
pub mod floor;
mod free_reads;
mod host;
pub mod player;
mod results;
mod stats;
pub mod svg;
pub mod table;
#[cfg(test)]
mod testing;
mod thaw;
pub mod traces;

pub use batch::{BatchError, Interrupt};
pub use cache::{Cache, CacheError};
pub use capacity::{Capacities, Capacity, CapacityError, CapacityRow, Carried};
pub use cgroup::{CgroupError, GroupUsage, MemoryLimit};
pub use cost::{CostRow, Prices, costs};
pub use host::{Host, HostError, KvmKind};
pub use results::{LeftOut, Noise, Results, Row};
pub use stats::{Comparison, Summary};
pub use thaw::{Frozen, Pooled, Session, SessionError, Subject};
