//! The daemon's microVMs: one `firn` process each, started for a request, kept for later requests,
//! ended when idle.

mod cpu;
mod fleet;
mod forecast;
mod lambda_log;
mod launch_errors;
mod launcher;
mod ledger;
mod microvm;
mod network;
mod pool;
mod processes;
mod ready;
mod report;
mod request_stats;
mod requests;
mod scratch;
mod snapshot_keys;
mod standby;
mod status;
mod stream;
mod table;
mod usage;

pub(crate) use cpu::Cpus;
pub use fleet::AcquireError;
#[cfg(test)]
pub(crate) use fleet::LeaseRequest;
pub(crate) use fleet::{Fleet, Limits};
#[cfg(test)]
pub(crate) use launch_errors::FreezeError;
pub use launch_errors::LaunchError;
pub use launcher::BootFiles;
pub(crate) use launcher::{Frozen, Launcher, guest_mib};
pub use ledger::Shortage;
pub use network::{FindTapsError, FunctionNetwork, TapDevices};
pub(crate) use pool::SnapshotPool;
pub(crate) use ready::ReadyClones;
pub use report::InvocationReport;
#[cfg(test)]
pub(crate) use report::ProcessUsage;
pub use requests::{InvokeFailure, Invoked, LoadFailure};
pub(crate) use requests::{PublishFailure, Request, invoke, provide, publish};
pub(crate) use scratch::Scratch;
pub(crate) use snapshot_keys::SnapshotKeys;
pub(crate) use standby::Standbys;
#[cfg(test)]
pub(crate) use standby::ThawKey;
pub use status::{DaemonStatus, Latency, MemoryStatus, MonitorsStatus, VersionStatus};
pub use stream::{AnswerEvent, AnswerStream, Answering, Served};
pub(crate) use stream::{AnswerSender, answering};
