//! The daemon's microVMs: one `firn` process each, started for a request, kept for the next ones, ended when idle.

mod fleet;
mod ledger;
mod members;
mod monitor;
mod run;
mod standby;
mod status;
mod tally;

pub(crate) use fleet::{AcquireError, Fleet, Limits, Wanted};
pub(crate) use monitor::Launcher;
pub(crate) use run::{InvokeFailure, Invoked, Report, Request, invoke, publish};
pub(crate) use standby::Standbys;
pub use standby::ThawOrder;
pub use status::{DaemonStatus, Latency, MemoryStatus, MonitorsStatus, VersionStatus};
