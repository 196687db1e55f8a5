//! The daemon's microVMs: one `firn` process each, started for a request, kept for the next ones, ended when idle.

mod fleet;
mod ledger;
mod monitor;
mod run;

pub(crate) use fleet::{AcquireError, Fleet, Limits, Wanted};
pub(crate) use monitor::Launcher;
pub(crate) use run::{InvokeFailure, Invoked, Request, invoke, publish};
