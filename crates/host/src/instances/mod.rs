//! The daemon's microVMs: one `firn` process each, started for a request, kept for the next ones, ended when idle.

mod fleet;
mod images;
mod ledger;
mod members;
mod monitor;
mod run;
mod standby;
mod status;
mod tally;

pub(crate) use fleet::{AcquireError, Fleet, Limits};
pub(crate) use images::{IMAGE_VARIABLE, ImageError, Images};
pub(crate) use monitor::{Launcher, StartError};
#[cfg(test)]
pub(crate) use run::Taken;
pub(crate) use run::{InvokeFailure, Invoked, LoadFailure, Report, Request, invoke, publish};
pub(crate) use standby::Standbys;
pub use standby::ThawOrder;
pub use status::{DaemonStatus, Latency, MemoryStatus, MonitorsStatus, VersionStatus};
